"""The runtime's structures, as runtime.h and entry.h declare them."""

from __future__ import annotations

import ctypes


class Range(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "end", "writes", "reads")]


class Module(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("image_begin", "image_end", "shared_begin", "shared_end")
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("checked", ctypes.c_int32),
        ("run", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("module", Module),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_int32),
    ]


class Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("other_thread", ctypes.c_uint32 * 3),
        ("has_other", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint32),
        ("frames", ctypes.c_uint64 * 24),
        ("other_frames", ctypes.c_uint64 * 24),
        ("text", ctypes.c_char * 512),
    ]


class Parameter(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("pointee", ctypes.c_char), ("bytes", ctypes.c_int32)]

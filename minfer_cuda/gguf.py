"""GGUF files (versions 2 and 3, whole or split), read through a memory map.

A model file is untrusted: every count, length, offset and size is compared with the bytes that the
file really has before it is used. Format: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from minfer_cuda.errors import ModelFileError
from minfer_cuda.quants import QuantType, quant_type

Value = Any  # int, float, bool, str, or a list of these (of lists of these)

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 2
MAX_HEADER_BYTES = 1 << 28  # metadata and tensor table; a 152k vocabulary takes 6 MB
MAX_NAME = 1024  # characters of a key or tensor name

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MIN_VALUE_BYTES = {_STRING: 8, _ARRAY: 12}
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what its bytes mean."""

    name: str
    quant: QuantType
    shape: tuple[int, ...]  # NumPy order: (N, K) for a matrix of N rows out, K columns in
    offset: int  # from the start of its part's file
    nbytes: int
    part: int = 0  # index into the file's parts

    @property
    def type_id(self) -> int:
        return self.quant.type_id

    @property
    def type_name(self) -> str:
        return self.quant.name

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.quant.block_size * self.quant.block_bytes


class GGUFFile:
    """An open model: metadata, tensor table, and the tensors' bytes.

    Use it as a context manager. Arrays from `data` stay valid after `close`.
    """

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self.path: Path = parts[0].path
        self.metadata: dict[str, Value] = parts[0].metadata
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise ModelFileError(f"{part.path}: tensor {tensor.name} is in two parts")
                self.tensors[tensor.name] = tensor

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Read the header of `path` and, for part 1 of a split model, of its other parts.

        Raises ModelFileError for whatever is not a sound GGUF file, with the reason, and
        UnsupportedModelError for a tensor type that nothing here knows.
        """
        parts = [_Part(Path(path), 0)]
        try:
            for index, sibling in enumerate(_other_parts(parts[0]), start=1):
                parts.append(_Part(sibling, index))
            _check_split(parts)
            return cls(parts)
        except BaseException:
            for part in parts:
                part.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Of all parts together."""
        return sum(part.size for part in self._parts)

    @property
    def n_parts(self) -> int:
        return len(self._parts)

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor: a read-only uint8 (nbytes) view of the mapped file.

        Raises ModelFileError where the file has no such tensor, or was cut or written to since it
        was opened (reading a mapped page behind the end of a file kills the process).
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: there is no tensor {name}")
        return self._parts[info.part].view(info)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Part:
    """One file: header parsed, contents mapped."""

    def __init__(self, path: Path, index: int):
        self.path = path
        self.index = index
        self._fd, self.size, self._changed = _open_file(path)
        try:
            self._map: mmap.mmap | None = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            reader = _Reader(self._map, self.size, path)
            n_tensors, n_values = reader.header()
            self.metadata = reader.metadata(n_values)
            self.tensors = self._tensors(reader, n_tensors)
        except BaseException:
            self.close()
            raise

    def _tensors(self, reader: _Reader, count: int) -> list[TensorInfo]:
        alignment = _alignment(self.metadata, self.path)
        entries = reader.tensor_table(count)
        start = -(-reader.pos // alignment) * alignment
        tensors = [
            TensorInfo(name, quant, shape, start + offset, nbytes, self.index)
            for name, quant, shape, offset, nbytes in entries
        ]
        self._check_layout(tensors, start, alignment)
        return tensors

    def _check_layout(self, tensors: list[TensorInfo], start: int, alignment: int) -> None:
        """Each tensor aligned, inside the file, and apart from the others."""
        whole = start + sum(t.nbytes + alignment for t in tensors)
        for t in tensors:
            if (t.offset - start) % alignment:
                raise ModelFileError(
                    f"{self.path}: tensor {t.name} is unaligned: offset {t.offset - start} is not "
                    f"a multiple of {alignment}"
                )
            end = t.offset + t.nbytes
            if end > max(self.size, whole):
                raise ModelFileError(
                    f"{self.path}: tensor {t.name} lies outside the file: offset "
                    f"{t.offset - start}, {t.nbytes} bytes"
                )
            if end > self.size:
                raise ModelFileError(
                    f"{self.path} is truncated: tensor {t.name} ends at byte {end}, the file has "
                    f"{self.size}: download it again"
                )
        ordered = sorted(tensors, key=lambda t: t.offset)
        for before, after in zip(ordered, ordered[1:], strict=False):
            if before.offset + before.nbytes > after.offset:
                raise ModelFileError(f"{self.path}: tensors {before.name} and {after.name} overlap")

    def view(self, info: TensorInfo) -> np.ndarray:
        if self._map is None:
            raise ModelFileError(f"{self.path} has been closed")
        now = os.fstat(self._fd)
        if now.st_size < info.offset + info.nbytes or now.st_mtime_ns != self._changed:
            raise ModelFileError(
                f"{self.path} was changed while open: {self.size} bytes then, {now.st_size} now: "
                f"start again"
            )
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    def close(self) -> None:
        """Idempotent. The mapping itself goes when the last array that views it goes."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_file(path: Path) -> tuple[int, int, int]:
    """Descriptor, size and time of the last change of a regular file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before open, which waits on a pipe
            raise ModelFileError(f"{path} is not a regular file: name a .gguf file")
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be opened: {error}") from error
    now = os.fstat(fd)
    if now.st_size == 0:
        os.close(fd)
        raise ModelFileError(f"{path} is empty: download it again")
    return fd, now.st_size, now.st_mtime_ns


class _Reader:
    """A position in a header, and reads that cannot leave it."""

    def __init__(self, buffer: mmap.mmap, size: int, path: Path):
        self.buffer = buffer
        self.end = min(size, MAX_HEADER_BYTES)
        self.size = size
        self.path = path
        self.pos = 0

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def need(self, n_bytes: int, what: str) -> None:
        """Raise unless n_bytes are left."""
        if n_bytes <= self.end - self.pos:
            return
        if self.end < self.size:
            raise self.fail(f"the header is longer than {MAX_HEADER_BYTES} bytes at {what}")
        raise self.fail(
            f"the header is truncated: {what} needs {n_bytes} bytes at byte {self.pos}, "
            f"{self.end - self.pos} are left: download the file again"
        )

    def scalar(self, code: str, what: str) -> Value:
        n = struct.calcsize("<" + code)
        self.need(n, what)
        (value,) = struct.unpack_from("<" + code, self.buffer, self.pos)
        self.pos += n
        return value

    def string(self, what: str) -> str:
        n = self.scalar("Q", f"the length of {what}")
        self.need(n, what)
        raw = self.buffer[self.pos : self.pos + n]
        self.pos += n
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None

    def name(self, what: str) -> str:
        """A string that messages can print as it is: no control characters, no great length."""
        text = self.string(what)
        if not text or len(text) > MAX_NAME or not text.isprintable():
            raise self.fail(f"{what} is not a printable name of 1 to {MAX_NAME}: {text[:40]!r}")
        return text

    def header(self) -> tuple[int, int]:
        """Magic and version; the counts of tensors and of metadata values."""
        magic = bytes(self.buffer[:4])
        if magic != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {magic!r}, not b'GGUF'")
        self.pos = 4
        version = self.scalar("I", "the version")
        if version in (0x02000000, 0x03000000):
            raise self.fail("this is a big-endian GGUF file: convert it to little-endian")
        if version == 1:
            raise self.fail("GGUF version 1 is too old: convert the model again")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not known: versions 2 and 3 are")
        return self.scalar("Q", "the tensor count"), self.scalar("Q", "the metadata count")

    def metadata(self, count: int) -> dict[str, Value]:
        self.need(count * 13, f"{count} metadata values")  # key length, type and one byte at least
        values: dict[str, Value] = {}
        for i in range(count):
            key = self.name(f"metadata key {i}")
            if key in values:
                raise self.fail(f"metadata key {key!r} occurs twice")
            values[key] = self.value(self.scalar("I", f"the type of {key!r}"), key, 0)
        return values

    def value(self, kind: int, key: str, depth: int) -> Value:
        if kind == _STRING:
            return self.string(f"metadata {key!r}")
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        if kind == 7:
            return self.scalar("B", f"metadata {key!r}") != 0
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], f"metadata {key!r}")
        raise self.fail(f"metadata {key!r} has value type {kind}, which GGUF does not define")

    def array(self, key: str, depth: int) -> list[Value]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"metadata {key!r} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self.scalar("I", f"the element type of {key!r}")
        count = self.scalar("Q", f"the length of {key!r}")
        if kind not in _SCALARS and kind not in _MIN_VALUE_BYTES:
            raise self.fail(f"metadata {key!r} has element type {kind}, which GGUF does not define")
        code = _SCALARS.get(kind)
        size = struct.calcsize("<" + code) if code else _MIN_VALUE_BYTES[kind]
        self.need(count * size, f"the array {key!r} of {count} values")
        if kind == _STRING:
            return self.strings(key, count)
        if code is None:
            return [self.value(kind, key, depth) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{code}", self.buffer, self.pos)
        self.pos += count * size
        return list(values)

    def strings(self, key: str, count: int) -> list[str]:
        """As `string`, count times, in one tight loop: vocabularies have 300,000 of them."""
        buffer, pos, end = self.buffer, self.pos, self.end
        length = struct.Struct("<Q").unpack_from
        out: list[str] = []
        add = out.append
        try:
            for _ in range(count):
                if end - pos < 8:
                    break
                (n,) = length(buffer, pos)
                pos += 8
                if n > end - pos:
                    break
                add(buffer[pos : pos + n].decode())
                pos += n
        except UnicodeDecodeError as error:
            raise self.fail(
                f"string {len(out)} of {key!r} is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        self.pos = pos
        if len(out) < count:
            self.need(self.end - pos + 1, f"string {len(out)} of {key!r}")
        return out

    def tensor_table(self, count: int) -> list[tuple[str, QuantType, tuple[int, ...], int, int]]:
        """(name, type, shape, offset in the data section, bytes) of each tensor."""
        self.need(count * 32, f"the table of {count} tensors")  # 8 + 4 + 8 + 4 + 8 bytes at least
        table = []
        seen: set[str] = set()
        for i in range(count):
            name = self.name(f"the name of tensor {i}")
            if name in seen:
                raise self.fail(f"tensor {name} occurs twice")
            seen.add(name)
            shape = self.shape(name)
            quant = quant_type(self.scalar("I", f"the type of tensor {name}"), name)
            offset = self.scalar("Q", f"the offset of tensor {name}")
            if shape[-1] % quant.block_size:
                raise self.fail(
                    f"tensor {name} has rows of {shape[-1]} values, not a multiple of the "
                    f"{quant.block_size} values in a {quant.name} block"
                )
            nbytes = math.prod(shape) // quant.block_size * quant.block_bytes
            table.append((name, quant, shape, offset, nbytes))
        return table

    def shape(self, name: str) -> tuple[int, ...]:
        """NumPy order: the file lists the contiguous dimension first."""
        n_dims = self.scalar("I", f"the dimensions of tensor {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name} has {n_dims} dimensions, 1 to {MAX_DIMS} are possible")
        dims = [self.scalar("Q", f"the shape of tensor {name}") for _ in range(n_dims)]
        if 0 in dims:
            raise self.fail(f"tensor {name} has a dimension of 0: {dims}")
        return tuple(reversed(dims))


def _is_int(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not _is_int(value) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelFileError(
            f"{path}: general.alignment is {value!r}, not a power of two from 1 to {MAX_ALIGNMENT}"
        )
    return int(value)


def _split_value(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not _is_int(value) or value < 0:
        raise ModelFileError(f"{part.path}: {key} is {value!r}, not a count")
    return int(value)


def _other_parts(first: _Part) -> list[Path]:
    """Paths of parts 2..N of a split model; empty for a whole one."""
    count = _split_value(first, "split.count", 1)
    if count <= 1:
        return []
    number = _split_value(first, "split.no", 0) + 1
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None:
        raise ModelFileError(
            f"{first.path} is part {number} of {count}, but is not named "
            f"NAME-{number:05d}-of-{count:05d}.gguf, by which the others are found"
        )
    base, named_number, named_count = match[1], int(match[2]), int(match[3])
    if (named_number, named_count) != (number, count):
        raise ModelFileError(
            f"{first.path} is named part {named_number} of {named_count}, "
            f"but says that it is part {number} of {count}"
        )
    if number != 1:
        raise ModelFileError(
            f"{first.path} is part {number} of {count}: open {base}-00001-of-{count:05d}.gguf"
        )
    paths = [
        first.path.with_name(f"{base}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)
    ]
    for number, path in enumerate(paths, start=2):
        if not path.exists():
            raise ModelFileError(f"{path} does not exist: part {number} of {count} is missing")
    return paths


def _check_split(parts: list[_Part]) -> None:
    """Each part says which it is, and together they hold the tensors that part 1 promises."""
    if len(parts) == 1:
        return
    for i, part in enumerate(parts):
        number, count = _split_value(part, "split.no", 0), _split_value(part, "split.count", 1)
        if (number, count) != (i, len(parts)):
            raise ModelFileError(
                f"{part.path} says that it is part {number + 1} of {count}, "
                f"expected part {i + 1} of {len(parts)}"
            )
    found = sum(len(part.tensors) for part in parts)
    promised = _split_value(parts[0], "split.tensors.count", found)
    if found != promised:
        raise ModelFileError(
            f"{parts[0].path}: the {len(parts)} parts hold {found} tensors, "
            f"split.tensors.count is {promised}"
        )

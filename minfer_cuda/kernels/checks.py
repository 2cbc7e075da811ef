"""What every launcher asks of its arguments before a launch."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import DeviceArray
from minfer_cuda.kernels.layouts import Activations, padded


def expect(
    kernel: str, name: str, array: DeviceArray, shape: tuple[int, ...], *dtypes: DTypeLike
) -> None:
    """Raise KernelError unless `array` has this shape and one of these dtypes."""
    if tuple(array.shape) == shape and any(array.dtype == dtype for dtype in dtypes):
        return
    wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    raise KernelError(
        f"{kernel}: {name} is {tuple(array.shape)} {array.dtype}, expected {shape} {wanted}"
    )


def pointer(array: DeviceArray | None) -> int | None:
    """Its address, for a field of a ctypes.Structure."""
    return None if array is None else array.data.ptr


def expect_room(
    kernel: str, name: str, array: DeviceArray | None, elements: int, dtype: DTypeLike
) -> None:
    """Raise KernelError unless `array` is flat, of this dtype and holds `elements` or more."""
    if array is not None and array.dtype == dtype and array.ndim == 1 and array.size >= elements:
        return
    got = "missing" if array is None else f"{tuple(array.shape)} {array.dtype}"
    raise KernelError(
        f"{kernel}: {name} is {got}, expected {elements} or more {np.dtype(dtype).name}"
    )


def expect_halves(kernel: str, x: Activations, tokens: int, k: int) -> None:
    """Raise KernelError unless `x` has its f16 form, of T rows of K."""
    if x.h is None or x.hs is None:
        raise KernelError(f"{kernel}: activations without their f16 form")
    expect(kernel, "h", x.h, (tokens, padded(k)), np.float16)
    expect(kernel, "hs", x.hs, (tokens,), np.float32)

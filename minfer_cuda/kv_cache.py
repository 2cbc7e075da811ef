"""The KV regions on the device."""

from __future__ import annotations

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import UsageError
from minfer_cuda.kernels import Device, DeviceArray

KV_DTYPES = {"f32": np.float32, "f16": np.float16}


def kv_dtype(kv_type: str) -> type:
    """Raises UsageError for all but f16 and f32: Qwen2's key biases do not survive fewer bits."""
    if kv_type not in KV_DTYPES:
        raise UsageError(f"kv_type is {kv_type}: must be one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[kv_type]


def kv_bytes(config: Qwen2Config, n_ctx: int, kv_type: str) -> int:
    """Bytes of `n_ctx` positions."""
    values = config.n_layers * 2 * n_ctx * config.kv_width
    return values * np.dtype(kv_dtype(kv_type)).itemsize


class KVCache:
    """One allocation (L, 2, S, G, E): keys, then values, of every layer, sized once."""

    def __init__(self, device: Device, config: Qwen2Config, n_ctx: int, kv_type: str):
        shape = (config.n_layers, 2, n_ctx, config.n_kv_heads, config.head_dim)
        self.data: DeviceArray = device.empty(shape, kv_dtype(kv_type))
        # a slice of a device array takes microseconds to make, and every step asks for all of them
        self._keys = [self.data[layer, 0] for layer in range(config.n_layers)]
        self._values = [self.data[layer, 1] for layer in range(config.n_layers)]

    def keys(self, layer: int) -> DeviceArray:
        """(S, G, E)"""
        return self._keys[layer]

    def values(self, layer: int) -> DeviceArray:
        """(S, G, E)"""
        return self._values[layer]

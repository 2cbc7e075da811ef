"""The instances of cuda/matmul_wgmma.cu, which matmul_f16.py launches."""

from __future__ import annotations

from collections.abc import Sequence

from minfer_cuda.kernels.matmul_f16 import SM90_SHARED, instance, stages, tiles_of
from minfer_cuda.quants import HALVES, by_name


def instances(types: Sequence[str]) -> list[str]:
    """Of every quantised type the tiles that it is cut into on sm_90."""
    quants = [by_name(name) for name in types if name not in ("F32", *HALVES)]
    return [
        instance(quant, tile, stages(quant, tile, SM90_SHARED))
        for quant in quants
        for tile in tiles_of(90, quant, SM90_SHARED)
    ]

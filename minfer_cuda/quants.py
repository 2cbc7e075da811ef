"""Every GGML tensor type in one table: block layout and the kernels' name for it.

The layouts are facts of the GGML format. NumPy is imported where values are asked for
(`unpacking`), not before: it takes a fifth of the time of `minfer info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from minfer_cuda.errors import UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np

    from minfer_cuda.unpacking import Unpack

CHUNK_VALUES = 1 << 15  # values dequantised at once: 128 KiB of float32 stays in a core's L2


@dataclass(frozen=True)
class QuantType:
    """One GGML type. A row of K values is K / block_size blocks of block_bytes bytes."""

    name: str
    type_id: int
    block_size: int
    block_bytes: int
    cuda_name: str | None  # template argument in cuda/quants.cuh; None: no kernels for it

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    @cached_property
    def unpack(self) -> Unpack | None:
        """Blocks uint8 (n, block_bytes) to out float32 (n, block_size), in place; None for a type
        that has no values."""
        from minfer_cuda.unpacking import unpacker

        return unpacker(self.name, self.block_bytes)

    def dequantize(self, data: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Whole blocks uint8 (..., blocks * block_bytes) to float32 (..., blocks * block_size).

        `out` is a C-contiguous float32 array of that shape, so that threads can each take a range
        of rows. Raises UnsupportedModelError for a type that has no values (Q8_K, I32, ...) and
        ValueError for shapes that do not fit.
        """
        import numpy as np

        if self.unpack is None:
            raise UnsupportedModelError(f"{self.name} cannot be dequantised: not a weight type")
        blocks_per_row, rest = divmod(data.shape[-1], self.block_bytes)
        if data.dtype != np.uint8 or rest:
            raise ValueError(
                f"{self.name}: data is {data.shape} {data.dtype}, expected uint8 rows of whole "
                f"{self.block_bytes}-byte blocks"
            )
        shape = (*data.shape[:-1], blocks_per_row * self.block_size)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(
                f"{self.name}: out is {out.shape} {out.dtype}, expected contiguous float32 {shape}"
            )
        blocks = data.reshape(-1, self.block_bytes)
        flat = out.reshape(-1, self.block_size)
        step = max(1, CHUNK_VALUES // self.block_size)
        with np.errstate(all="ignore"):  # NaN and Inf scales give NaN and Inf values
            for i in range(0, len(blocks), step):
                self.unpack(blocks[i : i + step], flat[i : i + step])
        return out


HALVES = ("F16", "BF16")  # float types whose prompts f16 tensor cores multiply

QUANT_TYPES: dict[int, QuantType] = {
    row.type_id: row
    for row in (
        QuantType("F32", 0, 1, 4, "F32"),
        QuantType("F16", 1, 1, 2, "F16"),
        QuantType("BF16", 30, 1, 2, "BF16"),
        QuantType("Q4_0", 2, 32, 18, "Q4_0"),
        QuantType("Q4_1", 3, 32, 20, "Q4_1"),
        QuantType("Q5_0", 6, 32, 22, "Q5_0"),
        QuantType("Q5_1", 7, 32, 24, "Q5_1"),
        QuantType("Q8_0", 8, 32, 34, "Q8_0"),
        QuantType("Q2_K", 10, 256, 84, "Q2_K"),
        QuantType("Q3_K", 11, 256, 110, "Q3_K"),
        QuantType("Q4_K", 12, 256, 144, "Q4_K"),
        QuantType("Q5_K", 13, 256, 176, "Q5_K"),
        QuantType("Q6_K", 14, 256, 210, "Q6_K"),
        QuantType("IQ4_NL", 20, 32, 18, "IQ4_NL"),
        QuantType("IQ4_XS", 23, 256, 136, "IQ4_XS"),
    )
}

# ids that the format once had and gave up, named so that an old file is explained
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


def by_name(name: str) -> QuantType:
    """The table's row of that name. KeyError for a name that it does not have."""
    return {q.name: q for q in QUANT_TYPES.values()}[name]


def quant_type(type_id: int, tensor_name: str) -> QuantType:
    """The type with that id: of the table, else of the `gguf` package (CPU only).

    Raises UnsupportedModelError naming tensor and type for an id that neither knows.
    """
    known = QUANT_TYPES.get(type_id) or _gguf_type(type_id)
    if known is not None:
        return known
    name = f"type {type_id}"
    if type_id in REMOVED:
        name = f"{REMOVED[type_id]} (type {type_id}, removed from the format)"
    raise UnsupportedModelError(
        f"tensor {tensor_name} has {name}, which minfer does not know: quantise the model again, "
        f"for example as Q4_K_M or Q8_0"
    )


def _gguf_type(type_id: int) -> QuantType | None:
    """A type that only the `gguf` package knows; imported late: it costs 0.12 s."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        return None
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[known]
    return QuantType(known.name, type_id, block_size, block_bytes, None)


def dequantize(type_id: int, data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A whole tensor's bytes as float32 of `shape`, on the CPU."""
    quant = quant_type(type_id, "")
    return quant.dequantize(data.reshape(-1)).reshape(shape)


def supported_table() -> str:
    """The README's table of types, in Markdown."""
    lines = [
        "| Type | Id | Values / block | Bytes / block | Bits / weight | CPU | CUDA |",
        "|---|---|---|---|---|---|---|",
    ]
    for q in QUANT_TYPES.values():
        lines.append(
            f"| {q.name} | {q.type_id} | {q.block_size} | {q.block_bytes} "
            f"| {q.bits_per_weight:g} | yes | {'yes' if q.cuda_name else 'no'} |"
        )
    return "\n".join(lines)

"""What serves a prompt's products: int8, f16 or no tensor cores (cuda/matmul*.cu)."""

from __future__ import annotations

from minfer_cuda.errors import UsageError
from minfer_cuda.quants import HALVES, QuantType

VARIABLE = "MINFER_PREFILL"  # int8 or f16 forces one, for quantised types
F16_FROM_ARCH = 80  # before, the kernels' stages exceed the shared memory
F16_ARCHS = (80, 90, 100)  # f16 products with float32 sums at their full rate, elsewhere at half
# cards that are served alike, as `minfer info` prints them
CARDS = ((75,), (86, 89, 120), (80, 90, 100))
INT8_ROWS = 1  # there f16 is faster from two rows on (1.1 to 2.5 times, 7B Q4_K, H200)


def most_int8_rows(arch: int, forced: str | None = None) -> int | None:
    """The most rows of a call that int8 serves, f16 serving more; None where int8 serves any.

    The same for every quantised type. One row is decode's, which has kernels of its own. `forced`
    is the value of MINFER_PREFILL; raises UsageError for any but "int8" and "f16", and for f16 on a
    card before sm_80, whose shared memory is too small.
    """
    if forced not in (None, "", "int8", "f16"):
        raise UsageError(f"{VARIABLE} is {forced!r}: expected int8 or f16")
    if forced == "f16":
        if arch < F16_FROM_ARCH:
            needed = f"it needs sm_{F16_FROM_ARCH} or newer"
            raise UsageError(f"{VARIABLE} is f16: {needed}, this is sm_{arch}")
        return 1
    return INT8_ROWS if arch in F16_ARCHS and not forced else None


def most_float32_rows(arch: int, quant: QuantType) -> int | None:
    """The most rows of a call that float32 sums without tensor cores serve for a float type, f16
    tensor cores serving more; None where they serve any.

    F16 and BF16 have no int8 form: MINFER_PREFILL is not asked. F32 keeps its precision.
    """
    return 1 if quant.name in HALVES and arch >= F16_FROM_ARCH else None


def services(quant: QuantType, arch: int) -> list[tuple[int, str]]:
    """(fewest rows of a call, what multiplies a matrix of this type by so many), fewest first."""
    if quant.block_size == 1:
        most, found = most_float32_rows(arch, quant), [(1, "float32")]
    else:
        most, found = most_int8_rows(arch), [(1, "int8 dot products")]
        if most is None or most > 1:
            found.append((2, "int8 tensor cores"))
    return found if most is None else [*found, (most + 1, "f16 tensor cores")]

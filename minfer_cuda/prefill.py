"""What serves a prompt's quantised products: int8 or f16 tensor cores (cuda/matmul*.cu)."""

from __future__ import annotations

from minfer_cuda.errors import UsageError

VARIABLE = "MINFER_PREFILL"  # int8 or f16 forces one
F16_ARCHS = (80, 90, 100)  # f16 products with float32 sums at their full rate, elsewhere at half
INT8_ROWS = 16  # there f16 is as fast at 16 rows and up to 2.5 times at more (7B Q4_K, H200)


def most_int8_rows(arch: int, forced: str | None = None) -> int | None:
    """The most rows of a call that int8 serves, f16 serving more; None where int8 serves any.

    The same for every quantised type. One row is decode's, which has kernels of its own. `forced`
    is the value of MINFER_PREFILL; raises UsageError for any but "int8" and "f16", and for f16 on a
    card before sm_80, whose shared memory is too small.
    """
    if forced not in (None, "", "int8", "f16"):
        raise UsageError(f"{VARIABLE} is {forced!r}: expected int8 or f16")
    if forced == "f16":
        if arch < 80:
            raise UsageError(f"{VARIABLE} is f16: it needs sm_80 or newer, this is sm_{arch}")
        return 1
    return INT8_ROWS if arch in F16_ARCHS and not forced else None

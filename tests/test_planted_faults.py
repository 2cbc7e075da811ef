"""Faults planted into copies of our kernels: each is caught, by kind and place.

A fault that gives wrong values is caught by the test of the operation, whose name is the place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import test_attention_kernels as attention
import test_linear_kernels as linear
import test_matmul_f16 as f16
import test_rope_kernels as rope
import test_sampling_kernels as sampling
from devices import simt_device
from simt.device import SimtDevice, SimtError

from minfer_cuda.kernels.compiler import expand_source, source_folder
from minfer_cuda.quants import by_name

Run = Callable[[SimtDevice], None]


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in cuda/<file>; `caught` is a kind of SimtError, or "values"; `at` is a
    piece of the line that the error names."""

    name: str
    file: str
    old: str
    new: str
    run: Run
    caught: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def norm(device: SimtDevice) -> None:
    linear.test_rms_norm_equals_float64(device, 1056)


def elementwise(device: SimtDevice) -> None:
    linear.test_swiglu_and_add_equal_float64(device)


def embed(device: SimtDevice) -> None:
    linear.test_embedding_rows_are_exact_in_every_type(device, by_name("Q5_0"))


def matvec(device: SimtDevice) -> None:
    linear.test_matvec_equals_float64(device, by_name("Q4_K"), 21)


def normed_matvec(device: SimtDevice) -> None:
    linear.test_a_product_that_norms_its_row_gives_the_bits_of_norm_and_product(
        device, by_name("Q4_K")
    )


def long_matvec(device: SimtDevice) -> None:
    linear.test_warps_that_share_a_strip_add_up(device, 13)


def uneven_matvec(device: SimtDevice) -> None:
    device.sm_count = 1  # two blocks for five strips
    long_matvec(device)


def gate_up(device: SimtDevice) -> None:
    linear.test_fused_gate_up_gives_the_bits_of_two_products_and_swiglu(device, by_name("Q5_0"))


def matmul(device: SimtDevice) -> None:
    linear.test_matmul_equals_float64(device, by_name("Q4_K"), 9)


def split_matmul(device: SimtDevice) -> None:
    linear.test_split_products_add_up_and_leave_their_counters_zero(device, 3)


def float_product(device: SimtDevice) -> None:
    linear.test_float_products_equal_float64(device, by_name("F16"), 2)


def product(device: SimtDevice, name: str, n: int, k: int, tile: f16.Tile | None) -> None:
    scratch = {
        "partials": device.empty(f16.PARTIALS, np.float32),
        "arrivals": device.zeros(f16.ARRIVALS, np.int32),
    }
    f16.check(device, scratch, by_name(name), n, k, 9, tile)


def halves(device: SimtDevice) -> None:
    product(device, "F16", 21, 72, f16.NARROW)


def few_halves(device: SimtDevice) -> None:
    product(device, "F16", 21, 72, None)


def few_records(device: SimtDevice) -> None:
    product(device, "Q4_K", 77, 1024, None)


def wide_records(device: SimtDevice) -> None:
    product(device, "Q4_K", 77, 1024, f16.WGMMA_128)


def prefill(device: SimtDevice) -> None:
    attention.test_many_tokens_see_the_past_and_no_later_token(device, 17, 7, 64, 100, "float16")


def splits(device: SimtDevice) -> None:
    attention.test_splits_agree_with_one_and_repeat_their_bits(device, 2, 1, 64)


def rotate(device: SimtDevice) -> None:
    rope.test_rotation_is_the_float64_formula_within_four_roundings(device)


def masked_draw(device: SimtDevice) -> None:
    sampling.test_the_only_id_that_is_allowed_is_drawn_however_unlikely(device, {"top_k": 40})


def draw(device: SimtDevice) -> None:
    sampling.test_any_vocabulary_size_gives_the_host_samplers_tokens(device, 1000, {})


FAULTS = [
    Fault("missing barrier", "norm.cu", "__syncthreads();", "", norm, "race", "row_rstd(partial"),
    Fault("missing barrier", "matvec.cu", "__syncthreads();\n        return Normed",
          "\n        return Normed", normed_matvec, "race", "x.values(chunk + c, t, 0)"),
    Fault("missing barrier", "attention.cu", "__syncthreads();  // the stages", "//", prefill,
          "race", "store_rows(rows, sums"),
    Fault("missing barrier", "matmul.cu", "__syncthreads();  // this", "//", matmul,
          "uninitialised", "multiply_stage<Q, Tile>(acc"),
    Fault("missing barrier", "sampling.cuh", "    __syncthreads();\n    v += warp",
          "\n    v += warp", draw, "uninitialised|race", "x.warps["),
    Fault("mask read at another bit", "sampling.cu", ">> id % 32 & 1", ">> id % 31 & 1",
          masked_draw, "values"),
    Fault("missing warp barrier", "sampling.cuh", "__syncwarp();  // all", "// all", draw,
          "race", "s.need = need - before;"),
    Fault("barrier that half the block skips", "matvec.cu", "<0>();\n    __syncthreads();",
          "<0>();\n    if (warp < 6) __syncthreads();", matvec, "barrier", "if (warp < 6)"),
    Fault("tail one too long", "elementwise.cu", "if (i < n) {", "if (i <= n) {", elementwise,
          "out of bounds", "u = *reinterpret_cast<const float4*>(a + i)"),
    Fault("tail one too long", "embed.cu", "k < d;", "k <= d;", embed, "race", "(out + k)"),
    Fault("tail one too long", "matvec.cu", "t < rows}", "t <= rows}", matvec,
          "out of bounds", "out.bias + row"),
    Fault("tail one too long", "matmul.cu", "row < n && token", "row <= n && token", matmul,
          "out of bounds", "v, a.bias[row]"),
    Fault("swapped scales", "matvec.cu", "scale = d[b]", "scale = d[b ^ 1]", matvec, "values"),
    Fault("swapped scales", "matmul.cu", "(i & 1) ? s1.d : s0.d)", "(i & 1) ? s0.d : s1.d)",
          matmul, "values"),
    Fault("swapped cosine and sine", "rope.cuh", "__fmul_rn(y0, cs.x)", "__fmul_rn(y0, cs.y)",
          rotate, "values"),
    Fault("divergent shuffle", "elementwise.cu", "if (qs) quantize4", "if (qs && i < k) quantize4",
          elementwise, "divergence", "if (qs && i < k)"),
    Fault("divergent shuffle", "matvec.cu", "if (qs_out) quant", "if (lane < 8) quant",
          gate_up, "divergence", "if (lane < 8)"),
    Fault("race between two warps", "matvec.cu", "out = sums + warp * 8", "out = sums + warp * 4",
          long_matvec, "race", "*out = acc"),
    Fault("race between two lanes", "q8.cuh", "if ((k & 31) == 0) ds", "if ((k & 27) == 0) ds",
          elementwise, "race", "ds_row[k >> 5] ="),
    Fault("read past the last block", "repack.cu", "row < n && i < k) code", "i < k) code", matvec,
          "out of bounds", "if (i < k) code"),
    Fault("read past the last strip", "matvec.cu", "ceil_div(out.n, 8) - first)", "strips)",
          uneven_matvec, "out of bounds", "l = Q::template load<"),
    Fault("read past the last token", "matmul_float.cu", "if (i >= count) break;", "",
          float_product, "out of bounds", "const float4 u ="),
    Fault("copy not waited for", "matmul.cu", "copy_async_wait<Stages - 2>",
          "copy_async_wait<Stages - 1>", matmul, "race", "multiply_stage<Q, Tile>(acc"),
    Fault("partials without a fence", "attention.cu", "__threadfence();\n    __syncthreads();",
          "\n    __syncthreads();", splits, "race", "x[n] = reinterpret_cast<const float4"),
    Fault("partials without a fence", "matmul.cu", "__threadfence();\n        __syncthreads();",
          "\n        __syncthreads();", split_matmul, "race", "load_coherent(a.partial"),
    Fault("read past the last column", "matmul_f16.cu", "row_bytes, at < row_bytes)", "row_bytes)",
          halves, "out of bounds", "copy_async16(to + j * kAtOnce * kRowBytes"),
    Fault("a row's sections not where they are read", "matmul_f16.cu", "(first & 3) << 1",
          "(first & 1) << 1", halves, "values"),
    Fault("values past the last column", "matmul_few.cu", "k < a.k ? ", "true ? ", few_halves,
          "out of bounds|values", "values[r][i / 2]"),
    Fault("a table read before it is filled", "matmul_few.cu",
          "        __syncwarp();\n    }", "\n    }", few_records, "race|uninitialised",
          "const ScalePairs<Q> pairs("),
    Fault("tokens not waited for", "matmul_few.cu", "copy_async_wait<0>();\n    __syncthreads();",
          "copy_async_wait<0>();\n", few_records, "uninitialised", "token_fragments<F::kTokens>"),
    Fault("tokens multiplied before they are there", "matmul_wgmma.cu",
          "arrivals[slot].wait(step / Stages % 2);", "", wide_records, "race|uninitialised",
          "wgmma_f16<Tiles>(acc[0]"),
    Fault("tokens loaded before the stage is free", "matmul_wgmma.cu",
          "leavings[free].wait(1 - then / Stages % 2);", "", wide_records, "race", "copy_box"),
    Fault("pairs of other blocks", "matmul_f16.cuh", "(lane % 4 * 8 + lane / 4)",
          "(lane % 2 * 8 + lane / 4)", wide_records, "race|uninitialised", "table[(("),
    Fault("misaligned vector", "matvec.cu", "return shared_bytes() + max(",
          "return shared_bytes() + 4 + max(", normed_matvec, "misaligned", "sums[i >> 5] ="),
]  # fmt: skip


def edited(fault: Fault) -> Callable[[str], str]:
    """Kernel files with the fault planted."""

    def source(stem: str) -> str:
        return expand_source(stem).replace(fault.old, fault.new, 1)

    return source


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_caught_by_kind_and_place(fault: Fault) -> None:
    simt_device()  # skips where there is no compiler
    text = (source_folder() / fault.file).read_text()
    assert fault.old in text, "the kernel has changed: plant the fault anew"
    assert fault.old.count("\n") == fault.new.count("\n")  # places stay true
    device = SimtDevice(source=edited(fault))
    if fault.caught == "values":
        with pytest.raises(AssertionError):
            fault.run(device)
        return
    with pytest.raises(SimtError) as caught:
        fault.run(device)
    error = caught.value
    assert error.kind in fault.caught.split("|"), error
    lines = text.replace(fault.old, fault.new, 1).splitlines()
    inside = [p for p in error.places if p.startswith(f"{fault.file}:")]
    named = [lines[int(place.split(":")[1]) - 1] for place in inside]
    assert any(fault.at in line for line in named), error

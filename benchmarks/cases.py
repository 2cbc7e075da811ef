"""The cases of kernels.py: which launches, on which shapes, and how much they read and compute."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.bed import Bed
from benchmarks.family import SIZES, Size, matrix_shapes, matrix_types
from minfer_cuda.kernels import DeviceArray
from minfer_cuda.kernels.attention import attention
from minfer_cuda.kernels.attention import plan as attention_plan
from minfer_cuda.kernels.layouts import Activations, matrix_bytes
from minfer_cuda.kernels.matmul import ARRIVALS, PARTIALS, matmul
from minfer_cuda.kernels.matmul_f16 import ARRIVALS as F16_ARRIVALS
from minfer_cuda.kernels.matmul_f16 import PARTIALS as F16_PARTIALS
from minfer_cuda.kernels.matmul_f16 import gate_up_f16, halve, matmul_f16, with_peak
from minfer_cuda.kernels.matmul_float import matmul_float
from minfer_cuda.kernels.matvec import matvec, matvec_gate_up, matvec_qkv
from minfer_cuda.kernels.norm import rms_norm
from minfer_cuda.kernels.sampling import Sampler
from minfer_cuda.quants import HALVES, by_name
from minfer_cuda.sampling import SamplingParams

KERNELS = ("matvec", "gate_up", "qkv", "matmul", "matmul_f16", "attention", "rms_norm", "sampling")
ROLES = {"o": "attn_output", "down": "ffn_down", "gate": "ffn_gate", "head": "output"}
SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0),
    "default": SamplingParams(),
    "top-p alone": SamplingParams(top_k=0),
}


@dataclass(frozen=True)
class Work:
    """A prepared case: launch(i) runs it on copy i. `outputs` start as NaN."""

    launch: Callable[[int], None]
    copies: int
    outputs: tuple[DeviceArray, ...] = ()


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    kernel: str
    size: str
    what: str
    type_name: str
    rows: int  # T
    n_bytes: int  # read and written once
    ops: int  # two for each multiply-add; 0 where they do not count
    product: str  # key of measure.MMA
    prepare: Callable[[Bed], Work]

    def words(self) -> dict[str, Any]:
        """What names the case in a result."""
        names = {"kernel": self.kernel, "size": self.size, "what": self.what}
        return names | {"type": self.type_name, "rows": self.rows}


def linear(size: str, role: str, type_name: str, n: int, k: int, rows: int) -> Case:
    """A matrix (N, K) times T rows, by the kernel that the engine takes for it."""
    quant = by_name(type_name)
    is_float = quant.block_size == 1
    kernel = "matmul" if rows > 1 else "matvec"

    def prepare(bed: Bed) -> Work:
        weights, y = bed.matrices(type_name, n, k), bed.nan(rows, n)
        behind_norm = role == "head" and rows == 1 and not is_float
        x = bed.unnormed(k) if behind_norm else bed.activations(rows, k)
        partials = bed.device.empty(PARTIALS, np.float32)
        arrivals = bed.device.zeros(ARRIVALS, np.int32)

        def launch(i: int) -> None:
            if is_float:
                matmul_float(bed.device, weights[i], x, y)
            elif rows == 1:
                matvec(bed.device, weights[i], x, y.reshape(-1))
            else:
                matmul(bed.device, weights[i], x, y, partials=partials, arrivals=arrivals)

        return Work(launch, len(weights), (y,))

    n_bytes = matrix_bytes(quant, n, k) + rows * (k * (4 if is_float else 1.25) + 4 * n)
    product = "f16" if is_float else "s8"
    ops = 2 * rows * n * k if rows > 1 else 0
    return Case(kernel, size, role, type_name, rows, int(n_bytes), ops, product, prepare)


def linear_f16(size: str, role: str, type_name: str, n: int, k: int, rows: int) -> Case:
    """The same product on f16 tensor cores."""

    def prepare(bed: Bed) -> Work:
        weights = [with_peak(bed.device, w) for w in bed.matrices(type_name, n, k)]
        x, y = Activations.empty(bed.device, rows, k, f16=True), bed.nan(rows, n)
        halve(bed.device, bed.normal(rows, k), x)
        scratch = f16_scratch(bed)
        return Work(
            lambda i: matmul_f16(bed.device, weights[i], x, y, **scratch), len(weights), (y,)
        )

    n_bytes = matrix_bytes(by_name(type_name), n, k) + rows * (2 * k + 4 * n)
    return Case(
        "matmul_f16", size, role, type_name, rows, n_bytes, 2 * rows * n * k, "f16", prepare
    )


def f16_scratch(bed: Bed) -> dict[str, DeviceArray]:
    return {
        "partials": bed.device.empty(F16_PARTIALS, np.float32),
        "arrivals": bed.device.zeros(F16_ARRIVALS, np.int32),
    }


def gate_up_f16_case(size: str, shape: Size, type_name: str, rows: int) -> Case:
    """Both products and SwiGLU in one launch."""
    one_bytes = matrix_bytes(by_name(type_name), shape.ffn, shape.d)

    def prepare(bed: Bed) -> Work:
        copies = bed.copies(2 * one_bytes)
        matrices = bed.matrices(type_name, shape.ffn, shape.d, 2 * copies)
        weights = [with_peak(bed.device, w) for w in matrices]
        x = Activations.empty(bed.device, rows, shape.d, f16=True)
        halve(bed.device, bed.normal(rows, shape.d), x)
        out = Activations.empty(bed.device, rows, shape.ffn, f16=True)
        out = replace(out, hs=bed.nan(rows))
        scratch = f16_scratch(bed)

        def launch(i: int) -> None:
            gate_up_f16(bed.device, weights[2 * i], weights[2 * i + 1], x, out, **scratch)

        return Work(launch, copies, (out.hs,))

    n_bytes = 2 * one_bytes + rows * 2 * (shape.d + shape.ffn)
    ops = 4 * rows * shape.ffn * shape.d
    return Case("matmul_f16", size, "gate, up", type_name, rows, n_bytes, ops, "f16", prepare)


def gate_up(size: str, shape: Size, type_name: str) -> Case:
    """The fused kernel of decode."""

    def prepare(bed: Bed) -> Work:
        n_bytes = 2 * matrix_bytes(by_name(type_name), shape.ffn, shape.d)
        copies = bed.copies(n_bytes)
        weights = bed.matrices(type_name, shape.ffn, shape.d, 2 * copies)
        x = bed.unnormed(shape.d)
        whole = Activations.empty(bed.device, 1, shape.ffn, floats=True, q8=True)
        out = Activations(bed.nan(1, shape.ffn), whole.qs, whole.ds)

        def launch(i: int) -> None:
            matvec_gate_up(bed.device, weights[2 * i], weights[2 * i + 1], x, out)

        return Work(launch, copies, (out.x,))

    n_bytes = 2 * matrix_bytes(by_name(type_name), shape.ffn, shape.d)
    return Case("gate_up", size, "gate, up", type_name, 1, n_bytes, 0, "s8", prepare)


def qkv(size: str, shape: Size, types: tuple[str, str, str]) -> Case:
    """The fused kernel of decode: projections, biases, rotation, store."""
    rows = (shape.d, shape.kv_width, shape.kv_width)
    n_bytes = sum(matrix_bytes(by_name(t), n, shape.d) for t, n in zip(types, rows, strict=True))

    def prepare(bed: Bed) -> Work:
        copies, context = bed.copies(n_bytes), 128
        parts = [bed.matrices(t, n, shape.d, copies) for t, n in zip(types, rows, strict=True)]
        biases = tuple(bed.normal(n) for n in rows)
        x = bed.unnormed(shape.d)
        table = bed.normal(context, shape.head_dim // 2, 2)
        position = bed.device.zeros(1, np.int32)
        q = bed.nan(1, shape.heads, shape.head_dim)
        one = (context, shape.kv_heads, shape.head_dim)
        cache = [bed.normal(*one, dtype=np.float16) for _ in "kv"]

        def launch(i: int) -> None:
            weights = (parts[0][i], parts[1][i], parts[2][i])
            matvec_qkv(bed.device, weights, biases, x, table, position, q, *cache)

        return Work(launch, copies, (q,))

    return Case("qkv", size, "q, k, v", ",".join(types), 1, n_bytes, 0, "s8", prepare)


def attention_case(size: str, shape: Size, rows: int, depth: int) -> Case:
    """T tokens behind `depth` others, one layer, f16 cache."""
    context = depth + rows
    cache_bytes = 2 * context * shape.kv_width * 2
    keys_seen = rows * depth + rows * (rows + 1) // 2

    def prepare(bed: Bed) -> Work:
        device = bed.device
        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        how = attention_plan(rows, *sizes, context, device.sm_count, device.cluster_limit)
        copies = min(bed.copies(cache_bytes), 64)
        one = (context, shape.kv_heads, shape.head_dim)
        caches = [[bed.normal(*one, dtype=np.float16) for _ in "kv"] for _ in range(copies)]
        q = bed.normal(rows, shape.heads, shape.head_dim)
        position = device.upload(np.array([depth], np.int32))
        out = bed.nan(rows, shape.d)
        quantised = Activations.empty(device, rows, shape.d, floats=False, q8=True)
        partials = device.empty(max(1, how.partials), np.float32)
        arrivals = device.zeros(max(1, how.arrivals), np.int32)

        def launch(i: int) -> None:
            attention(
                device, how, q, *caches[i], position, out=out, qs=quantised.qs, ds=quantised.ds,
                partials=partials, arrivals=arrivals,
            )  # fmt: skip

        return Work(launch, copies, (out,))

    n_bytes = cache_bytes + 4 * rows * shape.d * 2
    ops = 4 * keys_seen * shape.d if rows > 1 else 0
    what = f"depth {depth}" if rows == 1 else "prefill"
    return Case("attention", size, what, "f16", rows, n_bytes, ops, "f16", prepare)


def norm(size: str, shape: Size, rows: int) -> Case:
    def prepare(bed: Bed) -> Work:
        x, weight = bed.normal(rows, shape.d), bed.normal(shape.d)
        whole = Activations.empty(bed.device, rows, shape.d, q8=True, scaled=True)
        out = replace(whole, x=bed.nan(rows, shape.d))
        return Work(lambda i: rms_norm(bed.device, x, weight, out, 1e-6), 1, (out.x,))

    n_bytes = int(rows * shape.d * (4 + 4 + 1.25))
    return Case("rms_norm", size, "", "f32", rows, n_bytes, 0, "", prepare)


def sampler(size: str, shape: Size, name: str) -> Case:
    def prepare(bed: Bed) -> Work:
        sampler = Sampler(bed.device, shape.vocab, max_history=4096)
        sampler.begin(SAMPLERS[name], 1, ())
        logits = bed.normal(shape.vocab)
        return Work(lambda i: sampler.sample(logits, advance=0), 1)

    return Case("sampling", size, name, "f32", 1, 4 * shape.vocab, 0, "", prepare)


def types_of(size: str, ftype: str, role: str, asked: list[str]) -> list[str]:
    """The types that a role has in a file, or those asked for that its rows allow."""
    shape = SIZES[size]
    if asked:
        k = shape.ffn if role == "ffn_down" else shape.d
        return [name for name in asked if k % by_name(name).block_size == 0]
    found = {
        t: None for name, t in matrix_types(shape, ftype).items() if name.split(".")[-2] == role
    }
    return list(found)


def choose(options: Namespace) -> list[Case]:
    """The cases of a command line, smaller models first."""
    return [
        case
        for size in options.sizes
        for case in _of_size(size, options)
        if case.kernel in options.kernels
    ]


def _of_size(size: str, options: Namespace) -> Iterator[Case]:
    shape, shapes = SIZES[size], matrix_shapes(SIZES[size])

    def types(role: str) -> list[str]:
        return types_of(size, options.ftype, role, options.types)

    def matrices(roles: tuple[str, ...]) -> Iterator[tuple[str, str, int, int]]:
        for short in roles:
            role = ROLES[short]
            name = f"{role}.weight" if role == "output" else f"blk.0.{role}.weight"
            for type_name in types(role):
                yield short, type_name, *shapes[name]

    for matrix in matrices(("o", "down", "head")):
        yield linear(size, *matrix, rows=1)
    for type_name in types("ffn_gate"):
        if by_name(type_name).block_size > 1:
            yield gate_up(size, shape, type_name)
    for type_name in types("attn_v"):
        if by_name(type_name).block_size > 1:
            most = type_name if options.types else types("attn_q")[0]
            yield qkv(size, shape, (most, most, type_name))
    for short, type_name, n, k in matrices(("gate", "down")):
        for rows in options.rows:
            if type_name not in HALVES:
                yield linear(size, short, type_name, n, k, rows)
    for rows in options.rows:
        for short, type_name, n, k in matrices(("o", "down")):
            if type_name != "F32":
                yield linear_f16(size, short, type_name, n, k, rows)
        for type_name in types("ffn_gate"):
            if type_name != "F32":
                yield gate_up_f16_case(size, shape, type_name, rows)
    for depth in options.depths:
        yield attention_case(size, shape, 1, depth)
    for rows in options.prefill:
        yield attention_case(size, shape, rows, 0)
    for rows in (1, 2048):
        yield norm(size, shape, rows)
    for name in SAMPLERS:
        yield sampler(size, shape, name)

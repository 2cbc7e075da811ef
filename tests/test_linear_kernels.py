"""Linear layers on the device: layouts, dequantisation, products of every type and row count."""

from __future__ import annotations

import numpy as np
import pytest
from ggufs import quantize as quantize_weights

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device
from minfer_cuda.kernels.elementwise import add, pick, quantize, swiglu
from minfer_cuda.kernels.embed import embed
from minfer_cuda.kernels.layouts import Activations, Matrix, Unnormed, matrix_bytes, padded
from minfer_cuda.kernels.matmul import ARRIVALS, PARTIALS, matmul, plan
from minfer_cuda.kernels.matmul_float import matmul_float
from minfer_cuda.kernels.matvec import matvec, matvec_gate_up, matvec_qkv
from minfer_cuda.kernels.norm import rms_norm
from minfer_cuda.kernels.repack import repack
from minfer_cuda.kernels.rope import rope_store
from minfer_cuda.quants import QUANT_TYPES, QuantType, by_name

CUDA_TYPES = [q for q in QUANT_TYPES.values() if q.cuda_name]
QUANTISED = [q for q in CUDA_TYPES if q.block_size > 1]
FLOATS = [q for q in CUDA_TYPES if q.block_size == 1]
EPS = 2.0**-23


def ids(quant: QuantType) -> str:
    return quant.name


def columns(quant: QuantType) -> int:
    """A width that is no multiple of the record's where the type allows it."""
    return 512 if quant.block_size == 256 else 416


def random_weights(
    rng: np.random.Generator, quant: QuantType, n: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """File bytes (n, row bytes) and their float64 values (n, k)."""
    values = (rng.standard_normal((n, k)) * 0.05).astype(np.float32)
    raw = quantize_weights(values, quant.name, rng).view(np.uint8).reshape(n, -1)
    return raw, quant.dequantize(raw).astype(np.float64)


def upload(device: Device, quant: QuantType, raw: np.ndarray, k: int) -> Matrix:
    n = raw.shape[0]
    data = device.upload(raw.reshape(-1))
    if quant.block_size == 1:
        return Matrix(quant, n, k, data)
    return repack(device, quant, data, n, k)


def q8_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantised values (T, K) and scales (T, K/32): the formula of cuda/q8.cuh in NumPy."""
    groups = np.zeros((x.shape[0], padded(x.shape[1])), np.float32)
    groups[:, : x.shape[1]] = x
    groups = groups.reshape(x.shape[0], -1, 32)
    amax = np.abs(groups).max(-1, keepdims=True)
    amax[amax < 1e-35] = 0
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, 0).astype(np.float32)
    q = np.rint(groups * inverse)
    return q.reshape(x.shape[0], -1), (amax * np.float32(1 / 127))[..., 0]


def to_q8(device: Device, x: np.ndarray, *, floats: bool = False) -> Activations:
    out = Activations.empty(device, *x.shape, floats=False, q8=True)
    array = device.upload(x)
    quantize(device, array, out)
    return Activations(array if floats else None, out.qs, out.ds)


def unpermute(qs: np.ndarray) -> np.ndarray:
    """Layout 1's bytes (T, Kp) in the order of K."""
    k = np.arange(128)
    at = (k // 4 % 4) * 32 + (k // 32) * 8 + (k // 16 % 2) * 4 + k % 4
    return qs.reshape(qs.shape[0], -1, 128)[:, :, at].reshape(qs.shape)


def nan(device: Device, *shape: int) -> object:
    return device.upload(np.full(shape, np.nan, np.float32))


def reference(w: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Product with q8 activations in float64, and the magnitudes that bound its rounding."""
    q, d = q8_of(x)
    values = (q.reshape(q.shape[0], -1, 32) * d[..., None].astype(np.float64)).reshape(q.shape)
    values = values[:, : w.shape[1]]
    return values @ w.T, np.abs(values) @ np.abs(w).T


def bound(magnitude: np.ndarray, w: np.ndarray, x: np.ndarray, quant: QuantType) -> np.ndarray:
    """Rounding of a float32 sum of K/16 products, each of a scale, a scale and an exact integer
    (3 roundings), added in any order. With minima the two terms of a block cancel, so the bound is
    over their magnitudes: at most 16 codes' worth of |w| more, taken as the largest |w| of all."""
    steps = w.shape[1] / 16 + 8
    cancelled = 0.0
    if quant.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
        cancelled = 2 * np.abs(w).max() * np.abs(x).sum(-1, keepdims=True)
    return steps * EPS * (magnitude + cancelled) + 1e-30


@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_records_take_no_byte_more_than_the_file_for_whole_strips(quant: QuantType) -> None:
    k = 2 * 256
    assert matrix_bytes(quant, 24, k) == 24 * k // quant.block_size * quant.block_bytes


@pytest.mark.parametrize("quant", CUDA_TYPES, ids=ids)
def test_embedding_rows_are_exact_in_every_type(device: Device, quant: QuantType) -> None:
    rng = np.random.default_rng(1)
    n, k = 21, columns(quant)
    raw, _ = random_weights(rng, quant, n, k)
    table = upload(device, quant, raw, k)
    tokens = np.array([0, n - 1, 7, 8, 15, 16, *range(n)], np.int32)
    x = nan(device, len(tokens), k)
    embed(device, table, device.upload(tokens), x)
    assert np.array_equal(device.download(x), quant.dequantize(raw)[tokens])


def test_quantised_rows_equal_the_formula_in_every_byte(device: Device) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5, 416)).astype(np.float32)
    x[1] = 0
    x[2] *= 1e-38
    x[3, 100] = 1e4
    x[4] = 3000.0
    out = to_q8(device, x)
    q, d = q8_of(x)
    qs, ds = device.download(out.qs), device.download(out.ds)
    assert np.array_equal(unpermute(qs), q)
    scales = ds.view(np.float32).reshape(5, -1, 2)[..., 0]
    sums = ds.view(np.int16).reshape(5, -1, 4)[..., 2:]
    assert np.array_equal(scales, d)
    assert np.array_equal(sums, q.reshape(5, -1, 2, 16).sum(-1))


def test_a_nan_makes_its_groups_scale_nan(device: Device) -> None:
    x = np.ones((1, 128), np.float32)
    x[0, 40] = np.nan
    ds = device.download(to_q8(device, x).ds).view(np.float32)[0, ::2]
    assert list(np.isnan(ds)) == [False, True, False, False]


@pytest.mark.parametrize("k", [32, 416, 1056])
def test_rms_norm_equals_float64(device: Device, k: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, k)).astype(np.float32) * 7
    weight = rng.standard_normal(k).astype(np.float32)
    out = Activations.empty(device, 3, k, floats=True, q8=True, scaled=True)
    rms_norm(device, device.upload(x), device.upload(weight), out, 1e-6)
    x64 = x.astype(np.float64)
    exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * weight
    y = device.download(out.x)
    assert np.all(np.abs(y - exact) <= (k / 8 + 8) * EPS * np.abs(exact) + 1e-12)
    assert np.array_equal(unpermute(device.download(out.qs)), q8_of(x * weight)[0])
    rms = np.sqrt((x64**2).mean(-1) + 1e-6)
    assert np.all(np.abs(device.download(out.scale) * rms - 1) <= (k / 8 + 8) * EPS)


def test_swiglu_and_add_equal_float64(device: Device) -> None:
    rng = np.random.default_rng(4)
    gate_up = rng.standard_normal((3, 2 * 160)).astype(np.float32) * 4
    gate, up = gate_up[:, :160].astype(np.float64), gate_up[:, 160:].astype(np.float64)
    out = Activations.empty(device, 3, 160, floats=True, q8=True)
    swiglu(device, device.upload(gate_up), out)
    y = device.download(out.x)
    exact = gate / (1 + np.exp(-gate)) * up
    assert np.all(np.abs(y - exact) <= 16 * EPS * np.abs(exact) + 1e-12)
    assert np.array_equal(unpermute(device.download(out.qs)), q8_of(y)[0])
    total = nan(device, 3, 160)
    add(device, out.x, out.x, total)
    assert np.array_equal(device.download(total), y + y)


def test_a_row_is_picked_of_each_array(device: Device) -> None:
    rng = np.random.default_rng(6)
    wide = rng.standard_normal((5, 700)).astype(np.float32)
    halves = rng.standard_normal((5, 128)).astype(np.float16)
    scales = rng.standard_normal(5).astype(np.float32)
    sources = [device.upload(array) for array in (wide, halves, scales)]
    rows = [device.zeros((1, *array.shape[1:]), array.dtype) for array in sources]
    pick(device, device.upload(np.array([3], np.int32)), list(zip(sources, rows, strict=True)))
    for array, row in zip((wide, halves, scales), rows, strict=True):
        assert np.array_equal(device.download(row), array[3:4])
    with pytest.raises(KernelError, match="0 arrays, expected 1 to 6"):
        pick(device, device.zeros((1,), np.int32), [])


@pytest.mark.parametrize("n", [8, 21, 136])
@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_matvec_equals_float64(device: Device, quant: QuantType, n: int) -> None:
    rng = np.random.default_rng(5)
    k = columns(quant)
    raw, w = random_weights(rng, quant, n, k)
    x = rng.standard_normal((1, k)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal(n).astype(np.float32)
    y = nan(device, n)
    matvec(
        device, upload(device, quant, raw, k), to_q8(device, x), y,
        bias=device.upload(bias), residual=device.upload(residual),
    )  # fmt: skip
    exact, magnitude = reference(w, x)
    error = np.abs(device.download(y) - (exact[0] + bias + residual))
    assert np.all(
        error
        <= bound(magnitude, w, x, quant)[0] + 4 * EPS * np.abs(bias) + 4 * EPS * np.abs(residual)
    )


@pytest.mark.parametrize("records", [6, 13])
def test_warps_that_share_a_strip_add_up(device: Device, records: int) -> None:
    """2 and 4 segments, over blocks that have one strip, two or none."""
    quant = by_name("Q4_0")
    rng = np.random.default_rng(12)
    n, k = 40, 128 * records
    raw, w = random_weights(rng, quant, n, k)
    x = rng.standard_normal((1, k)).astype(np.float32)
    y = nan(device, n)
    matvec(device, upload(device, quant, raw, k), to_q8(device, x), y)
    exact, magnitude = reference(w, x)
    assert np.all(np.abs(device.download(y) - exact[0]) <= bound(magnitude, w, x, quant)[0])


FAMILIES = ("Q5_0", "Q4_K", "Q6_K")  # one scale a block, scales and minima, two scales a block
ROW_COUNTS = (2, 7, 8, 9, 15, 16, 17, 33, 65, 129)
ON_GPU = pytest.mark.gpu  # the other types' row counts take the shim too long


@pytest.mark.parametrize(
    ("quant", "tokens"),
    [
        pytest.param(
            q, t, id=f"{q.name}-{t}", marks=() if q.name in FAMILIES or t in (2, 17) else ON_GPU
        )
        for q in QUANTISED
        for t in ROW_COUNTS
    ],
)
def test_matmul_equals_float64(device: Device, quant: QuantType, tokens: int) -> None:
    rng = np.random.default_rng(6)
    n, k = 136 if tokens < 10 else 21, columns(quant)
    raw, w = random_weights(rng, quant, n, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    stride, column = n + 3, 2
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((tokens, stride)).astype(np.float32)
    y = device.upload(residual)
    matmul(
        device, upload(device, quant, raw, k), to_q8(device, x), y,
        column=column, bias=device.upload(bias), residual=y,
    )  # fmt: skip
    exact, magnitude = reference(w, x)
    result = device.download(y)
    inside = slice(column, column + n)
    error = np.abs(result[:, inside] - (exact + bias + residual[:, inside]))
    slack = 4 * EPS * (np.abs(bias) + np.abs(residual[:, inside]))
    assert np.all(error <= bound(magnitude, w, x, quant) + slack)
    outside = np.ones(stride, bool)
    outside[inside] = False
    assert np.array_equal(result[:, outside], residual[:, outside])


@pytest.mark.parametrize("tokens", [3, 20])
def test_split_products_add_up_and_leave_their_counters_zero(device: Device, tokens: int) -> None:
    quant = by_name("Q4_0")
    rng = np.random.default_rng(7)
    n, k = 21, 128 * 9
    how = plan(quant, n, k, tokens, 4, device.shared_limit)
    assert how.splits == 2
    raw, w = random_weights(rng, quant, n, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    matrix, activations = upload(device, quant, raw, k), to_q8(device, x)
    partials = device.empty(min(PARTIALS, 1 << 16), np.float32)
    arrivals = device.zeros(ARRIVALS, np.int32)
    results = []
    for _ in range(2):
        y = nan(device, tokens, n)
        matmul(device, matrix, activations, y, partials=partials, arrivals=arrivals)
        results.append(device.download(y))
    exact, magnitude = reference(w, x)
    assert np.all(np.abs(results[0] - exact) <= bound(magnitude, w, x, quant))
    assert np.array_equal(results[0], results[1])
    assert not device.download(arrivals).any()


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
@pytest.mark.parametrize("quant", FLOATS, ids=ids)
def test_float_products_equal_float64(device: Device, quant: QuantType, tokens: int) -> None:
    rng = np.random.default_rng(8)
    n, k = 21, 416
    raw, w = random_weights(rng, quant, n, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    residual = rng.standard_normal((tokens, n)).astype(np.float32)
    y = nan(device, tokens, n)
    activations = Activations(device.upload(x), None, None)
    matmul_float(
        device, upload(device, quant, raw, k), activations, y, residual=device.upload(residual)
    )
    exact = x.astype(np.float64) @ w.T + residual
    magnitude = np.abs(x) @ np.abs(w).T
    assert np.all(
        np.abs(device.download(y) - exact)
        <= (k / 32 + 8) * EPS * magnitude + 4 * EPS * np.abs(residual)
    )


def unnormed_row(device: Device, rng: np.random.Generator, k: int) -> tuple[Unnormed, Activations]:
    """A row that its consumer norms, and the same row normed by the kernel of its own."""
    x = device.upload(rng.standard_normal((1, k)).astype(np.float32) * 3)
    weight = device.upload(rng.standard_normal(k).astype(np.float32))
    apart = Activations.empty(device, 1, k, q8=True, scaled=True)
    rms_norm(device, x, weight, apart, 1e-6)
    return Unnormed(x, weight, 1e-6), apart


@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_a_product_that_norms_its_row_gives_the_bits_of_norm_and_product(
    device: Device, quant: QuantType
) -> None:
    rng = np.random.default_rng(12)
    n, k = 21, 2048 if quant.block_size == 256 else 1440  # more than one value a thread
    w = upload(device, quant, random_weights(rng, quant, n, k)[0], k)
    row, apart = unnormed_row(device, rng, k)
    plain, fused = nan(device, n), nan(device, n)
    matvec(device, w, apart, plain)
    matvec(device, w, row, fused)
    assert np.array_equal(
        device.download(plain).view(np.uint32), device.download(fused).view(np.uint32)
    )


@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_fused_gate_up_gives_the_bits_of_two_products_and_swiglu(
    device: Device, quant: QuantType
) -> None:
    rng = np.random.default_rng(9)
    f, k = 160, columns(quant)
    gate, up = (upload(device, quant, random_weights(rng, quant, f, k)[0], k) for _ in range(2))
    row, x = unnormed_row(device, rng, k)
    apart = nan(device, 1, 2 * f)
    flat = apart.reshape(-1)
    matvec(device, gate, x, flat[:f])
    matvec(device, up, x, flat[f:])
    plain = Activations.empty(device, 1, f, floats=True, q8=True)
    swiglu(device, apart, plain)
    fused = Activations.empty(device, 1, f, floats=True, q8=True)
    matvec_gate_up(device, gate, up, row, fused)
    for a, b in ((plain.x, fused.x), (plain.qs, fused.qs), (plain.ds, fused.ds)):
        assert np.array_equal(device.download(a).view(np.uint8), device.download(b).view(np.uint8))


@pytest.mark.parametrize("cache", [np.float16, np.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("types", ["Q4_K Q4_K Q6_K", "Q5_0 Q5_0 Q8_0", "Q4_0 Q8_0 Q2_K"])
def test_fused_qkv_gives_the_bits_of_three_products_and_rope(
    device: Device, types: str, cache: type
) -> None:
    rng = np.random.default_rng(10)
    heads, kv_heads, head_dim, context, at = 3, 1, 64, 5, 3  # two strips of a block on four SMs
    k = 512
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    weights, biases = [], []
    for name, n in zip(types.split(), widths, strict=True):
        quant = by_name(name)
        weights.append(upload(device, quant, random_weights(rng, quant, n, k)[0], k))
        biases.append(rng.standard_normal(n).astype(np.float32) * 20)
    row, x = unnormed_row(device, rng, k)
    angles = rng.standard_normal((context, head_dim // 2))
    table = device.upload(np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32))
    position = device.upload(np.array([at], np.int32))
    kv = (context, kv_heads, head_dim)

    projected = nan(device, 1, sum(widths))
    start = 0
    for w in weights:
        matvec(device, w, x, projected.reshape(-1)[start : start + w.rows])
        start += w.rows
    plain = [nan(device, 1, heads, head_dim), device.zeros(kv, cache), device.zeros(kv, cache)]
    bias = device.upload(np.concatenate(biases))
    rope_store(device, projected, bias, table, position, *plain)
    fused = [nan(device, 1, heads, head_dim), device.zeros(kv, cache), device.zeros(kv, cache)]
    each = tuple(device.upload(b) for b in biases)
    matvec_qkv(device, tuple(weights), each, row, table, position, *fused)
    for a, b in zip(plain, fused, strict=True):
        assert np.array_equal(device.download(a).view(np.uint8), device.download(b).view(np.uint8))


def test_huge_activations_stay_finite(device: Device) -> None:
    """A block of 32 x 3000 sums to 96,000, past half's 65,504: sums are integers here."""
    quant = by_name("Q4_K")
    rng = np.random.default_rng(11)
    raw, w = random_weights(rng, quant, 16, 512)
    x = np.full((2, 512), 3000.0, np.float32)
    matrix, activations = upload(device, quant, raw, 512), to_q8(device, x)
    y = nan(device, 2, 16)
    matmul(device, matrix, activations, y)
    one = nan(device, 16)
    matvec(device, matrix, activations.rows(0, 1), one)
    exact, magnitude = reference(w, x)
    assert np.all(np.abs(device.download(y) - exact) <= bound(magnitude, w, x, quant))
    assert np.all(np.abs(device.download(one) - exact[0]) <= bound(magnitude, w, x, quant)[0])

"""Products on f16 tensor cores: every type, tile and way of sharing the work, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import asked_kernels
from test_linear_kernels import QUANTISED, ROW_COUNTS, columns, ids, nan, random_weights, upload

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, matmul_few
from minfer_cuda.kernels import matmul_f16 as f16
from minfer_cuda.kernels.elementwise import swiglu
from minfer_cuda.kernels.layouts import Activations, Matrix, ceil_div, padded
from minfer_cuda.kernels.matmul_f16 import (
    ARRIVALS,
    NARROW,
    PARTIALS,
    TILES,
    WGMMA_96,
    WGMMA_128,
    WGMMA_160,
    WGMMA_256,
    Tile,
    clusters_at_once,
    gate_up_f16,
    halve,
    matmul_f16,
    plan,
    shared_bytes,
    stack,
    stages,
    tiles_of,
    with_one_peak,
    with_peak,
)
from minfer_cuda.kernels.norm import rms_norm
from minfer_cuda.quants import HALVES, QuantType, by_name

EPS = 2.0**-23
HALF = 2.0**-11  # half a unit in the last place of an f16, relative
FLOATS = [by_name(name) for name in HALVES]


@pytest.fixture(scope="module")
def scratch(device: Device) -> dict[str, object]:
    return {
        "partials": device.empty(PARTIALS, np.float32),
        "arrivals": device.zeros(ARRIVALS, np.int32),
    }


def matrix(
    device: Device, rng: np.random.Generator, quant: QuantType, n: int, k: int
) -> tuple[Matrix, np.ndarray]:
    raw, values = random_weights(rng, quant, n, k)
    return with_peak(device, upload(device, quant, raw, k)), values


def halved(device: Device, x: np.ndarray) -> Activations:
    out = Activations.empty(device, *x.shape, f16=True)
    halve(device, device.upload(x), out)
    return out


def bound(w: np.ndarray, x: np.ndarray, quant: QuantType) -> np.ndarray:
    """|y - exact| of y = sum w x. A weight u S + M is rounded once, S and M before: 3 HALF of
    |scale code| + |minimum|, which is at most 3 max|w| of all for types with minima (as in
    test_linear_kernels), and |w| itself for the others; x once: HALF |x|. Small weights are exact
    to 2^-25 of their lifted range, whose top is at least 2^-6: 2^-19 max|w|. Sums of K products in
    float32, in any order.

    Weights of F16 are exact, those of BF16 to 2^-39 of the largest, as activations are below the
    reach of f16: the lifted tops are at least 2^14."""
    magnitude = np.abs(x) @ np.abs(w).T
    if quant in FLOATS:
        small = np.abs(x).sum(-1, keepdims=True) * np.abs(w).max()
        small = small + np.abs(x).max(-1, keepdims=True) * np.abs(w).sum(-1)
        return (HALF + (w.shape[1] + 8) * EPS) * magnitude + 2.0**-39 * small
    rows = np.abs(x).sum(-1, keepdims=True) * np.abs(w).max()
    cancelled = 3 * rows if quant.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else 0.0
    small = 2.0**-19 * rows
    return 3 * HALF * cancelled + (4 * HALF + w.shape[1] * EPS) * magnitude + small + 1e-30


def unpermute(h: np.ndarray) -> np.ndarray:
    """f16 activations (T, Kp) in the order of K: undoes half_offset of cuda/quants_f16.cuh."""
    k = np.arange(128)
    at = k // 16 * 16 + k % 2 * 8 + k // 2 % 8
    return h.reshape(h.shape[0], -1, 128)[:, :, at].reshape(h.shape)


def test_halved_rows_are_rounded_once_and_scaled_by_a_power_of_two(device: Device) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 416)).astype(np.float32)
    x[1] = 0
    x[2] *= 1e-38
    x[3, 100] = 1e5
    x[4] = 3000.0
    x[5] *= 1e30
    out = halved(device, x)
    scale = device.download(out.hs)
    assert np.array_equal(np.frexp(scale)[0], np.full(6, 0.5))
    h = unpermute(device.download(out.h)).astype(np.float64)
    assert not h[:, 416:].any()
    values = h[:, :416] * scale[:, None].astype(np.float64)
    smallest = scale[:, None] * 2.0**-25
    assert np.all(np.abs(values - x) <= np.maximum(HALF * np.abs(x), smallest))
    largest = np.abs(h).max(-1)
    assert np.all((largest[[0, 3, 4, 5]] >= 2**14) & (largest[[0, 3, 4, 5]] <= 2**15))


@pytest.mark.parametrize("k", [32, 416, 2080])
def test_normed_rows_are_rounded_once_and_fill_the_range(device: Device, k: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, k)).astype(np.float32) * 7
    x[1] *= 1e4
    x[2] *= 1e-12
    x[3] = 0
    weight = rng.standard_normal(k).astype(np.float32)
    out = Activations.empty(device, 4, k, f16=True)
    rms_norm(device, device.upload(x), device.upload(weight), out, 1e-6)
    h = unpermute(device.download(out.h)).astype(np.float64)
    assert not h[:, k:].any() and not h[3].any()
    largest = np.abs(h[:3]).max(-1)
    assert np.all((largest >= 2**14) & (largest <= 2**15))
    x64 = x.astype(np.float64)
    exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * weight
    scale = device.download(out.hs)[:, None].astype(np.float64)
    error = np.abs(h[:, :k] * scale - exact)
    assert np.all(error <= (HALF + (k / 8 + 8) * EPS) * np.abs(exact) + scale * 2.0**-25)


def test_swiglu_gives_the_f16_form_that_fused_products_give(device: Device) -> None:
    rng = np.random.default_rng(4)
    gate_up = device.upload(rng.standard_normal((3, 2 * 160)).astype(np.float32) * 4)
    out = Activations.empty(device, 3, 160, floats=True, f16=True)
    swiglu(device, gate_up, out)
    h = unpermute(device.download(out.h))
    assert np.array_equal(h[:, :160], (device.download(out.x) / 64).astype(np.float16))
    assert not h[:, 160:].any()
    assert np.array_equal(device.download(out.hs), np.full(3, 64.0))


@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_the_peak_is_the_largest_scale(device: Device, quant: QuantType) -> None:
    """The lift makes it reach [2^14, 2^15); what a code of 1 is worth is at most the peak."""
    rng = np.random.default_rng(2)
    w, values = matrix(device, rng, quant, 21, columns(quant))
    (peak,) = device.download(w.peak)
    codes = {"Q4_0": 8, "Q4_1": 16, "Q5_0": 16, "Q5_1": 32, "Q8_0": 127, "Q2_K": 4, "Q3_K": 4,
             "Q4_K": 16, "Q5_K": 32, "Q6_K": 32, "IQ4_NL": 127, "IQ4_XS": 127}  # fmt: skip
    steps = np.abs(values).max() / peak
    assert 0.2 * codes[quant.name] <= steps <= 2.1 * codes[quant.name]


def test_the_peak_of_bf16_is_its_largest_finite_value_and_f16_needs_none(device: Device) -> None:
    bits = np.arange(1, 3 * 416 + 1, dtype=np.uint16)
    bits[[5, 400, 1000]] = 0xC2A0, 0x7F80, 0xFFC1  # -80, infinity, NaN
    values = bits.view(np.uint8).reshape(3, -1)
    w = with_peak(device, upload(device, by_name("BF16"), values, 416))
    assert device.download(w.peak) == [80.0]
    assert with_peak(device, upload(device, by_name("F16"), values, 416)).peak is None


def needs_wgmma(device: Device, tile: Tile) -> None:
    if tile.wide and device.arch != 90:
        pytest.skip("sm_90 alone has wgmma")


def check(
    device: Device,
    scratch: dict[str, object],
    quant: QuantType,
    n: int,
    k: int,
    tokens: int,
    tile: Tile | None = None,
) -> None:
    rng = np.random.default_rng(6)
    w, values = matrix(device, rng, quant, n, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    stride, column = n + 3, 2
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((tokens, stride)).astype(np.float32)
    y = device.upload(residual)
    matmul_f16(
        device, w, halved(device, x), y, column=column, bias=device.upload(bias), residual=y,
        tile=tile, **scratch,
    )  # fmt: skip
    result = device.download(y)
    inside = slice(column, column + n)
    exact = x.astype(np.float64) @ values.T + bias + residual[:, inside]
    slack = 4 * EPS * (np.abs(bias) + np.abs(residual[:, inside]))
    assert np.all(np.abs(result[:, inside] - exact) <= bound(values, x, quant) + slack)
    outside = np.ones(stride, bool)
    outside[inside] = False
    assert np.array_equal(result[:, outside], residual[:, outside])
    assert not device.download(scratch["arrivals"]).any()


@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_products_of_every_type_equal_float64(
    device: Device, scratch: dict[str, object], quant: QuantType
) -> None:
    check(device, scratch, quant, 21, columns(quant), 11, NARROW)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_products_of_every_type_by_wgmma_equal_float64(
    device: Device, scratch: dict[str, object], quant: QuantType, which: int
) -> None:
    needs_wgmma(device, WGMMA_128)
    tile = tiles_of(90, quant, device.shared_limit)[which]
    check(device, scratch, quant, 21, columns(quant), 11, tile)


def forced(
    device: Device, monkeypatch: pytest.MonkeyPatch, how: matmul_few.Plan
) -> list[tuple[str, str]]:
    """Every product is cut up so; the kernels that are asked for."""
    monkeypatch.setattr(matmul_few, "plan", lambda *sizes, gated: how)
    monkeypatch.setattr(matmul_few.Plan, "clocks", lambda self, sm_count: 0)
    return asked_kernels(device, monkeypatch)


def shared_out(monkeypatch: pytest.MonkeyPatch, how: f16.Plan) -> None:
    """Every product is shared out so."""
    monkeypatch.setattr(f16, "plan", lambda *sizes, **kinds: how)


@pytest.mark.parametrize("tokens", [5, 19, 27])
@pytest.mark.parametrize("quant", QUANTISED, ids=ids)
def test_few_tokens_of_every_type_equal_float64(
    device: Device,
    scratch: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    quant: QuantType,
    tokens: int,
) -> None:
    asked = asked_kernels(device, monkeypatch)
    check(device, scratch, quant, 21, columns(quant), tokens)
    assert ("matmul_few", matmul_few.instance(quant, max(2, ceil_div(tokens, 8)))) in asked


# units of a block, parts of K, tokens: one unit in pieces of all warps, more units than warps of
# one chunk each, parts of K of which the last is short, and two blocks of tokens
CUTS = [(1, 1, 16), (20, 10, 3), (3, 4, 16), (4, 2, 21), (2, 3, 32), (5, 1, 40)]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_few_tokens_equal_float64_however_the_product_is_cut(
    device: Device,
    scratch: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cut: tuple[int, int, int],
) -> None:
    quant, (units, parts, tokens) = by_name(name), cut
    n, k = (330, 1280) if units > 16 else (77, 1280)
    how = matmul_few.cut(quant, ceil_div(n, 16), 10, tokens, units, ceil_div(10, parts))
    asked = forced(device, monkeypatch, how)
    rng = np.random.default_rng(21)
    w, values = matrix(device, rng, quant, n, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    halves, results = halved(device, x), []
    for _ in range(2):
        y = nan(device, tokens, n)
        matmul_f16(device, w, halves, y, **scratch)
        results.append(device.download(y))
    assert ("matmul_few", matmul_few.instance(quant, how.tiles)) in asked
    error = np.abs(results[0] - x.astype(np.float64) @ values.T)
    assert np.all(error <= bound(values, x, quant))
    assert np.array_equal(results[0], results[1])  # no bit depends on who comes last
    assert not device.download(scratch["arrivals"]).any()


@pytest.mark.parametrize("card", [(132, 227 << 10), (108, 163 << 10), (84, 99 << 10)], ids=str)
def test_a_plan_for_few_tokens_fits_the_card_and_covers_the_product(card: tuple[int, int]) -> None:
    for quant in (by_name("Q4_K"), by_name("Q6_K"), by_name("F16")):
        for rows, cols in ((3584, 3584), (18944, 3584), (3584, 18944), (29568, 8192), (896, 4864)):
            for tokens in (2, 16, 17, 64, 2048):
                for gated in (False, True):
                    how = matmul_few.plan(quant, rows, cols, tokens, *card, gated=gated)
                    if how is None:
                        assert tokens > 16 or cols > 4096
                        continue
                    assert how.shared <= card[1] and how.partials <= matmul_few.PARTIALS
                    assert how.arrivals <= matmul_few.ARRIVALS
                    assert how.units * how.grid[0] >= how.all_units * how.parts
                    assert (how.parts - 1) * how.groups * 128 < cols <= how.parts * how.groups * 128
                    assert how.token_blocks * how.tiles * 8 >= tokens


@pytest.mark.parametrize("tokens", ROW_COUNTS)
@pytest.mark.parametrize("quant", FLOATS, ids=ids)
def test_products_of_float_types_equal_float64(
    device: Device, scratch: dict[str, object], quant: QuantType, tokens: int
) -> None:
    """Widths that end on a chunk of 64 values, and in the middle and the first eighth of one."""
    k = {2: 896, 7: 8, 9: 72}.get(tokens, 416)
    check(device, scratch, quant, 21 if tokens % 2 else 133, k, tokens)


@pytest.mark.parametrize(
    ("tile", "name"),
    [(tile, name) for tile in TILES for name in ("Q4_K", "Q8_0", *HALVES)]
    + [
        (WGMMA_128, "Q4_K"),
        (WGMMA_128, "Q8_0"),
        (WGMMA_96, "Q6_K"),
        (WGMMA_160, "Q6_K"),
        (WGMMA_160, "Q4_K"),
        (WGMMA_256, "Q6_K"),
        (WGMMA_256, "Q4_K"),
    ],
    ids=str,
)
def test_products_of_every_tile_equal_float64(
    device: Device, scratch: dict[str, object], tile: Tile, name: str
) -> None:
    """Ragged in rows and tokens: a second tile of each that is hardly filled."""
    n, tokens = tile.rows + 5, tile.tokens + 3
    if device.name == "SIMT shim":
        n, tokens = (21, tokens) if name in ("Q8_0", "F16") else (n, 19)
    needs_wgmma(device, tile)
    check(device, scratch, by_name(name), n, 256, tokens, tile)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("Q4_0", NARROW),
        *((name, NARROW) for name in HALVES),
        ("Q4_0", WGMMA_128),
        ("Q5_0", WGMMA_160),
        ("Q6_K", WGMMA_256),
    ],
    ids=str,
)
def test_a_tile_that_blocks_share_has_the_same_bits_every_time(
    device: Device,
    scratch: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tile: Tile,
) -> None:
    """Few tiles and long rows: every block has parts of tiles, which are added in one order."""
    needs_wgmma(device, tile)
    quant = by_name(name)
    rng = np.random.default_rng(7)
    n, k, tokens = 21, 128 * 20, 40
    how = plan(quant, n, k, tokens, device.sm_count, device.shared_limit, tiles=(tile,))
    how = replace(how, grid=7, cluster=1, waves=0, units=how.token_tiles * how.chunks)
    shared_out(monkeypatch, how)
    w, values = matrix(device, rng, quant, n, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    activations = halved(device, x)
    results = []
    for _ in range(2):
        y = nan(device, tokens, n)
        matmul_f16(device, w, activations, y, tile=tile, **scratch)
        results.append(device.download(y))
    exact = x.astype(np.float64) @ values.T
    assert np.all(np.abs(results[0] - exact) <= bound(values, x, quant))
    assert np.array_equal(results[0], results[1])
    assert not device.download(scratch["arrivals"]).any()


@pytest.mark.parametrize(
    ("tile", "tiles"),
    [
        (NARROW, (13, 1)),
        (NARROW, (25, 1)),
        (NARROW, (12, 2)),
        (WGMMA_128, (9, 1)),
        (WGMMA_128, (8, 2)),
        (WGMMA_160, (3, 2)),
    ],
    ids=str,
)
def test_whole_waves_and_shared_tiles_cover_everything(
    device: Device, scratch: dict[str, object], tile: Tile, tiles: tuple[int, int]
) -> None:
    """On 4 SMs, 12 blocks: a wave and a shared tile, two and one, two waves and none (8, 4)."""
    needs_wgmma(device, tile)
    quant = by_name("Q4_0")
    if device.name != "SIMT shim":
        tiles = (tiles[0] * device.sm_count // 4, tiles[1])
    n, tokens = tile.rows * tiles[0] - 5, tile.tokens * (tiles[1] - 1) + 27
    check(device, scratch, quant, n, 256, tokens, tile)


def test_blocks_share_tiles_evenly_where_there_are_fewer_tiles_than_blocks() -> None:
    """28 tiles of 28 chunks: 7 blocks each, of 4 chunks; of 148 chunks as many as an SM has."""
    for cols, blocks in ((3584, 7), (18944, 9)):
        how = plan(by_name("Q4_K"), 3584, cols, 40, 132, 227 << 10, tiles=(WGMMA_128,))
        assert (how.grid, how.waves, how.units) == (28 * blocks, 0, 28 * cols // 128)
    assert (
        plan(by_name("Q4_K"), 3584, 3584, 129, 132, 227 << 10, tiles=(WGMMA_128,)).tokens_each == 72
    )


def test_a_cluster_shares_each_tile_where_there_are_fewer_tiles_than_blocks() -> None:
    """28 tiles of o and down, 36 of q/k/v: as many blocks as eight GPCs of 16 SMs have room for."""
    for rows, cols, clusters in ((3584, 3584, (8, 4)), (3584, 18944, (8, 4)), (4608, 3584, (6, 3))):
        for tile, cluster in zip((WGMMA_128, WGMMA_256), clusters, strict=True):
            sizes = (rows, cols, 40, 132, 227 << 10)
            how = plan(by_name("Q4_K"), *sizes, tiles=(tile,), cluster_limit=16)
            assert (how.grid, how.cluster, how.units) == (rows // 128, cluster, 0)
    gate_up = plan(by_name("Q4_K"), 18944, 3584, 40, 132, 227 << 10, tiles=(WGMMA_128,),
                   cluster_limit=16, gated=True)  # fmt: skip
    assert (gate_up.grid, gate_up.cluster) == (264, 1)


@pytest.mark.parametrize("sm_count", [132, 114, 78, 16, 7])
def test_clusters_all_run_at_once(sm_count: int) -> None:
    """On eight GPCs of an eighth of the SMs, of which one is smaller."""
    for quant in (by_name("Q4_K"), by_name("Q6_K")):
        for rows, cols in ((128, 18944), (896, 4864), (1536, 8960), (2048, 1536), (3584, 18944)):
            for tile in tiles_of(90, quant, 227 << 10):
                sizes = (rows, cols, 128, sm_count, 227 << 10)
                how = plan(quant, *sizes, tiles=(tile,), cluster_limit=16)
                of_gpc = [sm_count // 8 * tile.blocks] * 7 + [(sm_count // 8 - 2) * tile.blocks]
                held = sum(max(0, blocks) // how.cluster for blocks in of_gpc)
                assert how.cluster == 1 or held >= how.grid


def test_an_h200_holds_seven_clusters_of_sixteen_sms() -> None:
    assert clusters_at_once(WGMMA_160, 16, 132) == 7
    assert clusters_at_once(WGMMA_128, 16, 132) == 15


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tile", "tokens"), [(WGMMA_128, 77), (WGMMA_128, 131), (WGMMA_160, 150), (WGMMA_256, 141)]
)
def test_a_cluster_adds_up_to_the_bits_of_global_memory(
    device: Device,
    scratch: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tile: Tile,
    tokens: int,
    gated: bool,
) -> None:
    """Blocks that share a tile evenly, as a cluster and through global memory; ragged in all."""
    needs_wgmma(device, tile)
    if device.cluster_limit == 1:
        pytest.skip("no clusters")
    rng, quant, n, k = np.random.default_rng(11), by_name("Q4_K"), 300, 256 * 11
    sizes = (quant, n, k, tokens, device.sm_count, device.shared_limit)
    how = plan(*sizes, tiles=(tile,), cluster_limit=6, gated=gated)
    assert how.cluster == 6
    flat = replace(how, grid=how.grid * 6, cluster=1, waves=0, units=how.grid * how.chunks)
    weights = [matrix(device, rng, quant, n, k)[0] for _ in range(2)]
    x = halved(device, rng.standard_normal((tokens, k)).astype(np.float32))
    results = []
    for one in (how, flat):
        shared_out(monkeypatch, one)
        if gated:
            out = Activations.empty(device, tokens, n, f16=True)
            gate_up_f16(device, *weights, x, out, tile=tile, **scratch)
            results.append(device.download(out.h))
        else:
            y = nan(device, tokens, n)
            matmul_f16(device, weights[0], x, y, tile=tile, **scratch)
            results.append(device.download(y))
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])
    assert not device.download(scratch["arrivals"]).any()


def test_quantised_types_go_by_wgmma_on_sm_90_alone() -> None:
    limit = 227 << 10
    for quant in QUANTISED:
        wide = tiles_of(90, quant, limit)
        assert wide == (WGMMA_96 if quant.name == "Q6_K" else WGMMA_128, WGMMA_160, WGMMA_256)
        for tile in wide:
            count = stages(quant, tile, limit)
            assert count >= 2
            assert tile.blocks * (shared_bytes(quant, tile, count) + 1024) <= 228 << 10
        assert all(tiles_of(arch, quant, limit) == TILES for arch in (75, 80, 86, 89, 100, 120))
    assert all(tiles_of(90, quant, limit) == TILES for quant in FLOATS)


@pytest.mark.parametrize("height", [3000.0, 1e5, 3e-6])
def test_activations_of_any_height_keep_their_precision(
    device: Device, scratch: dict[str, object], height: float
) -> None:
    quant = by_name("Q4_K")
    rng = np.random.default_rng(8)
    w, values = matrix(device, rng, quant, 16, 512)
    x = np.full((3, 512), height, np.float32)
    x[1] *= rng.standard_normal(512)
    x[2] = 0
    y = nan(device, 3, 16)
    matmul_f16(device, w, halved(device, x), y, **scratch)
    result = device.download(y)
    assert np.all(np.abs(result - x.astype(np.float64) @ values.T) <= bound(values, x, quant))
    assert not result[2].any()


def test_a_nan_reaches_its_own_token_alone(device: Device, scratch: dict[str, object]) -> None:
    quant = by_name("Q8_0")
    w, _ = matrix(device, np.random.default_rng(9), quant, 16, 128)
    x = np.ones((3, 128), np.float32)
    x[1, 40] = np.nan
    y = nan(device, 3, 16)
    matmul_f16(device, w, halved(device, x), y, **scratch)
    assert np.array_equal(np.isnan(device.download(y)).all(-1), [False, True, False])


def float_bits(quant: QuantType, values: np.ndarray) -> np.ndarray:
    """Values (n, k) as a file has them, rounded towards zero."""
    if quant.name == "F16":
        return values.astype(np.float16).view(np.uint8)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@pytest.mark.parametrize(
    ("name", "height"),
    [("F16", 6e4), ("F16", 3e-6), ("BF16", 1e30), ("BF16", 1e-28), ("BF16", 0.0), ("F16", 0.0)],
)
def test_float_weights_of_any_height_keep_their_precision(
    device: Device, scratch: dict[str, object], name: str, height: float
) -> None:
    """Rows whose values reach from the height to 2^-34 of it, and one of a single height."""
    quant = by_name(name)
    rng = np.random.default_rng(13)
    w = rng.uniform(-height, height, (9, 160)) * 2.0 ** rng.integers(-34, 1, (9, 160))
    w[4] = height
    raw = float_bits(quant, w)
    values = quant.dequantize(raw).astype(np.float64)
    x = rng.standard_normal((3, 160)).astype(np.float32)
    y = nan(device, 3, 9)
    matmul_f16(
        device, with_peak(device, upload(device, quant, raw, 160)), halved(device, x), y, **scratch
    )
    error = np.abs(device.download(y) - x.astype(np.float64) @ values.T)
    assert np.all(error <= bound(values, x, quant))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quant", FLOATS, ids=ids)
def test_a_weight_that_is_not_finite_reaches_its_own_row_alone(
    device: Device, scratch: dict[str, object], quant: QuantType, bad: float
) -> None:
    w = np.full((9, 96), 0.5)
    w[4, 70] = bad
    y, x = nan(device, 3, 9), np.ones((3, 96), np.float32)
    matrix = with_peak(device, upload(device, quant, float_bits(quant, w), 96))
    matmul_f16(device, matrix, halved(device, x), y, **scratch)
    result = device.download(y)
    assert np.array_equal(result[:, 4], np.full(3, bad), equal_nan=True)
    assert np.all(np.delete(result, 4, axis=1) == 48.0)


@pytest.mark.parametrize(
    ("name", "tokens", "tile"),
    [(name, tokens, None) for tokens in (3, 40) for name in ("Q4_K", "Q5_0", "BF16", "F16")]
    + [("Q4_K", 20, WGMMA_160), ("Q5_0", 20, WGMMA_160)],
    ids=str,
)
def test_matrices_above_each_other_are_one_product(
    device: Device, scratch: dict[str, object], name: str, tokens: int, tile: Tile | None
) -> None:
    """q, k and v of a layer: 256, 128 and 72 rows, of which the last may end inside a tile, and
    any inside one of 192."""
    if tile:
        needs_wgmma(device, tile)
    quant, rng, k = by_name(name), np.random.default_rng(17), 256
    parts = [matrix(device, rng, quant, n, k) for n in (256, 128, 72)]
    (matrices,) = stack(with_one_peak(device, [w for w, _ in parts]))
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    y = nan(device, tokens, 500)
    matmul_f16(device, matrices, halved(device, x), y, column=20, tile=tile, **scratch)
    found = device.download(y)
    values = np.concatenate([w for _, w in parts]).astype(np.float64)
    error = np.abs(found[:, 20:476] - x.astype(np.float64) @ values.T)
    assert np.all(error <= bound(values, x, quant))
    assert np.isnan(found[:, :20]).all() and np.isnan(found[:, 476:]).all()


def test_only_neighbours_that_one_launch_can_take_are_stacked(device: Device) -> None:
    rng = np.random.default_rng(18)
    q4, q6 = by_name("Q4_K"), by_name("Q6_K")
    whole, odd = (matrix(device, rng, q4, n, 256)[0] for n in (128, 72))
    other = matrix(device, rng, q6, 128, 256)[0]
    a, b, c, d = with_one_peak(device, [whole] * 4)
    assert stack([a, b, other]) == [(a, b), (other,)]
    assert stack([a, b, c, d]) == [(a, b, c), (d,)]
    assert stack([odd, a]) == [(odd,), (a,)]  # ends inside a row tile
    assert stack([whole, a]) == [(whole,), (a,)]  # another peak
    with pytest.raises(KernelError, match="2 matrices that are no stack"):
        empty = Activations.empty(device, 2, 256, f16=True)
        matmul_f16(device, (whole, other), empty, nan(device, 2, 256), partials=None, arrivals=None)


@pytest.mark.parametrize(
    ("name", "tile"),
    [(name, NARROW) for name in ("Q4_K", "Q6_K", "Q8_0", "Q5_0", *HALVES)]
    + [("Q4_K", WGMMA_128), ("Q6_K", WGMMA_96), ("Q4_K", WGMMA_160), ("Q6_K", WGMMA_256)],
    ids=str,
)
def test_gate_and_up_in_one_launch_equal_float64(
    device: Device, scratch: dict[str, object], name: str, tile: Tile
) -> None:
    needs_wgmma(device, tile)
    check_gated(device, scratch, by_name(name), 19, tile)


# units of a block, parts of K, tokens: a unit of a warp's pieces, the last block short; two blocks
# of tokens whose parts are added up
@pytest.mark.parametrize("cut", [(3, 1, 11), (5, 2, 37)], ids=str)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", *HALVES])
def test_gate_and_up_of_few_tokens_equal_float64(
    device: Device,
    scratch: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cut: tuple[int, int, int],
) -> None:
    quant, (units, parts, tokens) = by_name(name), cut
    groups = ceil_div(columns(quant), 128)
    how = matmul_few.cut(quant, 256 // 8, groups, tokens, units, ceil_div(groups, parts))
    asked = forced(device, monkeypatch, how)
    check_gated(device, scratch, quant, tokens)
    assert ("matmul_few", matmul_few.instance(quant, how.tiles)) in asked
    assert not device.download(scratch["arrivals"]).any()


def check_gated(
    device: Device,
    scratch: dict[str, object],
    quant: QuantType,
    tokens: int,
    tile: Tile | None = None,
) -> None:
    f, k = 160, columns(quant)
    rng = np.random.default_rng(10)
    gate, g = matrix(device, rng, quant, f, k)
    up, u = matrix(device, rng, quant, f, k)
    x = rng.standard_normal((tokens, k)).astype(np.float32) * 3
    out = Activations.empty(device, tokens, f, f16=True)
    gate_up_f16(device, gate, up, halved(device, x), out, tile=tile, **scratch)
    h = unpermute(device.download(out.h)).astype(np.float64)
    assert not h[:, f:].any()
    y = h[:, :f] * device.download(out.hs)[:, None].astype(np.float64)
    a, b = x.astype(np.float64) @ g.T, x.astype(np.float64) @ u.T
    silu = a / (1 + np.exp(-a))
    # the slope of silu is at most 1.1
    error = 1.1 * bound(g, x, quant) * (np.abs(b) + bound(u, x, quant))
    error += np.abs(silu) * bound(u, x, quant)
    assert np.all(np.abs(y - silu * b) <= error + 2 * HALF * np.abs(silu * b) + 64 * 2.0**-25)


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "BF16"])
def test_gate_and_up_of_every_tile_agree(
    device: Device, scratch: dict[str, object], name: str
) -> None:
    quant = by_name(name)
    tokens, f, k = 9, 136, 256
    rng = np.random.default_rng(11)
    gate, up = (matrix(device, rng, quant, f, k)[0] for _ in range(2))
    x = halved(device, rng.standard_normal((tokens, k)).astype(np.float32))
    results = []
    for tile in {*TILES, *tiles_of(device.arch, quant, device.shared_limit)}:
        out = Activations.empty(device, tokens, f, f16=True)
        gate_up_f16(device, gate, up, x, out, tile=tile, **scratch)
        results.append(device.download(out.h))
        assert np.array_equal(results[0], results[-1])
        assert np.array_equal(device.download(out.hs), np.full(tokens, 64.0))
    assert results[0].shape == (tokens, padded(f))


def test_what_a_product_needs_is_asked_for(device: Device, scratch: dict[str, object]) -> None:
    quant = by_name("Q4_0")
    rng = np.random.default_rng(12)
    raw, _ = random_weights(rng, quant, 16, 128)
    bare = upload(device, quant, raw, 128)
    x = halved(device, np.ones((2, 128), np.float32))
    y = nan(device, 2, 16)
    with pytest.raises(KernelError, match="peak"):
        matmul_f16(device, bare, x, y, **scratch)
    whole = with_peak(device, bare)
    with pytest.raises(KernelError, match="f16 form"):
        matmul_f16(device, whole, Activations(y, None, None), y, **scratch)
    with pytest.raises(KernelError, match="partials"):
        matmul_f16(device, whole, x, y, partials=y, arrivals=scratch["arrivals"])
    for name in ("F32", "F16"):
        narrow = by_name(name)
        row = upload(device, narrow, random_weights(rng, narrow, 16, 4)[0], 4)
        with pytest.raises(KernelError, match=rf"{name} \(16, 4\), expected F16 or BF16"):
            matmul_f16(device, row, halved(device, np.ones((2, 4), np.float32)), y, **scratch)

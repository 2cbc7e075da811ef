"""The whole model on a device: against the CPU path, and against itself where bits are promised."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import asked_kernels, simt_device
from ggufs import write_gguf

from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import Engine
from minfer_cuda.errors import ContextFullError, OutOfMemoryError, UnsupportedModelError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.graph import StepGraphs
from minfer_cuda.kernels import Device
from minfer_cuda.prefill import F16_ARCHS, INT8_ROWS, most_float32_rows, most_int8_rows
from minfer_cuda.quants import by_name
from minfer_cuda.runners.cuda_runner import CudaRunner, graph_rows
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams, mask_words

IDS = [5, 71, 3, 3, 250, 0, 17, 99, 42, 7, 130]
GREEDY = SamplingParams(temperature=0.0)
MIXED = {
    "token_embd": "Q8_0", "attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0",
    "attn_output": "Q4_K", "ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K",
    "output": "Q6_K", "default": "Q8_0",
}  # fmt: skip


class Eager:
    """Steps as they come."""

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        step()


def steps_of(device: Any, graphs: bool) -> Any:
    return StepGraphs(device) if graphs else Eager()


def runner_of(
    device: Device, path: Path, *, n_ctx: int = 24, graphs: bool = False, **options: Any
) -> CudaRunner:
    file = GGUFFile.open(path)
    config = Qwen2Config.from_gguf(file)
    return CudaRunner(device, file, config, n_ctx, steps=steps_of(device, graphs), **options)


def cpu_logits(path: Path, ids: list[int], n_out: int) -> np.ndarray:
    file = GGUFFile.open(path)
    runner = NumpyRunner(file, Qwen2Config.from_gguf(file), 32, "f32")
    runner.prefill(ids, 0, n_out)
    return runner.logits(n_out)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("mixed") / "mixed.gguf", types=MIXED)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"attn_q": "F16", "ffn_up": "BF16", "default": "F32"}
    path = tmp_path_factory.mktemp("floats") / "floats.gguf"
    return write_gguf(
        path, types=types, tied=True, output_bias=True, heads=2, kv_heads=1, head_dim=128
    )


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_float_weights_agree_with_the_cpu_path(device: Device, floats: Path) -> None:
    """Attention and the inputs of F16 and BF16 matrices round to f16 (2^-11 a factor): logits
    within 2e-3 of their norm."""
    runner = runner_of(device, floats, kv_type="f32")
    runner.prefill(IDS[:-1], 0, 3)
    assert relative(runner.logits(3), cpu_logits(floats, IDS[:-1], 3)) < 2e-3
    runner.prefill(IDS[-1:], len(IDS) - 1)
    assert relative(runner.logits(), cpu_logits(floats, IDS, 1)) < 2e-3


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_quantised_weights_agree_with_the_cpu_path(
    device: Device, mixed: Path, kv_type: str
) -> None:
    """int8 activations in groups of 32 carry 0.8 % of noise each; two layers and a head have nine
    of them on the way: 0.8 % * sqrt(9) and a margin of two."""
    runner = runner_of(device, mixed, kv_type=kv_type)
    runner.prefill(IDS[:-1], 0, 3)
    assert relative(runner.logits(3), cpu_logits(mixed, IDS[:-1], 3)) < 0.05
    runner.prefill(IDS[-1:], len(IDS) - 1)
    assert relative(runner.logits(), cpu_logits(mixed, IDS, 1)) < 0.05


@pytest.mark.parametrize(
    "types", [MIXED, MIXED | {"ffn_up": "Q5_0", "attn_q": "F16"}], ids=["alike", "apart"]
)
def test_f16_products_agree_with_the_cpu_path(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: dict[str, str]
) -> None:
    """Weights and activations rounded to f16 carry 2^-11 / sqrt(3) of noise each, weights with a
    minimum three times that: of nine products 0.1 % * sqrt(9) and a margin of 1.5. Of one
    row, three products behind the last attention are decode's: 0.8 % * sqrt(3) and two. Gate and up
    in one launch, and where their types are two, apart."""
    monkeypatch.setenv("MINFER_PREFILL", "f16")
    path = write_gguf(tmp_path / "f16.gguf", types=types)
    runner = runner_of(device, path, n_batch=len(IDS))
    assert runner.describe().endswith("prompts f16")
    for n_out, most in ((1, 0.03), (3, 0.0045)):
        runner.prefill(IDS, 0, n_out)
        assert relative(runner.logits(n_out), cpu_logits(path, IDS, n_out)) < most


HALVES_ALONE = {"attn_q": "BF16", "ffn_up": "BF16", "ffn_gate": "BF16", "default": "F16"}
HALVES_MIXED = MIXED | {"attn_q": "BF16", "attn_output": "F16", "ffn_gate": "F16", "ffn_up": "F16"}


@pytest.mark.parametrize(
    ("types", "forced", "most", "told"),
    [
        (HALVES_ALONE, "", 2e-3, "prompts f16"),
        (HALVES_MIXED, "int8", 0.05, "prompts int8, F16 and BF16 matrices f16"),
        (HALVES_MIXED | {"ffn_down": "F32"}, "f16", 0.03, "prompts f16"),
    ],
    ids=["alone", "beside int8", "beside f16 and F32"],
)
def test_prompts_multiply_float_matrices_on_f16_tensor_cores(
    device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    types: dict[str, str],
    forced: str,
    most: float,
    told: str,
) -> None:
    """Bounds as above: of attention and activations in f16, of int8 activations, and of those of
    the last layer's few rows alone. One row more, as decode has it, reads float32 activations. The
    head is tied where all are floats."""
    monkeypatch.setenv("MINFER_PREFILL", forced)
    rows = len(IDS)
    path = write_gguf(tmp_path / "halves.gguf", types=types, tied=types is HALVES_ALONE)
    runner = runner_of(device, path, kv_type="f32", n_batch=rows)
    assert runner.describe().endswith(told)
    asked = asked_kernels(device, monkeypatch)
    runner.prefill(IDS, 0, 3)
    assert relative(runner.logits(3), cpu_logits(path, IDS, 3)) < most
    products = {name.split(",")[0] for _, name in asked}
    assert {"matmul_few<F16", "matmul_few<BF16"} <= products
    assert not products & {"matmul_float<F16>", "matmul_float<BF16>"}
    runner.prefill(IDS[-1:], rows)
    assert ("matmul_float", "matmul_float<F16>") in asked
    assert relative(runner.logits(), cpu_logits(path, [*IDS, IDS[-1]], 1)) < max(most, 0.05)


def test_long_prompts_take_f16_where_the_card_is_fast_at_it(
    device: Device, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against int8: both within their bounds of the truth."""
    prompt = IDS
    results = []
    for path in ("int8", "" if device.arch in F16_ARCHS else "f16"):
        monkeypatch.setenv("MINFER_PREFILL", path)
        runner = runner_of(device, mixed, n_batch=len(prompt))
        runner.prefill(prompt, 0)
        results.append((runner.describe(), runner.logits()))
    (int8, a), (f16, b) = results
    assert "prompts int8" in int8 and "prompts f16" in f16
    assert not np.array_equal(a, b) and relative(a, b) < 0.058


def test_the_path_of_a_prompt_follows_from_the_card_unless_forced(
    device: Device, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [most_int8_rows(arch) for arch in (75, 86, 89, 120)] == [None] * 4
    assert [most_int8_rows(arch) for arch in F16_ARCHS] == [INT8_ROWS] * 3
    assert most_int8_rows(90, "int8") is None and most_int8_rows(86, "f16") == 1
    halves = [most_float32_rows(arch, by_name("BF16")) for arch in (75, 80, 86, 120)]
    assert halves == [None, 1, 1, 1] and most_float32_rows(90, by_name("F32")) is None
    with pytest.raises(UsageError, match="f16: it needs sm_80 or newer, this is sm_75"):
        most_int8_rows(75, "f16")
    monkeypatch.setenv("MINFER_PREFILL", "fp16")
    with pytest.raises(UsageError, match="MINFER_PREFILL is 'fp16': expected int8 or f16"):
        runner_of(device, mixed)


def test_products_of_prompts_are_compiled_before_weights_are_read(
    device: Device, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINFER_PREFILL", "f16")
    compiled: list[tuple[str, str]] = []
    monkeypatch.setattr(device, "compile", lambda pairs, progress=None: compiled.extend(pairs))
    asked = asked_kernels(device, monkeypatch)
    runner_of(device, mixed, n_batch=len(IDS)).prefill(IDS, 0)
    used = {pair for pair in asked if pair[0] in ("matmul_f16", "matmul_few")}
    assert len(used) >= 6 and used <= set(compiled)


def test_compiling_ahead_is_told_before_loading(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = simt_device(checks=False)
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(device, "compile", lambda pairs, progress: (progress(0, 2), progress(2, 2)))
    runner_of(device, mixed, progress=lambda *words: told.append(words))
    assert told[:2] == [("compiling kernels", 0, 2), ("compiling kernels", 2, 2)]
    assert {doing for doing, _, _ in told[2:]} == {"loading"} and told[2][1] == 0


def test_fused_decode_gives_the_bits_of_unfused(
    device: Device, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = runner_of(device, mixed)
    monkeypatch.setenv("MINFER_NO_FUSE_QKV", "1")
    monkeypatch.setenv("MINFER_NO_FUSE_FFN", "1")
    plain = runner_of(device, mixed)
    assert (fused.ops.fuse_qkv, plain.ops.fuse_qkv, plain.ops.fuse_ffn) == (True, False, False)
    for i, token in enumerate(IDS[:6]):
        for runner in (fused, plain):
            runner.prefill([token], i)
        assert np.array_equal(fused.logits(), plain.logits())


def greedy(engine: Engine, n: int, prompt: list[int] = IDS) -> list[int]:
    return [token.id for token in engine.generate(prompt, GREEDY, n)]


def test_greedy_tokens_are_the_argmax_of_the_logits_they_came_from(
    device: Device, mixed: Path
) -> None:
    engine = Engine(runner_of(device, mixed), Qwen2Config.from_gguf(GGUFFile.open(mixed)))
    tokens = greedy(engine, 5)
    check = runner_of(device, mixed)
    check.prefill(IDS, 0)
    for i, token in enumerate(tokens):
        assert token == int(check.logits()[0].argmax())
        check.prefill([token], len(IDS) + i)


def test_a_tap_sees_every_layer_and_changes_no_token(device: Device, mixed: Path) -> None:
    runner = runner_of(device, mixed)
    seen: dict[tuple[str, int | None], np.ndarray] = {}

    def tap(name: str, layer: int | None, value: Any) -> None:
        value = getattr(value, "x", value)
        if value is not None:
            seen[name, layer] = device.download(value)

    runner.forward(IDS, 0, len(IDS), tap)
    for layer in range(2):
        total = (
            seen["layer_input", layer] + seen["attention_output", layer] + seen["mlp_output", layer]
        )
        assert np.allclose(total, seen["layer_output", layer], rtol=1e-5, atol=1e-6)
    assert np.array_equal(seen["logits", None], runner.logits(len(IDS)))


def test_chunked_prefill_agrees_with_one_shot(device: Device, floats: Path) -> None:
    whole, parts = runner_of(device, floats), runner_of(device, floats)
    whole.prefill(IDS, 0, 1)
    parts.prefill(IDS[:4], 0, 1)
    parts.prefill(IDS[4:], 4, 1)
    assert relative(parts.logits(), whole.logits()) < 1e-3


def test_few_graphs_serve_prompts_of_every_length() -> None:
    counts = range(1, 4097)
    rows = [graph_rows(n) for n in counts]
    assert rows[:16] == list(range(1, 17)) and rows == sorted(rows)
    assert all(n <= r < n + max(8, n / 8) for n, r in zip(counts, rows, strict=True))
    assert all(graph_rows(r) == r for r in rows) and len(set(rows)) <= 70


class Noting(Eager):
    """Steps as they come, with their keys."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        self.keys.append(key)
        step()


@pytest.mark.parametrize("path", ["int8", "f16", "float32"])
def test_rows_behind_a_prompt_change_nothing_of_it(
    device: Device, mixed: Path, floats: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """18 tokens are run as 24 rows, or as the 20 of a batch; with a tap as they are. The logits are
    the same but for sums of another order, also of the token that comes next."""
    monkeypatch.setenv("MINFER_PREFILL", "" if path == "float32" else path)
    model = floats if path == "float32" else mixed
    ids = [*IDS, 9, 8, 7, 6, 5, 4, 3]
    results = []
    for n_batch, tap, rows in ((64, None, [24]), (20, None, [20]), (64, lambda *seen: None, [])):
        runner = runner_of(device, model, n_ctx=33, kv_type="f32", n_batch=n_batch)
        noting = runner._steps = Noting()  # type: ignore[assignment]
        runner.forward(ids, 0, 1, tap)
        assert [key[1] for key in noting.keys] == rows  # type: ignore[index]
        first = runner.logits()
        runner.prefill([77], len(ids))
        results.append((first, runner.logits()))
    *padded, exact = results
    for one in padded:
        assert relative(one[0], exact[0]) < 1e-3 and relative(one[1], exact[1]) < 1e-3
    assert relative(exact[0], cpu_logits(model, ids, 1)) < 0.05


def test_a_prompt_near_the_end_of_the_context_is_run_as_it_is(device: Device, mixed: Path) -> None:
    runner = runner_of(device, mixed, n_ctx=30)
    noting = runner._steps = Noting()  # type: ignore[assignment]
    runner.prefill(IDS, 0)
    runner.prefill(IDS + IDS[:8], len(IDS))
    assert [key[1] for key in noting.keys] == [len(IDS)]  # type: ignore[index]


class Recorded(Eager):
    """Steps as graphs run them: every time the launches of the first, on the same arrays."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: dict[Hashable, list[Callable[[], None]]] = {}
        self._device = device
        self._monkeypatch = monkeypatch

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        if key not in self.launches:
            self.launches[key] = self._record(step)
        for launch in self.launches[key]:
            launch()

    def _record(self, step: Callable[[], None]) -> list[Callable[[], None]]:
        launches: list[Callable[[], None]] = []
        kernel = self._device.kernel

        def noting(*name: str) -> Callable[..., None]:
            launch = kernel(*name)
            return lambda *args, **how: launches.append(partial(launch, *args, **how))

        with self._monkeypatch.context() as patch:
            patch.setattr(self._device, "kernel", noting)
            step()
        return launches


def test_one_graph_serves_every_prompt_of_its_rows(
    device: Device, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17, 21 and 24 tokens, wherever they begin: the bits of eager launches."""
    eager = runner_of(device, mixed, n_ctx=64)
    recorded = runner_of(device, mixed, n_ctx=64)
    steps = recorded._steps = Recorded(device, monkeypatch)  # type: ignore[assignment]
    for count, start in ((17, 0), (21, 18), (24, 5)):
        for runner in (eager, recorded):
            runner.prefill((IDS * 3)[:count], start)
        assert np.array_equal(recorded.logits(), eager.logits())
    assert [key[1] for key in steps.launches] == [24]  # type: ignore[index]


def test_rollback_and_replay_give_the_same_bits(device: Device, mixed: Path) -> None:
    engine = Engine(runner_of(device, mixed), Qwen2Config.from_gguf(GGUFFile.open(mixed)))
    first = greedy(engine, 4)
    before = engine.runner.logits()
    engine.rollback(0)
    assert greedy(engine, 4) == first
    assert np.array_equal(engine.runner.logits(), before)


class Replaying(Eager):
    """Steps as graphs run them: the launches of the first time again, without the Python around."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        if key not in self._seen:
            self._seen.add(key)
            step()


def test_a_replayed_step_leaves_its_own_logits(device: Device, mixed: Path) -> None:
    runner = runner_of(device, mixed)
    runner._steps = Replaying()  # type: ignore[assignment]
    runner.prefill(IDS, 0)
    runner.sample()
    runner.step(len(IDS))
    runner.prefill(IDS, 0, 3)  # several rows, in a buffer of their own
    runner.sample()
    runner.step(len(IDS))
    assert runner.logits().shape == (1, runner.config.n_vocab)
    with pytest.raises(UsageError, match="1 kept"):
        runner.logits(3)


class Allowing:
    """Allows some ids at every step, for `n` tokens."""

    def __init__(self, ids: list[int], n_vocab: int, n: int):
        bits = np.zeros(mask_words(n_vocab) * 32, bool)
        bits[ids] = True
        self._mask = np.packbits(bits, bitorder="little").view(np.uint32)
        self._left = n

    @property
    def complete(self) -> bool:
        return self._left == 0

    def mask(self) -> np.ndarray:
        return self._mask

    def accept(self, token: int) -> None:
        self._left -= 1


def constrained(engine: Engine, allowed_ids: list[int], n: int = 4) -> list[int]:
    allowing = Allowing(allowed_ids, engine.config.n_vocab, n)
    params = SamplingParams(seed=3, temperature=2.0)
    return [token.id for token in engine.generate(IDS, params, constraint=allowing)]


def test_a_mask_of_all_ids_changes_no_token_and_no_bit(device: Device, mixed: Path) -> None:
    """Forward and draw apart, with the mask between them, are what a step does as one."""
    runner = runner_of(device, mixed)
    engine = Engine(runner, runner.config)
    params = SamplingParams(seed=3, temperature=2.0)
    free = [token.id for token in engine.generate(IDS, params, 4)]
    logits = runner.logits()
    engine.rollback(0)
    assert constrained(engine, list(range(runner.config.n_vocab))) == free
    assert np.array_equal(runner.logits(), logits)
    longer = [*IDS, *free]  # steps as one follow those in parts
    assert [t.id for t in engine.generate(longer, GREEDY, 3)] == greedy_after(engine, longer)


def greedy_after(engine: Engine, ids: list[int]) -> list[int]:
    engine.rollback(0)
    return [t.id for t in engine.generate(ids, GREEDY, 3)]


def test_constrained_draws_are_among_the_allowed_and_are_those_of_the_cpu(
    device: Device, floats: Path
) -> None:
    """Logits that differ by 2e-3 of their norm draw the same ids where few are allowed."""
    runner = runner_of(device, floats, kv_type="f32")
    file = GGUFFile.open(floats)
    host = Engine(NumpyRunner(file, runner.config, 24, "f32"), runner.config)
    some = [7, 100, 250]
    got = constrained(Engine(runner, runner.config), some)
    assert set(got) <= set(some)
    assert got == constrained(host, some)


@pytest.mark.gpu
def test_constrained_steps_replay_two_graphs_and_give_eager_tokens(mixed: Path) -> None:
    from minfer_cuda.kernels.module import CudaDevice

    device, results = CudaDevice(), []
    for graphs in (False, True):
        runner = runner_of(device, mixed, n_ctx=64, graphs=graphs)
        engine = Engine(runner, runner.config)
        results.append(constrained(engine, [7, 100, 250, 13], 40))
    assert results[0] == results[1]
    assert runner._steps.captures == 2  # type: ignore[attr-defined]
    assert runner._steps.replays == 2 * 37  # type: ignore[attr-defined]


def test_two_runners_of_one_device_never_meet(device: Device, mixed: Path) -> None:
    a, b = runner_of(device, mixed), runner_of(device, mixed)
    a.prefill(IDS, 0)
    alone = a.logits()
    b.prefill(IDS[::-1], 0)
    a.prefill(IDS[-1:], len(IDS) - 1)
    b.prefill(IDS[:1], 0)
    a.prefill(IDS, 0)
    assert np.array_equal(a.logits(), alone)


def test_a_position_past_the_context_raises_before_any_write(device: Device, mixed: Path) -> None:
    runner = runner_of(device, mixed, n_ctx=12)
    blank = np.zeros(runner.cache.data.shape, runner.cache.data.dtype)
    device.upload(blank, into=runner.cache.data)  # rows never written are compared, too
    runner.prefill(IDS, 0)
    before = device.download(runner.cache.data).view(np.uint16).copy()
    with pytest.raises(ContextFullError, match="13.*12"):
        runner.prefill(IDS[:2], 11)
    with pytest.raises(ContextFullError, match="13.*12"):
        runner.step(12)
    with pytest.raises(UsageError, match="token id"):
        runner.prefill([10**6], 11)
    assert np.array_equal(device.download(runner.cache.data).view(np.uint16), before)
    runner.prefill(IDS[:1], 11)


def test_a_model_that_does_not_fit_is_refused_with_the_context_that_would(
    device: Device, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = property(lambda self: 200 << 20)
    monkeypatch.setattr(type(device), "free_bytes", free)
    with pytest.raises(OutOfMemoryError, match=r"MiB needed.*200 MiB free: --n-ctx \d+ would fit"):
        runner_of(device, mixed, n_ctx=1 << 22, n_batch=8)


def test_a_type_without_kernels_is_refused_by_name(device: Device, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tq.gguf", types={"ffn_up": "TQ1_0", "default": "Q8_0"})
    with pytest.raises(UnsupportedModelError, match="ffn_up.*TQ1_0"):
        runner_of(device, path)


@pytest.mark.gpu
def test_graph_replay_gives_the_bits_of_eager_steps(mixed: Path) -> None:
    """Over 200 steps of sampling, one graph for all positions; a capture allocates nothing, or it
    would have raised."""
    from minfer_cuda.kernels.module import CudaDevice

    device = CudaDevice()
    params = SamplingParams(temperature=0.9, seed=11)
    results = []
    for graphs in (False, True):
        runner = runner_of(device, mixed, n_ctx=256, graphs=graphs)
        engine = Engine(runner, runner.config)
        tokens = [token.id for token in engine.generate(IDS, params, 201)]
        results.append((tokens, runner.logits()))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])
    assert runner._steps.captures == 1  # type: ignore[attr-defined]
    assert runner._steps.replays == 198  # type: ignore[attr-defined]

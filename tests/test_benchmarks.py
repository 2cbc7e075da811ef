"""The cases of kernels.py and the phases of a step: all without a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from devices import simt_device
from test_synthetic import TINY, write_tiny

from benchmarks import cases, kernels, measure, phases
from benchmarks.bed import Bed, DryBed
from benchmarks.family import FTYPES, NO_F16, SIZES, matrix_shapes, matrix_types
from benchmarks.synthetic import Pools, write_synthetic
from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import KernelError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.quants import by_name
from minfer_cuda.runners.cuda_runner import CudaRunner, EagerSteps


class CountingTimer:
    """Runs the work once; every repetition took as long as there are entries in `log` since."""

    def __init__(self, log):
        self.log = log

    def __call__(self, work, repetitions=measure.REPETITIONS):
        before = len(self.log)
        work()
        return [1e-6 * max(len(self.log) - before, 1)] * repetitions


def instant(work, repetitions=measure.REPETITIONS):
    work()
    return [1.0] * repetitions


def tiny_bed(device):
    return Bed(device, Pools(0, blocks=1009, values=10007), cold_bytes=1)


# ---- cases ----


def dry_device():
    return SimpleNamespace(sm_count=132, shared_limit=227 * 1024, arch=90)


@pytest.mark.parametrize("ftype", FTYPES)
def test_every_case_of_every_size_is_accepted_by_its_launcher(ftype):
    sizes = [size for size in SIZES if ftype != "f16" or size not in NO_F16]
    options = kernels.arguments(["--sizes", ",".join(sizes), "--ftype", ftype])
    bed = DryBed(dry_device())
    for case in cases.choose(options):
        case.prepare(bed).launch(0)
    if ftype == "q4_k_m":
        assert {stem for stem, _ in bed.device.launched} >= {
            "matvec", "matmul", "attention", "norm", "sampling", "repack",
        }  # fmt: skip


def test_types_asked_for_are_taken_where_rows_allow_them():
    options = kernels.arguments(["--sizes", "0.5b", "--kernels", "matvec", "--types", "Q4_K,Q8_0"])
    found = {(case.what, case.type_name) for case in cases.choose(options)}
    assert found == {
        ("o", "Q8_0"), ("head", "Q8_0"), ("down", "Q8_0"), ("down", "Q4_K"),
    }  # fmt: skip


def tiny_cases():
    return [
        cases.linear("tiny", "o", "Q4_K", 16, 256, rows=1),
        cases.linear("tiny", "o", "Q5_0", 16, 256, rows=3),
        cases.linear("tiny", "o", "F32", 16, 256, rows=2),
        cases.linear_f16("tiny", "o", "Q4_0", 16, 256, rows=3),
        cases.linear_f16("tiny", "o", "BF16", 16, 256, rows=2),
        cases.gate_up_f16_case("tiny", TINY, "Q4_0", rows=2),
        cases.gate_up("tiny", TINY, "Q4_0"),
        cases.qkv("tiny", TINY, ("Q4_0", "Q4_0", "Q8_0")),
        cases.attention_case("tiny", TINY, 1, 70),
        cases.attention_case("tiny", TINY, 5, 0),
        cases.norm("tiny", TINY, 2),
        cases.sampler("tiny", TINY, "default"),
    ]


def test_cases_run_and_write_finite_results():
    ceiling = kernels.Ceiling(1e9, {"s8": 1e12, "f16": 1e12})
    for case in tiny_cases():
        row = kernels.measured(case, tiny_bed(simt_device()), instant, ceiling)
        assert row["us"] == 1e6
        assert row["gb_s"] == round(1e-9 * case.n_bytes, 1)


def test_a_result_that_is_not_written_is_an_error_and_the_other_cases_go_on():
    good = cases.norm("tiny", TINY, 2)
    lazy = cases.Case(
        "matvec", "tiny", "o", "Q4_0", 1, 1, 0, "s8",
        lambda bed: cases.Work(lambda i: None, 1, (bed.nan(2),)),
    )  # fmt: skip
    bed, ceiling = tiny_bed(simt_device()), kernels.Ceiling(1e9, {})
    result = kernels.run([lazy, good], bed, instant, ceiling, seconds=60)
    assert "not finite" in result["rows"][0]["error"]
    assert result["rows"][1]["us"] > 0 and result["left_out"] == 0


def test_no_case_is_begun_when_time_is_up():
    result = kernels.run(tiny_cases(), None, instant, None, seconds=-1)
    assert result == {"rows": [], "left_out": len(tiny_cases())}


def test_every_copy_is_used_in_turn_and_short_work_is_repeated():
    used = []
    each = measure.seconds_each(CountingTimer(used), used.append, copies=3)
    assert used[:6] == [0, 1, 2, 0, 1, 2]
    assert Counter(used[3:]) == {0: 333, 1: 333, 2: 333}  # a millisecond of microseconds
    assert each == [pytest.approx(1e-6)] * measure.REPETITIONS


class FakeCuda:
    """Events and a stream whose clock moves a millisecond a launch."""

    def __init__(self):
        self.calls = []
        self.now = 0.0
        fake = self

        class Event:
            def record(self, stream):
                self.at = fake.now

            def synchronize(self):
                fake.calls.append("wait")

        self.cuda = SimpleNamespace(
            Event=Event, get_elapsed_time=lambda start, end: end.at - start.at
        )
        self.stream = self
        self.current = nullcontext
        self.synchronize = lambda: self.calls.append("wait")

    def begin_capture(self):
        self.calls.append("begin")

    def end_capture(self):
        self.calls.append("end")
        return self

    def launch(self, stream):
        self.now += 1.0 + (self.now == 0)
        self.calls.append("graph")


def test_work_is_warmed_up_captured_and_replayed_and_the_first_replay_is_not_counted(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    seconds = measure.GraphTimer(fake)(lambda: fake.calls.append("work"), repetitions=3)
    assert seconds == [1e-3] * 3
    assert fake.calls[:5] == ["work", "wait", "begin", "work", "end"]
    assert fake.calls.count("graph") == 4


def test_work_that_fails_in_a_capture_ends_the_capture(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def work():
        if "begin" in fake.calls:
            raise KernelError("refused")

    with pytest.raises(KernelError, match="refused"):
        measure.GraphTimer(fake)(work)
    assert fake.calls[-1] == "end"


def test_copies_together_exceed_the_cache():
    bed = Bed(dry_device())
    assert bed.copies(300 << 20) == 1
    assert bed.copies(10 << 20) * 10 >= 192


def test_the_share_is_of_the_tighter_ceiling():
    ceiling = kernels.Ceiling(read=100.0, mma={"s8": 1000.0})
    case = cases.Case("matmul", "", "", "Q4_0", 2, 200, 1000, "s8", lambda bed: None)
    assert ceiling.share(case, 4.0) == (0.5, "read")
    more = cases.Case("matmul", "", "", "Q4_0", 9, 200, 8000, "s8", lambda bed: None)
    assert ceiling.share(more, 16.0) == (0.5, "mma")
    unknown = cases.Case("matmul", "", "", "F16", 9, 200, 8000, "f16", lambda bed: None)
    assert ceiling.share(unknown, 16.0) is None


def test_bytes_and_operations_of_a_case_are_those_of_its_formula():
    case = cases.linear("x", "gate", "Q4_K", 1000, 512, rows=4)
    assert case.ops == 2 * 4 * 1000 * 512
    assert case.n_bytes == 1000 * 2 * 144 + 4 * (512 * 1.25 + 4000)
    seen = sum(10 + t + 1 for t in range(3))  # keys of three tokens behind ten
    case = cases.attention_case("x", TINY, 3, 10)
    assert case.ops == 2 * 2 * seen * TINY.d


# ---- phases ----


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("phases") / "tiny.gguf"
    write_synthetic(path, TINY, "q4_0", pools=Pools(0, blocks=1009))
    device = simt_device()
    with GGUFFile.open(path) as file:
        config = Qwen2Config.from_gguf(file)
        runner = CudaRunner(device, file, config, n_ctx=16, n_batch=1, steps=EagerSteps())
    return device, runner


def test_a_phase_costs_what_a_step_saves_without_it(runner, monkeypatch):
    device, runner = runner
    log: list[tuple[str, str]] = []
    kernel = device.kernel

    def logged(stem, name):
        log.append((stem, name))
        return kernel(stem, name)

    monkeypatch.setattr(device, "kernel", logged)
    monkeypatch.setattr(phases, "STEPS", 1)
    table = phases.phase_table(runner, device, 5, CountingTimer(log), read=1e12)
    calls = {row["phase"]: row["calls"] for row in table["phases"]}
    layers = TINY.layers
    assert calls == {
        "embed": 1, "norm": 2 * layers + 1, "qkv": layers, "attention": layers, "o": layers,
        "gate_up": layers, "down": layers, "head": 1, "sampler": 1,
    }  # fmt: skip
    saved = {row["phase"]: row["us"] for row in table["phases"]}
    assert saved == pytest.approx(calls | {"norm": 0, "sampler": 2})  # products norm; two draw
    assert table["sum_us"] == pytest.approx(table["step_us"])


def test_the_floor_counts_every_byte_of_weights_and_cache(runner):
    _, runner = runner
    n_bytes = phases.phase_bytes(runner, depth=7)
    types = matrix_types(TINY, "q4_0")
    matrices = sum(
        n * k // by_name(types[name]).block_size * by_name(types[name]).block_bytes
        for name, (n, k) in matrix_shapes(TINY).items()
        if name != "token_embd.weight"
    )
    assert sum(n_bytes[p] for p in ("qkv", "o", "gate_up", "down", "head")) == matrices
    assert n_bytes["attention"] == 8 * runner.config.kv_bytes_per_position(2)


def test_phases_of_a_size_are_those_of_its_synthetic_file(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setattr(phases, "write_synthetic", write_tiny)
    monkeypatch.setattr(phases, "PHASES", ("o",))
    monkeypatch.setattr(phases, "STEPS", 1)
    device = simt_device()
    found = phases.run_phases(device, "tiny", "q4_0", [0, 3], instant, read=1e9)
    assert [table["depth"] for table in found["tables"]] == [0, 3]
    assert found["file"] == "synthetic-tiny-q4_0.gguf"


def test_a_runner_can_be_told_to_leave_graphs_out_for_a_while(runner):
    _, runner = runner
    ran = []

    class Graphs:
        def run(self, key, step):
            ran.append(key)
            step()

    runner._steps = Graphs()
    with runner.eager():
        runner.step(0)
        runner.read()
    assert not ran
    runner.step(1)
    assert len(ran) == 1

"""Synthetic models, the cases of kernels.py, phases and rendered tables: all without a GPU."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from devices import simt_device
from ggufs import write_gguf

from benchmarks import (
    cases,
    endurance,
    kernels,
    measure,
    models,
    phases,
    plots,
    process,
    render,
    synthetic,
)
from benchmarks.bed import Bed, DryBed
from benchmarks.family import (
    FTYPES,
    NO_F16,
    SIZES,
    Size,
    matrix_shapes,
    matrix_types,
    vector_shapes,
)
from benchmarks.synthetic import Pools, write_synthetic
from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import KernelError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.kernels.matmul_f16 import TILES
from minfer_cuda.llm import LLM
from minfer_cuda.quants import QUANT_TYPES, by_name
from minfer_cuda.runners.cuda_runner import CudaRunner, EagerSteps
from minfer_cuda.sampling import SamplingParams
from minfer_cuda.weights import model_tensors

TINY = Size(layers=2, d=256, ffn=512, heads=4, kv_heads=2, vocab=600)
# Tensor types of the published Qwen2.5-Coder-Instruct q4_k_m files; "better" holds the layers whose
# attn_v and ffn_down have the second type.
PUBLISHED = {
    "0.5b": {
        "output": "Q8_0", "token_embd": "Q5_0", "attn_q": "Q5_0", "attn_k": "Q5_0",
        "attn_output": "Q5_0", "ffn_gate": "Q5_0", "ffn_up": "Q5_0",
        "attn_v": ("Q5_0", "Q8_0"), "ffn_down": ("Q4_K", "Q6_K"),
        "better": {0, 1, 3, 6, 7, 8, 9, 10, 13, 16, 19, 21},
    },
    "1.5b": {
        "output": "Q6_K", "token_embd": "Q4_K", "attn_q": "Q4_K", "attn_k": "Q4_K",
        "attn_output": "Q4_K", "ffn_gate": "Q4_K", "ffn_up": "Q4_K",
        "attn_v": ("Q4_K", "Q6_K"), "ffn_down": ("Q4_K", "Q6_K"),
        "better": {0, 1, 5, 6, 7, 8, 9, 10, 13, 16, 19, 21, 24, 27},
    },
}  # fmt: skip


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


# ---- synthetic models ----


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_mix_is_that_of_the_published_files(size):
    table = PUBLISHED[size]
    for name, found in matrix_types(SIZES[size], "q4_k_m").items():
        *layer, role, _ = name.split(".")
        wanted = table[role]
        if isinstance(wanted, tuple):
            wanted = wanted[int(layer[1]) in table["better"]]
        assert found == wanted, name


@pytest.mark.model
@pytest.mark.parametrize("size, fixture", [("0.5b", "model_05b"), ("1.5b", "model_15b")])
def test_names_shapes_and_types_are_those_of_the_real_file(size, fixture, request):
    with GGUFFile.open(request.getfixturevalue(fixture)) as file:
        real = {name: (t.type_name, t.shape) for name, t in file.tensors.items()}
    types = matrix_types(SIZES[size], "q4_k_m")
    ours = {name: (types[name], s) for name, s in matrix_shapes(SIZES[size]).items()}
    ours |= {name: ("F32", (n,)) for name, n in vector_shapes(SIZES[size]).items()}
    assert ours == real


def test_rows_that_are_no_whole_256_blocks_fall_back():
    assert set(matrix_types(SIZES["0.5b"], "q6_k").values()) == {"Q8_0", "Q6_K"}
    assert matrix_types(SIZES["0.5b"], "q5_k_m")["blk.0.attn_q.weight"] == "Q5_1"
    down = {n: t for n, t in matrix_types(SIZES["72b"], "q4_k_m").items() if "ffn_down" in n}
    assert Counter(down.values()) == {"Q5_0": 40, "Q8_0": 40}  # 29568 is 115.5 x 256


def test_the_72b_has_more_bits_in_every_attn_v():
    types = matrix_types(SIZES["72b"], "q4_k_m")
    assert Counter(t for n, t in types.items() if "attn_v" in n) == {"Q5_K": 40, "Q6_K": 40}


@pytest.mark.parametrize("ftype, output", [("f16", "F16"), ("q8_0", "Q8_0"), ("q4_0", "Q6_K")])
def test_plain_types_keep_one_type_but_for_the_head(ftype, output):
    types = matrix_types(SIZES["7b"], ftype)
    assert types.pop("output.weight") == output
    assert set(types.values()) == {FTYPES[ftype][0]}


@pytest.mark.parametrize("size", SIZES)
def test_the_blocks_of_the_pool_never_repeat_a_row_of_a_matrix(size):
    for ftype in FTYPES:
        types = matrix_types(SIZES[size], ftype)
        for name, (n, k) in matrix_shapes(SIZES[size]).items():
            block = by_name(types[name]).block_size
            pool = synthetic.POOL_VALUES if block == 1 else synthetic.POOL_BLOCKS
            assert n < pool and (k // block) % pool, (ftype, name)


@pytest.mark.parametrize("name", [q.name for q in QUANT_TYPES.values()])
def test_pools_have_the_deviation_asked_for_and_no_offset(name):
    quant = by_name(name)
    values = quant.dequantize(Pools(1, blocks=2003, values=50021).pool(name, 0.02))
    assert values.std() == pytest.approx(0.02, rel=0.15)
    # of 2003 blocks with a random offset each, or 50021 values: five standard errors
    assert abs(values.mean()) < 5 * 0.02 / 2003**0.5


@pytest.mark.parametrize("ftype", FTYPES)
def test_a_synthetic_model_loads_and_its_logits_are_near_two(tmp_path, ftype):
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, TINY, ftype, pools=Pools(0, blocks=2003, values=50021))
    with LLM(path, n_ctx=32, device="cpu") as llm:
        assert llm.notices == []
        assert set(llm.file.tensors) == set(model_tensors(llm.config, llm.file))
        logits = llm.engine.logits(llm.encode("aab"))
        assert 1 < logits.std() < 4
        assert "".join(llm.generate("aab", max_tokens=4, temperature=0.0))


def test_a_seed_gives_the_same_file(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pools = Pools(seed, blocks=2003, values=50021)
        write_synthetic(tmp_path / name, TINY, "q4_0", pools=pools)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_a_file_that_does_not_fit_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="bytes needed, 1,000 free"):
        write_tiny(tmp_path / "x.gguf", TINY, "q4_0")


def test_f16_above_7b_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not for 14b"):
        write_synthetic(tmp_path / "x.gguf", "14b", "f16")


@pytest.mark.parametrize("size", [151936, 152064])
def test_the_vocabulary_has_special_tokens_at_their_ids(size):
    tokens, types, merges = synthetic.vocabulary(size)
    assert len(tokens) == len(types) == len(set(tokens)) == size
    assert tokens[151643:151646] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(merges) == 151387
    known = set(tokens)
    for merge in merges[:: len(merges) // 100]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


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


# ---- results ----


def test_the_result_is_a_file_and_the_last_line(tmp_path, capsys):
    result = {"kind": "kernels", "rows": [{"us": 1.5}]}
    measure.finish(result, tmp_path / "new" / "r.json")
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == result
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


@pytest.fixture
def results(tmp_path):
    """A folder with one result of each kind, of made-up figures."""
    row = {"depth": 0, "spread": 1.0, "seconds": [1.0], "mbu": None, "tops": None}
    rows = [
        row | {"test": "prefill", "name": "pp512", "tokens_per_s": 15000.4, "tops": 195.6},
        row | {"test": "decode", "name": "tg128", "tokens_per_s": 650.4, "mbu": 0.6501},
        row | {"test": "decode", "name": "tg128 @ 4096", "tokens_per_s": 600.0, "mbu": 0.62},
    ]
    about = {"device": "A card", "driver": "1.2", "date": "2026-01-02T03:04:05", "commit": "abc"}
    about |= {"read_gb_s": 4300.0}
    model = about | {"file": "synthetic-7b-q4_k_m.gguf", "weight_bytes_per_token": 4.3e9}
    phase = {"phase": "o", "calls": 28, "us": 100.0, "us_each": 3.571, "bytes": 1, "floor_us": 54.1}
    at = {"depth": 0, "step_us": 1250.0, "floor_us": 1010.0, "phases": [phase]}
    case = {"kernel": "matvec", "size": "7b", "what": "o", "type": "Q4_K", "rows": 1}
    many = case | {"kernel": "matmul_f16", "what": "down", "rows": 2048, "us": 1000.0, "gb_s": 90.0}
    many |= {"tops": 300.0, "product": "f16", "of_mma": 0.493, "share": 0.493, "of": "mma"}
    mma = {"mma_tops": {"s8": 1223.0, "f16": 608.0}, "left_out": 0}
    by_type = [
        many | {"type": "Q4_K", "us": 900.0, "tops": 100.0},
        many | {"type": "Q4_K", "us": 100.0, "tops": 400.0, "what": "o"},
        many | {"type": "Q8_0", "us": 2000.0, "tops": 45.0},
        many | {"type": "Q8_0", "us": 500.0, "tops": 80.0, "what": "o"},
        many | {"type": "Q4_K", "tops": 999.0, "what": "gate, up"},  # time was up for Q8_0's
        case | {"type": "Q2_K", "rows": 2048, "error": "KernelError: no"},
    ]
    lengths = [(1, 100.0), (2, 190.0), (4, 180.0), (8, 181.0), (64, 5000.0), (96, 4000.0)]
    prompt = [
        row | {"test": "prefill", "name": f"pp{n}", "n_tokens": n, "tokens_per_s": 1.0}
        | {"seconds": [9.0, n / rate, n / rate]}
        for n, rate in lengths
    ]  # fmt: skip
    generate = {"tokens_per_s": 2600.0, "bench_tokens_per_s": 2700.0, "tg128_tokens_per_s": 2715.0}
    memory = {"weights": 400 << 20, "KV cache": 100 << 20, "workspace": 90 << 20}
    whole = model | {"kind": "process", "file": "a<b.gguf", "file_bytes": 9, "generate": generate}
    whole |= {"one_token_s": [1.3, 1.1, 1.2], "first_start_s": 17.3, "token_ms": [12.0, 9.5]}
    whole |= {"stages": {"import": 0.21, "upload": 0.123}}
    whole |= {"memory": memory | {"used": 650 << 20, "bar": 256 << 20}}
    found = {
        "bench-7b": model | {"kind": "bench", "results": rows},
        "bench-small": model
        | {"kind": "bench", "file": "a<b.gguf", "weight_bytes_per_token": 1e9, "results": rows[:2]},
        "phases-7b": model | {"kind": "phases", "tables": [at]},
        "kernels": about
        | mma
        | {
            "kind": "kernels",
            "rows": [
                case | {"us": 3.5, "gb_s": 2065.0, "share": 0.48, "of": "read"},
                case | {"error": "KernelError: no"},
                many,
            ],
        },
        "types": about | mma | {"kind": "types", "rows": by_type},
        "lengths-7b": model | {"kind": "lengths", "results": prompt},
        "process-small": whole,
    }
    for name, result in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return render.load(tmp_path)


def test_the_speed_table_has_rate_share_and_ceiling_small_models_first(results):
    lines = render.speed(results).splitlines()
    assert lines[0] == "| Decode, tok/s | ceiling | tg128 | tg128 @ 4096 |"
    assert lines[2] == "| a<b | 4,300 | 650 (65%) |  |"
    assert lines[3] == "| 7b-q4_k_m (random weights) | 1,000 | 650 (65%) | 600 (62%) |"
    assert "| a<b | 15,000 (196 TOP/s) |" in lines
    assert lines[-1] == "A card, driver 1.2, 4,300 GB/s read, 2026-01-02, commit abc."


def test_phases_and_kernels_are_set_beside_their_floors(results):
    phases_text, kernels_text = render.phases(results), render.kernels(results)
    assert "| o | 28 | 100.0 | 3.57 | 54.1 | 45.9 |" in phases_text
    assert "| step |  | 1,250.0 |  | 1,010.0 | 240.0 |" in phases_text
    assert "depth 0: 800 steps/s" in phases_text
    assert "| matvec | 7b | o | Q4_K | 3.50 | 2,065 | 48% |" in kernels_text
    assert "| failed |" in kernels_text
    assert "| matmul_f16 | 7b | down | Q4_K | 2,048 | 1,000.00 | 300.0 | 49% | 90 |" in kernels_text
    assert "mma alone: s8 1,223 TOP/s, f16 608 TOP/s. A card, driver 1.2" in kernels_text


def test_types_are_compared_over_the_products_that_all_of_them_have(results):
    lines = render.types(results).splitlines()
    assert lines[0] == "| type | 2,048 rows, TOP/s | of mma | of Q4_K |"
    assert lines[2:4] == ["| Q4_K | 130 | 21% | 100% |", "| Q8_0 | 52 | 9% | 40% |"]
    assert "Below 70% of Q4_K: Q8_0 at 2,048 rows: 40%. Failed: Q2_K." in lines


def test_prompts_that_are_slower_than_shorter_ones_are_listed(results):
    lines = render.lengths(results).splitlines()
    assert lines[0].endswith(
        "6 lengths from 1 to 96 tokens: 2 slower by more than 5% than a shorter one:"
    )
    assert lines[2:4] == [
        "- 4 tokens: 180 tok/s, 5% below the 190 of 2 tokens",
        "- 96 tokens: 4,000 tok/s, 20% below the 5,000 of 64 tokens",
    ]
    even = results_of(results, "lengths")[0]
    even["results"] = even["results"][:2]
    assert "from 1 to 2 tokens: none is slower by more than 5%" in render.lengths([even])


def results_of(results, kind):
    return [result for result in results if result["kind"] == kind]


def test_the_plot_of_lengths_has_a_line_for_each_model_over_logarithmic_axes(results):
    root = ElementTree.fromstring(plots.prefill(results))
    svg = "{http://www.w3.org/2000/svg}"
    (line,) = root.iter(f"{svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    xs = [x for x, _ in points]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # 1, 2, 4 tokens
    texts = [element.text for element in root.iter(f"{svg}text")]
    assert {"1", "128", "100", "10,000", "7b-q4_k_m (random weights)"} <= set(texts)
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(0 < x < width and 0 < y < height for x, y in points)


def test_the_figures_of_a_process_stand_below_each_other(results):
    text = render.processes(results)
    assert "| a process of one token, s (median) | 1.20 |" in text
    assert "| - import | 0.210 |" in text
    assert "| - tokenizer |  |" in text
    assert "| `minfer generate`, tok/s (against the bench) | 2,600 (-3.7%) |" in text
    assert "| device memory beside weights and KV, MiB | 150 (bar 256) |" in text
    (result,) = results_of(results, "process")
    assert "weights and KV, MiB |  |" in render.processes([result | {"memory": None}])


def test_the_plot_is_well_formed_and_has_a_bar_for_each_decode_row(results):
    root = ElementTree.fromstring(plots.decode(results))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a<b, tg128" in texts
    assert texts.count("650 of 1,000 (65%)") == 2
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("fill") == "#3b7dd8"]
    assert len(bars) == 3


def test_without_results_everything_says_so():
    assert {part([]) for part in render.PARTS.values()} == {render.NOTHING}
    assert all(render.NOTHING in plot([]) for plot in plots.PLOTS.values())


def test_the_benchmark_of_a_synthetic_model_is_a_result_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setattr(models, "write_synthetic", write_tiny)
    words = ["tiny:q8_0", "--into", str(tmp_path), "--commit", "abc", "--"]
    assert (
        models.main([*words, "--device", "cpu", "-p", "4", "-n", "2", "-d", "0,3", "-r", "1"]) == 0
    )
    result = json.loads((tmp_path / "bench-synthetic-tiny-q8_0.json").read_text())
    assert result["command"].startswith("minfer bench synthetic-tiny-q8_0.gguf --device cpu")
    assert [row["name"] for row in result["results"]] == ["pp4", "tg2", "pp4 @ 3", "tg2 @ 3"]
    assert json.loads(capsys.readouterr().out) == result
    assert "| tiny-q8_0 (random weights) |" in render.speed([result])


def test_prompts_of_many_lengths_are_a_result_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "LENGTHS", "1,2,5")
    path = write_gguf(tmp_path / "tiny.gguf", layers=1, d=128, heads=2, kv_heads=1, ffn=128)
    words = [str(path), "--what", "lengths,bench", "--into", str(tmp_path), "--"]
    assert models.main([*words, "--device", "cpu", "-p", "3", "-n", "1", "-r", "2"]) == 0
    lengths = json.loads((tmp_path / "lengths-tiny.json").read_text())
    assert [row["name"] for row in lengths["results"]] == ["pp1", "pp2", "pp5"]
    bench = json.loads((tmp_path / "bench-tiny.json").read_text())
    assert [row["name"] for row in bench["results"]] == ["pp3", "tg1"]
    assert "3 lengths from 1 to 5 tokens" in render.lengths([lengths, bench])


def test_the_lengths_lie_around_every_row_count_at_which_another_path_begins():
    lengths = [int(n) for n in models.LENGTHS.split(",")]
    assert lengths == sorted(set(lengths)) and (lengths[0], lengths[-1]) == (1, 4096)
    for tile in TILES:
        assert {tile.tokens, tile.tokens + 1} <= set(lengths)


def test_the_types_that_are_compared_are_all_that_tensor_cores_multiply():
    options = kernels.arguments(["--types", "all", "--sizes", "7b", "--kernels", "matmul_f16"])
    names = {q.name for q in QUANT_TYPES.values() if q.cuda_name is not None}
    assert options.kind == "types" and set(options.types) == names - {"F32"}
    found = {(case.type_name, case.what) for case in cases.choose(options)}
    assert found == {(t, what) for t in options.types for what in ("o", "down", "gate, up")}


def test_a_process_is_measured_from_start_to_exit_in_parts_and_end_to_end(tmp_path, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", layers=1, d=128, heads=2, kv_heads=1, ffn=128)
    words = [str(path), "--device", "cpu", "--runs", "1", "--tokens", "9", "--into", str(tmp_path)]
    process.main([*words, "--commit", "abc"])
    result = json.loads((tmp_path / "process-tiny.json").read_text())
    assert set(result["stages"]) == set(render.STAGES)
    loading = sum(result["stages"].values()) - result["stages"]["first token"]
    assert 0 < loading < 60 and result["one_token_s"][0] > 0 and result["first_start_s"] > 0
    assert len(result["token_ms"]) == process.FIRST_TOKENS and result["memory"] is None
    assert result["generate"]["tokens_per_s"] > 0 and result["generate"]["bench_tokens_per_s"] > 0
    assert result["commit"] and result["device"] and result["date"]
    assert "| tiny |" in render.processes([result])


def test_device_memory_is_what_the_card_has_less_than_with_a_bare_context(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", layers=1, d=128, heads=2, kv_heads=1, ffn=128)
    free = iter([9000, 2000])
    card = SimpleNamespace(
        synchronize=lambda: None,
        queue=SimpleNamespace(driver=SimpleNamespace(memory=lambda: (next(free), 9999))),
    )
    parts = {"weights": 5000, "KV cache": 1000, "workspace": 500}
    monkeypatch.setattr("minfer_cuda.kernels.module.CudaDevice", lambda ordinal: card)
    monkeypatch.setattr("minfer_cuda.llm.LLM", partial(on_the_cpu, parts))
    found = process.load_in_parts(path, "cuda", spawned=0.0)
    assert found["memory"] == parts | {"used": 7000, "bar": process.LEAST_BAR}


def on_the_cpu(memory, path, device):
    llm = LLM(path, device="cpu")
    llm.engine.runner.memory = lambda: memory
    return llm


def write_tiny(path, size, ftype):
    write_synthetic(path, size, ftype, pools=Pools(0, blocks=1009))


def test_a_model_that_fails_does_not_end_the_others(tmp_path, capsys):
    assert models.main(["/no/such.gguf", "--into", str(tmp_path), "--", "--device", "cpu"]) == 1
    assert "failed with exit code 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        models.main(["7b:q9"])


# ---- endurance ----


def test_a_long_day_in_small_keeps_its_promises_and_stores_what_it_saw(tmp_path, monkeypatch):
    monkeypatch.setattr(endurance, "SPEED", float("inf"))  # this machine is shared
    monkeypatch.setattr(endurance, "GRAPH_ROWS", 4)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, layers=1, d=128, heads=2, kv_heads=1, ffn=128)
    words = [str(path), "--device", "cpu", "--tokens", "150", "--requests", "30", "--n-ctx", "160"]
    assert endurance.main([*words, "--into", str(tmp_path), "--commit", "abc"]) == 0
    result = json.loads((tmp_path / "endurance-tiny.json").read_text())
    assert result["tokens"] >= 150 and result["requests"] >= 30
    assert set(result["kinds"]) >= {"chat", "short", "long"}
    assert result["commit"] and result["date"] and result["device"] == "CPU"
    assert len(result["samples"]) == result["requests"]
    assert len(set(result["answers"]["first"].values())) == 4


def test_the_requests_use_every_option_of_the_sampler():
    used = {name for options in endurance.SAMPLERS for name in options}
    options = {f.name for f in fields(SamplingParams)}
    assert used == options - {"seed"}  # which every request has


BROKEN = {
    "host memory grew by 9,000,000": {"memory": {"host": {"growth": 9e6}, "device": None}},
    "device memory grew": {"memory": {"host": {"growth": 0}, "device": {"growth": 4e6}}},
    "the a answer is another one": {"answers": {"first": {"a": "x"}, "last": {"a": "y"}}},
    "3 values were not finite": {"not_finite": 3},
    "the speed changed by -2.1%": {"speed": {"change": -0.021}},
    "99 tokens only": {"tokens": 99},
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_promise_is_told_with_its_figure(words):
    good = {
        "memory": {"host": {"growth": -5}, "device": {"growth": 0}},
        "answers": {"first": {"a": "x"}, "last": {"a": "x"}},
        "not_finite": 0, "speed": {"change": 0.019}, "tokens": 100, "asked": {"tokens": 100},
    }  # fmt: skip
    assert endurance.promises(good) == []
    (broken,) = endurance.promises(good | BROKEN[words])
    assert broken.startswith(words)


def test_growth_is_between_the_first_and_the_last_tenth_and_no_peak_in_between():
    values = [100] * 10 + [900] + [100] * 79 + [130] * 10
    found = endurance.growth(values)
    assert (found["first"], found["last"], found["growth"]) == (100, 130, 30)
    assert endurance.growth(range(0, 1000, 10))["slope"] == 10

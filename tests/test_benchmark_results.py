"""Results of benchmarks: what is measured and stored, and the tables and plots made of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from test_synthetic import TINY, write_tiny

from benchmarks import cases, kernels, measure, models, plots, process, render
from benchmarks.family import SIZES
from minfer_cuda.kernels.matmul_f16 import TILES
from minfer_cuda.llm import LLM
from minfer_cuda.quants import QUANT_TYPES


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
    rows[0] |= {"n_tokens": 512}
    rows[1] |= {"n_tokens": 128}
    rows[2] |= {"n_tokens": 128, "depth": 4096}
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
    for result in results_of(results, "bench"):
        result["results"].reverse()  # columns go by depth and length all the same
    assert render.speed(results).splitlines() == lines


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


def test_prompts_of_many_lengths_are_a_result_of_their_own(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "LENGTHS", "1,2,5")
    words = [model, "--what", "lengths,bench", "--into", str(tmp_path), "--"]
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


def test_a_process_is_measured_from_start_to_exit_in_parts_and_end_to_end(model, tmp_path, capsys):
    words = [model, "--device", "cpu", "--runs", "1", "--tokens", "9", "--into", str(tmp_path)]
    process.main([*words, "--commit", "abc"])
    result = json.loads((tmp_path / "process-tiny.json").read_text())
    assert set(result["stages"]) == set(render.STAGES)
    loading = sum(result["stages"].values()) - result["stages"]["first token"]
    assert 0 < loading < 60 and result["one_token_s"][0] > 0 and result["first_start_s"] > 0
    assert len(result["token_ms"]) == process.FIRST_TOKENS and result["memory"] is None
    assert result["generate"]["tokens_per_s"] > 0 and result["generate"]["bench_tokens_per_s"] > 0
    assert result["commit"] and result["device"] and result["date"]
    assert "| tiny |" in render.processes([result])


def test_device_memory_is_what_the_card_has_less_than_with_a_bare_context(model, monkeypatch):
    free = iter([9000, 2000])
    card = SimpleNamespace(
        synchronize=lambda: None,
        queue=SimpleNamespace(driver=SimpleNamespace(memory=lambda: (next(free), 9999))),
    )
    parts = {"weights": 5000, "KV cache": 1000, "workspace": 500}
    monkeypatch.setattr("minfer_cuda.kernels.module.CudaDevice", lambda ordinal: card)
    monkeypatch.setattr("minfer_cuda.llm.LLM", partial(on_the_cpu, parts))
    found = process.load_in_parts(Path(model), "cuda", spawned=0.0)
    assert found["memory"] == parts | {"used": 7000, "bar": process.LEAST_BAR}


def on_the_cpu(memory, path, device):
    llm = LLM(path, device="cpu")
    llm.engine.runner.memory = lambda: memory
    return llm


def test_a_model_that_fails_does_not_end_the_others(tmp_path, capsys):
    assert models.main(["/no/such.gguf", "--into", str(tmp_path), "--", "--device", "cpu"]) == 1
    assert "failed with exit code 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        models.main(["7b:q9"])

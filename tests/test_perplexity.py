"""Perplexity, divergence from a base, and the file of saved predictions."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from ggufs import ONE_LAYER, write_gguf
from typer.testing import CliRunner

from cli.main import app
from minfer_cuda import perplexity as ppl
from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import MinferError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.saved_logits import SavedLogits, pack, row_width, saving_logits, unpack
from minfer_cuda.tokenizer import Tokenizer

TEXTS = Path(__file__).parent.parent / "benchmarks" / "text"
SHIPPED = TEXTS / "prose_and_code.txt"
N_CTX = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ppl") / "tiny.gguf"
    return write_gguf(path, **ONE_LAYER)


def runner_of(path: Path, **options) -> NumpyRunner:
    file = GGUFFile.open(path)
    return NumpyRunner(file, Qwen2Config.from_gguf(file), N_CTX, "f32", **options)


def chunks_of(n: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, (n, N_CTX)).astype(np.int32)


def log_softmax64(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def minfer(*arguments):
    return CliRunner().invoke(app, ["perplexity", *map(str, arguments)])


# chunks and rows


def test_a_text_is_cut_into_whole_chunks_and_its_rest_is_dropped():
    assert ppl.cut(range(26), 8).tolist() == np.arange(24).reshape(3, 8).tolist()
    assert ppl.cut(range(26), 8, limit=2).shape == (2, 8)
    assert ppl.cut(range(26), 8, limit=9).shape == (3, 8)


def test_a_text_shorter_than_a_chunk_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match="511 tokens, one chunk needs 512"):
        ppl.cut(range(511), 512)
    with pytest.raises(UsageError, match="at least 8"):
        ppl.cut(range(100), 7)


@pytest.mark.parametrize("n_batch", [1, 3, 7, N_CTX])
@pytest.mark.parametrize("source", [ppl.prefilled, ppl.decoded])
def test_rows_are_of_the_second_half_given_all_before_in_the_chunk(model, source, n_batch):
    """Whatever the runner takes at once: position p of chunk c is predicted from c[: p + 1]."""
    chunks = chunks_of(2)
    rows = source(runner_of(model, n_batch=n_batch), chunks)
    fresh = runner_of(model)
    for c in (0, 1):
        got = list(rows(c))
        assert len(got) == N_CTX - 1 - N_CTX // 2
        for p, row in enumerate(got, start=N_CTX // 2):
            fresh.prefill(chunks[c, : p + 1].tolist(), 0)
            np.testing.assert_allclose(row, log_softmax64(fresh.logits()[0]), atol=2e-5)


def test_at_most_a_pieces_logits_are_asked_for_at_once():
    class Counting:
        n_batch = 4096
        most = 0

        def prefill(self, ids, start, n_out=1):
            self.most = max(self.most, n_out)

        def logits(self, n_out=1):
            return np.zeros((n_out, 4), np.float32)

    runner = Counting()
    rows = ppl.prefilled(runner, np.zeros((1, 3001), np.int32))
    assert len(list(rows(0))) == 1500
    assert runner.most == ppl.PIECE


def test_a_log_softmax_is_right_to_float32_for_large_logits_too():
    logits = np.random.default_rng(0).normal(0, 5, 1000).astype(np.float32)
    for shift in (0, 1e4):
        row = logits + np.float32(shift)
        np.testing.assert_allclose(ppl.log_softmax(row), log_softmax64(row), rtol=3e-7, atol=1e-7)


# statistics


def given(table: np.ndarray):
    """Rows (C, R, V) as a source."""
    return lambda chunk: iter(np.log(table[chunk]).astype(np.float32))


def test_uniform_predictions_have_the_perplexity_of_the_vocabulary():
    chunks = np.arange(16, dtype=np.int32).reshape(2, 8)
    *_, result = ppl.perplexity(given(np.full((2, 3, 16), 1 / 16)), chunks)
    assert result.n_tokens == 6
    assert result.ppl == pytest.approx(16)
    assert result.ppl_error == pytest.approx(0, abs=1e-6)


def test_perplexity_is_of_the_next_tokens_probabilities():
    """Scored tokens of a chunk of 8 are its last three, predicted at positions 4, 5, 6."""
    chunks = np.array([[0, 0, 0, 0, 0, 1, 2, 3]], np.int32)
    table = np.full((1, 3, 4), 0.1)
    p = np.array([0.5, 0.25, 0.125])
    table[0, [0, 1, 2], [1, 2, 3]] = p
    kept = []
    (result,) = ppl.perplexity(given(table), chunks, kept.append)
    nll = -np.log(p)
    assert result.ppl == pytest.approx(np.exp(nll.mean()))
    assert result.ppl_error == pytest.approx(result.ppl * nll.std(ddof=1) / np.sqrt(3))
    assert np.array(kept) == pytest.approx(np.log(table[0]))


def test_the_estimate_is_given_after_each_chunk():
    chunks = np.zeros((3, 8), np.int32)
    table = np.full((3, 3, 4), 0.25)
    assert [e.n_tokens for e in ppl.perplexity(given(table), chunks)] == [3, 6, 9]
    assert [e.n_tokens for (e,) in ppl.compare(chunks, given(table), given(table))] == [3, 6, 9]


def test_a_divergence_is_the_sum_of_p_times_the_difference_of_logs():
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.full(50, 0.5), 2)
    p, q = (p + 1e-5) / (p + 1e-5).sum(), (q + 1e-5) / (q + 1e-5).sum()
    base, other = np.log(p).astype(np.float32), np.log(q).astype(np.float32)
    nll, nll_base, kld, delta_p, same = ppl.position(base, other, 7)
    assert kld == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)
    assert (nll, nll_base) == pytest.approx((-np.log(q[7]), -np.log(p[7])))
    assert delta_p == pytest.approx(q[7] - p[7], abs=1e-7)
    assert same == (p.argmax() == q.argmax())
    assert ppl.position(base, base, 7)[2:] == (0.0, 0.0, True)


def test_what_the_base_finds_less_likely_than_16_nats_is_left_out_of_the_divergence():
    base = np.array([0.0, -15.9, -16.1], np.float32)
    rare, rarer = (base + np.array(shift, np.float32) for shift in ([0, -1, 0], [0, 0, -1]))
    assert ppl.position(base, rare, 0)[2] == pytest.approx(np.exp(-15.9), rel=1e-5)
    assert ppl.position(base, rarer, 0)[2] == 0


def test_the_summary_is_of_all_positions():
    n = 1001
    kld = np.random.default_rng(2).permutation(n) / 1000
    positions = [(1.0 + k, 1.0, k, 0.3 if i % 2 else -0.1, i < 900) for i, k in enumerate(kld)]
    s = ppl.summary(positions)
    assert s.n_tokens == n
    assert (s.kld_mean, s.kld_median, s.kld_p99, s.kld_p99_9, s.kld_max) == pytest.approx(
        (0.5, 0.5, 0.99, 0.999, 1.0)
    )
    assert s.kld_error == pytest.approx(kld.std(ddof=1) / np.sqrt(n))
    assert (s.ppl, s.ppl_base) == pytest.approx((np.exp(1.5), np.exp(1)))
    assert (s.ln_ppl_ratio, s.ln_ppl_ratio_error) == pytest.approx((0.5, s.kld_error))
    assert s.delta_p_rms == pytest.approx(np.sqrt((500 * 0.09 + 501 * 0.01) / n))
    assert s.same_top == 900 / n


def test_several_sources_are_compared_with_one_pass_over_the_base():
    chunks = np.zeros((1, 8), np.int32)
    asked = []
    table = np.full((1, 3, 4), 0.25)
    other = np.tile([0.4, 0.2, 0.2, 0.2], (1, 3, 1))

    def base(chunk):
        asked.append(chunk)
        return given(table)(chunk)

    ((same, different),) = ppl.compare(chunks, base, given(table), given(other))
    assert asked == [0]
    assert same.kld_mean == 0
    assert different.kld_mean == pytest.approx(np.mean(np.log(0.25 / other[0, 0])), rel=1e-5)


def test_a_source_that_misses_a_row_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        list(ppl.perplexity(given(np.full((1, 2, 4), 0.25)), np.zeros((1, 8), np.int32)))


def test_runners_with_another_cache_type_are_told_apart_and_equal_ones_are_not(model):
    chunks = chunks_of(1)
    file = GGUFFile.open(model)
    half = NumpyRunner(file, Qwen2Config.from_gguf(file), N_CTX, "f16")
    sources = [ppl.prefilled(runner, chunks) for runner in (runner_of(model), half)]
    ((equal, rounded),) = ppl.compare(chunks, ppl.prefilled(runner_of(model), chunks), *sources)
    assert equal.kld_max == 0
    assert equal.same_top == 1
    assert rounded.delta_p_rms > 0
    assert abs(rounded.kld_mean) < 1e-6


# the file


def test_the_file_is_laid_out_as_llama_perplexity_writes_it(tmp_path):
    """An odd vocabulary of 5: rows of 6 + 4 uint16, the last one unused."""
    path = tmp_path / "base"
    chunks = np.array([[0, 1, 2, 3, 4, 0, 1, 2]], np.int32)
    row = np.array([-1.0, -2.0, -3.0, -1.5, -30.0], np.float32)
    with saving_logits(path, chunks, 5) as add:
        for _ in range(3):
            add(row)
    data = path.read_bytes()
    assert data[:20] == b"_logits_" + struct.pack("<3i", 8, 5, 1)
    assert struct.unpack("<8i", data[20:52]) == tuple(chunks[0])
    assert len(data) == 52 + 3 * 20
    scale, lowest, *q = struct.unpack("<2f6H", data[52:72])
    assert lowest == -17
    assert scale == pytest.approx(16 / 65535)
    assert q == [65535, round(15 / scale), round(14 / scale), round(15.5 / scale), 0, 0]


def test_a_file_written_elsewhere_is_read(tmp_path):
    path = tmp_path / "base"
    rows = b"".join(struct.pack("<2f4H", 0.5, -8.0, 16, 0, k, 9) for k in (1, 2, 3))
    path.write_bytes(b"_logits_" + struct.pack("<3i8i", 8, 3, 1, *[0, 1, 2, 0, 1, 2, 0, 1]) + rows)
    saved = SavedLogits(path)
    assert saved.n_vocab == 3
    assert saved.chunks.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    expected = [[0, -8, -8 + k / 2] for k in (1, 2, 3)]
    assert [row.tolist() for row in saved.rows(0)] == expected


@pytest.mark.parametrize("n_vocab", [1, 2, 7, 1000])
def test_a_kept_row_is_right_to_half_a_step_and_floored_at_16_nats(n_vocab):
    logits = np.random.default_rng(n_vocab).normal(0, 8, n_vocab).astype(np.float32)
    row = ppl.log_softmax(logits)
    packed = pack(row)
    assert packed.shape == (row_width(n_vocab),)
    got = unpack(packed, n_vocab)
    expected = np.maximum(row, row.max() - 16)
    np.testing.assert_allclose(got, expected, atol=16 / 65535 / 2 + 4e-6)
    assert got.argmax() == row.argmax()


def test_equal_logits_are_kept():
    row = ppl.log_softmax(np.zeros(6, np.float32))
    assert np.array_equal(unpack(pack(row), 6), row)


def sound(path: Path) -> bytes:
    with saving_logits(path, np.zeros((2, 8), np.int32), 4) as add:
        for _ in range(6):
            add(np.log(np.full(4, 0.25, np.float32)))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda data: b"", "empty"),
        (lambda data: b"GGUF" + data[4:], "_logits_"),
        (lambda data: data[:15], "_logits_"),
        (lambda data: data[:-1], "bytes"),
        (lambda data: data + b"x", "bytes"),
        (lambda data: data[:16] + struct.pack("<i", 2**31 - 1) + data[20:], "bytes"),
        (lambda data: data[:8] + struct.pack("<i", -8) + data[12:], "sizes"),
        (lambda data: data[:12] + struct.pack("<i", 0) + data[16:], "sizes"),
        (lambda data: data[:20] + struct.pack("<i", 4) + data[24:], "0..3"),
        (lambda data: data[:20] + struct.pack("<i", -1) + data[24:], "0..3"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, spoil, told):
    path = tmp_path / "base"
    path.write_bytes(spoil(sound(path)))
    with pytest.raises(MinferError, match=told) as e:
        SavedLogits(path)
    assert str(path) in str(e.value)


def test_a_file_that_is_not_whole_leaves_nothing_and_the_old_one_stays(tmp_path):
    path = tmp_path / "base"
    old = sound(path)
    with pytest.raises(KeyboardInterrupt), saving_logits(path, np.zeros((1, 8)), 4) as add:
        add(np.zeros(4, np.float32))
        raise KeyboardInterrupt
    with pytest.raises(MinferError, match="3 of 3 rows"), saving_logits(path, np.zeros((1, 8)), 4):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert path.read_bytes() == old


# the command


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("hello world and the other world in it. " * 8, encoding="utf-8")
    return path


def options(model, text):
    return (model, "-f", text, "-c", 16, "--device", "cpu", "--kv-type", "f32")


def test_a_saved_base_compared_with_itself_differs_by_the_files_steps_only(model, text, tmp_path):
    """A step of 16/65535 nats moves each log p by half at most, whose mean is near 0."""
    base = tmp_path / "base.bin"
    saved = minfer(*options(model, text), "--chunks", 3, "--save-logits", base, "--json")
    assert saved.exit_code == 0, saved.stderr
    alone = json.loads(saved.stdout)
    for extra in ((), ("--token-by-token",)):
        done = minfer(model, "--device", "cpu", "--kv-type", "f32", "--kl-divergence", base,
                      "--json", *extra)  # fmt: skip
        assert done.exit_code == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["n_ctx"], result["n_chunks"], result["n_tokens"]) == (16, 3, 21)
        assert result["token_by_token"] == bool(extra)
        assert result["ppl"] == pytest.approx(alone["ppl"], rel=1e-4)
        assert result["ppl_base"] == pytest.approx(alone["ppl"], rel=1e-4)
        assert result["kld_max"] < 16 / 65535 / 2
        assert result["same_top"] == 1


def test_estimates_go_to_stderr_and_the_result_to_stdout(model, text):
    done = minfer(*options(model, text), "--chunks", 2)
    assert done.exit_code == 0, done.stderr
    assert "chunk 2/2: PPL" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "tokens scored   14 in 2 chunks of 16"
    assert lines[1].startswith("PPL")
    assert len(lines) == 2


def test_the_command_scores_the_text_without_a_token_before_it(model, text):
    done = minfer(*options(model, text), "--json")
    file = GGUFFile.open(model)
    ids = Tokenizer(file.metadata).encode(text.read_text(), parse_special=False)
    chunks = ppl.cut(ids, 16)
    *_, expected = ppl.perplexity(ppl.prefilled(runner_of(model), chunks), chunks)
    result = json.loads(done.stdout)
    assert (result["n_chunks"], result["ppl"]) == (len(chunks), expected.ppl)


def test_a_base_of_another_text_vocabulary_or_chunk_size_is_refused(model, text, tmp_path):
    base = tmp_path / "base.bin"
    minfer(*options(model, text), "--chunks", 2, "--save-logits", base)
    good = minfer(*options(model, text), "--kl-divergence", base)
    assert good.exit_code == 0, good.stderr
    other = tmp_path / "other.txt"
    other.write_text("another text, long enough to fill one chunk. " * 3)
    result = minfer(*options(model, other), "--kl-divergence", base)
    assert (result.exit_code, "another text" in result.stderr) == (1, True)
    result = minfer(model, "-c", 32, "--kl-divergence", base)
    assert (result.exit_code, "16 tokens" in result.stderr) == (2, True)
    larger = write_gguf(tmp_path / "larger.gguf", **ONE_LAYER, vocab=400)
    result = minfer(larger, "--device", "cpu", "--kl-divergence", base)
    assert (result.exit_code, "this one has 400" in result.stderr) == (1, True)


def test_what_cannot_be_scored_ends_in_one_line(model, text, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9" * 100)
    short = tmp_path / "short.txt"
    short.write_text("one")
    cases = [
        ((model,), 2, "-f"),
        ((model, "-f", tmp_path / "none"), 2, "none"),
        ((*options(model, text), "-c", "7"), 2, "--n-ctx"),
        ((*options(model, text), "--chunks", "0"), 2, "--chunks"),
        ((*options(model, text), "--save-logits", "x", "--kl-divergence", text), 2, "exclude"),
        (options(model, latin), 1, "byte 3"),
        (options(model, short), 2, "one chunk needs 16"),
        ((*options(model, text), "--kl-divergence", text), 1, "_logits_"),
        ((*options(model, text), "--save-logits", tmp_path / "no" / "x"), 1, "cannot write"),
        ((*options(model, text), "--save-logits", text), 2, "would replace"),
        ((*options(model, text), "--save-logits", model), 2, "would replace"),
    ]
    for arguments, code, told in cases:
        result = minfer(*arguments)
        assert result.exit_code == code, (arguments, result.stderr)
        assert told in result.stderr
        assert "Traceback" not in result.stderr
        assert "internal" not in result.stderr
        assert result.stdout == ""


# the shipped text


def test_the_shipped_text_is_the_one_that_figures_were_measured_over():
    digest = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    assert digest in (TEXTS / "README.md").read_text()


@pytest.mark.model
def test_the_shipped_text_has_22_chunks_of_a_real_vocabulary(model_05b):
    with GGUFFile.open(model_05b) as file:
        ids = Tokenizer(file.metadata).encode(SHIPPED.read_text("utf-8"), parse_special=False)
    assert len(ppl.cut(ids, 512)) == 22


@pytest.mark.model
def test_a_real_model_predicts_the_text_one_by_one_as_all_at_once(model_05b):
    """Both in float32, and the same weights: NumPy against NumPy."""
    with GGUFFile.open(model_05b) as file:
        config = Qwen2Config.from_gguf(file)
        runner = NumpyRunner(file, config, 24, "f32")
        ids = Tokenizer(file.metadata).encode(SHIPPED.read_text("utf-8")[:400], parse_special=False)
        chunks = ppl.cut(ids, 24, limit=1)
        base = list(ppl.prefilled(runner, chunks)(0))
        ((result,),) = ppl.compare(chunks, lambda chunk: iter(base), ppl.decoded(runner, chunks))
    assert result.kld_max < 1e-5
    assert result.same_top == 1
    assert 1 < result.ppl < 100

"""Real checkpoints on the CPU against an independent implementation (tests/reference/README.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import Engine
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams

pytestmark = pytest.mark.model

REFERENCE = Path(__file__).parent / "reference"
GREEDY = SamplingParams(temperature=0.0)
CLOSE_CALL = 0.05  # a gap between best and second under this may go either way


@pytest.fixture(scope="module", params=["05b", "15b"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, list[dict[str, Any]]]]:
    """The engine of one checkpoint and its reference entries; skipped by name without the file."""
    path = request.getfixturevalue(f"model_{request.param}")
    size = f"{request.param[0]}.{request.param[1:]}"
    text = (REFERENCE / f"qwen2.5-coder-{size}-q4_k_m.json").read_text("utf-8")
    with GGUFFile.open(path) as file:
        config = Qwen2Config.from_gguf(file)
        runner = NumpyRunner(file, config, 256, "f32")
        yield Engine(runner, config), json.loads(text)["entries"]
        runner.close()


def sure_steps(entry: dict[str, Any]) -> int:
    """How many greedy steps come before the first close call."""
    gaps = entry["greedy_gaps"]
    return next((i for i, gap in enumerate(gaps) if gap < CLOSE_CALL), len(gaps))


def test_logits_residuals_and_greedy_choices_agree_with_the_reference(model):
    engine, entries = model
    choices = 0
    for entry in entries:
        n, greedy = sure_steps(entry), entry["greedy_ids"]
        rows = max(n, 1)  # of logits: the prompt's last position, then one for each greedy id
        residual: list[float] = []

        def tap(name: str, layer: int | None, value: np.ndarray, rows=rows, to=residual) -> None:
            if name == "layer_output":
                to.append(float(np.sqrt(np.mean(value[-rows].astype(np.float64) ** 2))))

        ids = entry["ids"] + greedy[: rows - 1]
        engine.runner.forward(ids, 0, rows, tap)
        logits = engine.runner.logits(rows).astype(np.float64)
        first = logits[0]
        np.testing.assert_allclose(first[entry["top_ids"]], entry["top_logits"], atol=0.005)
        np.testing.assert_allclose(np.sort(first)[:-17:-1], entry["top_logits"], atol=0.005)
        total = first.max() + np.log(np.exp(first - first.max()).sum())
        assert total == pytest.approx(entry["logsumexp"], abs=0.005)
        np.testing.assert_allclose(residual, entry["residual_rms"], rtol=1e-3)
        # each greedy id follows the ones before it: equal choices here are an equal greedy run
        assert logits[:n].argmax(1).tolist() == greedy[:n], entry["text"]
        choices += n
    assert choices >= 150


def test_decoding_step_by_step_gives_the_references_greedy_ids(model):
    engine, entries = model
    for entry in entries[2:6]:
        n = min(sure_steps(entry), 10)
        engine.rollback(0)
        ids = [token.id for token in engine.generate(entry["ids"], GREEDY, n)]
        assert ids == entry["greedy_ids"][:n], entry["text"]

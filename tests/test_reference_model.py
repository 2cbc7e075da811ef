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


def test_logits_and_every_layers_residual_agree_with_the_reference(model):
    engine, entries = model
    for entry in entries:
        residual: list[float] = []

        def tap(name: str, layer: int | None, value: np.ndarray, into=residual) -> None:
            if name == "layer_output":
                into.append(float(np.sqrt(np.mean(value[-1].astype(np.float64) ** 2))))

        ids = entry["ids"]
        engine.runner.forward(ids, range(len(ids)), 1, tap)
        logits = engine.runner.logits()[0].astype(np.float64)
        np.testing.assert_allclose(logits[entry["top_ids"]], entry["top_logits"], atol=0.005)
        largest = np.sort(logits)[::-1][:16]
        np.testing.assert_allclose(largest, entry["top_logits"], atol=0.005)
        total = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        assert total == pytest.approx(entry["logsumexp"], abs=0.005)
        np.testing.assert_allclose(residual, entry["residual_rms"], rtol=1e-3)


def test_greedy_ids_equal_the_references_up_to_the_first_close_call(model):
    engine, entries = model
    compared = 0
    for entry in entries:
        gaps = entry["greedy_gaps"]
        n = next((i for i, gap in enumerate(gaps) if gap < CLOSE_CALL), len(gaps))
        ids = [token.id for token in engine.generate(entry["ids"], GREEDY, n)]
        assert ids == entry["greedy_ids"][:n], entry["text"]
        compared += n
    assert compared >= 150

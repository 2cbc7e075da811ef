"""The device sampler: the host sampler's token for every parameter, and what a step leaves behind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minfer_cuda.errors import NumericsError, UsageError
from minfer_cuda.kernels import Device
from minfer_cuda.kernels.sampling import (
    MAX_LOGPROBS,
    STATE,
    Draw,
    Sampler,
    instances,
    plan,
)
from minfer_cuda.sampling import SamplingParams, sample, top_logprobs, uniform

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
WINDOW_ROOM = 64
_samplers: dict[tuple[int, int], Sampler] = {}


def sampler_of(device: Device, n_vocab: int) -> Sampler:
    """One per size: buffers are used again, as a runner does."""
    key = (id(device), n_vocab)
    if key not in _samplers:
        _samplers[key] = Sampler(device, n_vocab, WINDOW_ROOM, n_slots=3)
    return _samplers[key]


def logits_of(n_vocab: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(n_vocab)
    normal = (rng.standard_normal(n_vocab) * 3).astype(np.float32)
    return {
        "normal": normal,
        "ties": np.floor(normal),
        "equal": np.zeros(n_vocab, np.float32),
        "spike": np.where(np.arange(n_vocab) == n_vocab // 2, 50, normal).astype(np.float32),
        "forbidden": np.where(np.arange(n_vocab) % 3 == 0, normal, -np.inf).astype(np.float32),
        "wide": (normal * 40).astype(np.float32),
    }[kind]


def draws(
    device: Device, logits: np.ndarray, params: SamplingParams, count: int = 2, seed: int = 5
) -> list[int]:
    sampler = sampler_of(device, logits.size)
    sampler.begin(params, seed, [])
    row = device.upload(logits)
    tokens = []
    for _ in range(count):
        sampler.sample(row)
        tokens.append(int(device.download(sampler.token)[0]))
    return tokens


def host_draws(
    logits: np.ndarray,
    params: SamplingParams,
    count: int = 2,
    seed: int = 5,
    history: tuple[int, ...] = (),
    exempt: frozenset[int] = frozenset(),
) -> list[int]:
    ids = list(history)
    for n in range(count):
        ids.append(sample(logits, params, ids, exempt, uniform(seed, n)))
    return ids[len(history) :]


# ---- agreement with the host sampler

CORNERS = [
    {},  # all candidates
    {"top_k": 1},
    {"top_k": 2, "top_p": 0.5},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 256, "temperature": 1.7},
    {"top_k": 300, "top_p": 0.9},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 0.999, "temperature": 0.3},
    {"min_p": 0.1, "temperature": 2.5},
    {"min_p": 1.0},
    {"top_k": 100000, "top_p": 1.5, "min_p": 0.01, "temperature": 30.0},
    {"temperature": 0.0, "top_p": 0.5},
]


@pytest.mark.parametrize("corner", CORNERS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "spike", "forbidden", "wide"])
def test_every_parameter_corner_gives_the_host_samplers_tokens(device, kind, corner):
    logits = logits_of(700, kind)
    params = SamplingParams(**{**OFF, **corner})
    assert draws(device, logits, params) == host_draws(logits, params)


@pytest.mark.parametrize("n_vocab", [1, 37, 1000, 5000])
@pytest.mark.parametrize(
    "corner", [{}, {"top_k": 40, "min_p": 0.05}, {"temperature": 0.0}], ids=str
)
def test_any_vocabulary_size_gives_the_host_samplers_tokens(device, n_vocab, corner):
    logits = logits_of(n_vocab, "normal")
    params = SamplingParams(**{**OFF, "top_p": 0.9, **corner})
    assert draws(device, logits, params) == host_draws(logits, params)

"""The endurance run in small, and what it calls a broken promise."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from benchmarks import endurance
from minfer_cuda.sampling import SamplingParams


def test_a_long_day_in_small_keeps_its_promises_and_stores_what_it_saw(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(endurance, "SPEED", float("inf"))  # this machine is shared
    words = [model, "--device", "cpu", "--tokens", "150", "--requests", "30", "--n-ctx", "160"]
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

"""The device sampler: the host sampler's token for every parameter, and what a draw leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minfer_cuda.config import MAX_LOGPROBS
from minfer_cuda.errors import NumericsError, UsageError
from minfer_cuda.kernels import Device
from minfer_cuda.kernels.sampling import (
    STATE,
    Draw,
    Sampler,
    instances,
    plan,
)
from minfer_cuda.sampling import SamplingParams, mask_words, sample, top_logprobs, uniform

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
    {"top_k": 400, "top_p": 0.99, "min_p": 0.001, "temperature": 3.0},
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


def test_all_candidates_of_a_flat_distribution_can_be_drawn_beyond_a_bins_size(device):
    """All 5,000 logits fall into one bin; the token is then exact by id alone."""
    logits = np.zeros(5000, np.float32)
    params = SamplingParams(**OFF)
    assert draws(device, logits, params, 3) == host_draws(logits, params, 3)


@pytest.mark.parametrize("top_k", [20, 200, 256])
def test_candidates_that_one_block_has_all_of_are_found(device, top_k):
    """4 blocks take runs of 8 ids in turn; the draw looks at 8 keys of each before it reads on."""
    logits = np.where(np.arange(1024) // 8 % 4 == 1, 5.0, -5.0) + logits_of(1024, "normal") / 10
    params = SamplingParams(**{**OFF, "top_k": top_k, "temperature": 2.0})
    logits = logits.astype(np.float32)
    assert draws(device, logits, params, 4) == host_draws(logits, params, 4)


@pytest.mark.parametrize("top_k", [2, 40, 256])
@pytest.mark.parametrize("distinct", [1, 2, 5000])
def test_more_like_candidates_than_there_is_room_for_are_told_apart(device, distinct, top_k):
    """5,000 logits within 1/128 of the best: all as good as one to the histogram of distances."""
    logits = (np.arange(5000) * 7 % distinct / 1e6).astype(np.float32)
    params = SamplingParams(**{**OFF, "top_k": top_k})
    assert draws(device, logits, params, 3) == host_draws(logits, params, 3)


# ---- masks


def mask_of(n_vocab: int, ids: np.ndarray) -> np.ndarray:
    bits = np.zeros(mask_words(n_vocab) * 32, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def masked_draws(
    device: Device, logits: np.ndarray, params: SamplingParams, masks: list[np.ndarray]
) -> tuple[list[int], list[int]]:
    """The device's tokens and the host's; each draw has a mask of its own."""
    sampler = sampler_of(device, logits.size)
    sampler.begin(params, 5, [])
    row = device.upload(logits)
    tokens, ids = [], []
    for n, mask in enumerate(masks):
        sampler.set_mask(mask)
        sampler.sample(row, masked=True)
        tokens.append(int(device.download(sampler.token)[0]))
        ids.append(sample(logits, params, ids, frozenset(), uniform(5, n), mask))
    return tokens, ids


@pytest.mark.parametrize(
    "corner",
    [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}, {"top_k": 300, "top_p": 0.9},
     {"temperature": 0.0}, {"top_k": 3, "presence_penalty": 2.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("n_allowed", [1, 2, 30, 650])
def test_a_draw_gives_the_host_samplers_token_and_none_that_its_mask_lacks(
    device, n_allowed, corner
):
    """Sparse masks leave whole blocks without an id; the likeliest id of all is never allowed."""
    logits = logits_of(700, "normal")
    logits[[3, 350, 699]] = 60.0
    rng = np.random.default_rng(n_allowed)
    others = np.setdiff1d(np.arange(700), [3, 350, 699])
    allowed_ids = [rng.choice(others, n_allowed, replace=False) for _ in range(3)]
    params = SamplingParams(**{**OFF, "temperature": 2.0, **corner})
    got, want = masked_draws(device, logits, params, [mask_of(700, ids) for ids in allowed_ids])
    assert got == want
    assert all(token in ids for token, ids in zip(got, allowed_ids, strict=True))


@pytest.mark.parametrize("corner", [{"temperature": 0.0}, {"top_k": 40}, {}], ids=str)
def test_the_only_id_that_is_allowed_is_drawn_however_unlikely(device, corner):
    logits = np.full(700, 80.0, np.float32)
    logits[699] = -80.0
    logits[5] = np.nan  # of an id that the mask lacks: no harm
    params = SamplingParams(**{**OFF, **corner})
    assert masked_draws(device, logits, params, [mask_of(700, [699])]) == ([699], [699])


@pytest.mark.parametrize("corner", [{"temperature": 0.0}, {"top_k": 40}, {}], ids=str)
@pytest.mark.parametrize("ids", [[], [7]], ids=["nothing allowed", "allowed but impossible"])
def test_a_draw_without_a_possible_id_is_flagged(device, ids, corner):
    logits = np.where(np.arange(700) == 7, -np.inf, logits_of(700, "normal")).astype(np.float32)
    params = SamplingParams(**{**OFF, **corner})
    sampler = sampler_of(device, 700)
    sampler.begin(params, 5, [])
    sampler.set_mask(mask_of(700, ids))
    sampler.sample(device.upload(logits), masked=True)
    with pytest.raises(NumericsError):
        Draw.of(device.download(sampler.results)[0])
    with pytest.raises(NumericsError):
        sample(logits, params, [], frozenset(), 0.5, mask_of(700, ids))


# ---- bias and penalties

PENALTIES = {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.4}


@pytest.mark.parametrize("top_k", [40, 0])
@pytest.mark.parametrize("window", [0, 3, 64, 65, -1])
def test_penalties_follow_the_window_through_prompt_and_draws(device, window, top_k):
    """Few likely ids, so that each draw repeats some; the window of 3 wraps; 65 > WINDOW_ROOM."""
    logits = np.where(np.arange(300) < 6, 4.0, -20.0).astype(np.float32)
    logits[:6] += np.arange(6, dtype=np.float32) / 4
    params = SamplingParams(
        **{**OFF, **PENALTIES, "top_k": top_k, "temperature": 0.7}, penalty_window=window
    )
    history, exempt = (1, 5, 5, 2, 299, 1), frozenset({5, 4, 300})
    sampler = sampler_of(device, 300)
    sampler.begin(params, 11, history, exempt)
    row = device.upload(logits)
    tokens = []
    for _ in range(12):
        sampler.sample(row)
        tokens.append(int(device.download(sampler.token)[0]))
    assert tokens == host_draws(logits, params, 12, 11, history, exempt)


def test_penalties_change_the_answer_at_all(device):
    logits = np.array([3, 2.9, 0], np.float32)
    greedy = {**OFF, "temperature": 0.0}
    assert draws(device, logits, SamplingParams(**greedy)) == [0, 0]
    assert draws(device, logits, SamplingParams(**greedy, presence_penalty=1.0)) == [0, 1]


@pytest.mark.parametrize("corner", [{"temperature": 0.0}, {"top_k": 5}, {}], ids=str)
def test_logit_bias_raises_lowers_and_forbids_and_is_gone_with_the_next_begin(device, corner):
    logits = logits_of(700, "normal")
    best = int(logits.argmax())
    biased = SamplingParams(**{**OFF, **corner}, logit_bias={best: -math.inf, 7: 3.5, 8: -1.0})
    assert draws(device, logits, biased) == host_draws(logits, biased)
    plain = SamplingParams(**{**OFF, **corner})
    assert draws(device, logits, plain) == host_draws(logits, plain)


# ---- logits that are not finite


@pytest.mark.parametrize("corner", [{"temperature": 0.0}, {"top_k": 5}, {}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_finite_are_flagged_until_the_next_begin(device, bad, corner):
    logits = logits_of(700, "normal")
    wrong = logits.copy()
    wrong[333] = bad
    params = SamplingParams(**{**OFF, **corner})
    sampler = sampler_of(device, 700)
    sampler.begin(params, 5, [])
    for n, row in enumerate((wrong, logits)):
        sampler.sample(device.upload(row))
        with pytest.raises(NumericsError):
            Draw.of(device.download(sampler.results)[n])
    sampler.begin(params, 5, [])
    sampler.sample(device.upload(logits))
    assert [Draw.of(device.download(sampler.results)[0]).token] == host_draws(logits, params, 1)


@pytest.mark.parametrize("corner", [{"temperature": 0.0}, {"top_k": 5}, {}], ids=str)
def test_logits_that_are_all_minus_infinity_are_flagged(device, corner):
    """Whatever made them so, and in the words of the host sampler."""
    never = dict.fromkeys(range(37), -math.inf)
    for bias, logits in (({}, np.full(37, -np.inf, np.float32)), (never, logits_of(37, "normal"))):
        params = SamplingParams(**{**OFF, **corner, "logit_bias": bias})
        sampler = sampler_of(device, 37)
        sampler.begin(params, 5, [])
        sampler.sample(device.upload(logits))
        with pytest.raises(NumericsError) as here:
            Draw.of(device.download(sampler.results)[0])
        with pytest.raises(NumericsError) as there:
            sample(logits, params, [], (), 0.5)
        assert str(here.value) == str(there.value)


# ---- what a draw leaves behind


@pytest.mark.parametrize("top_k", [40, 0])
def test_each_draw_advances_the_counters_and_fills_the_next_slot(device, top_k):
    logits = logits_of(700, "normal")
    params = SamplingParams(**{**OFF, "top_k": top_k})
    sampler = sampler_of(device, 700)
    sampler.begin(params, 5, [1, 2])
    device.upload(np.array([41], np.int32), into=sampler.position)
    row = device.upload(logits)
    for advance in (1, 0, 1, 1):
        sampler.sample(row, advance)
    state = device.download(sampler.state).view(STATE)[0]
    want = host_draws(logits, params, 4)
    assert (state["token"], state["position"], state["draws"]) == (want[3], 44, 4)
    assert (state["n_history"], state["flags"]) == (6, 0)
    slots = [Draw.of(slot).token for slot in device.download(sampler.results)]
    assert slots == [want[3], want[1], want[2]]  # draw 3 went round to slot 0


def test_begin_leaves_token_and_position_and_starts_the_draws_again(device):
    logits = logits_of(700, "normal")
    params = SamplingParams(**OFF)
    first = draws(device, logits, params, 2)
    sampler = sampler_of(device, 700)
    before = device.download(sampler.state)[:2]
    sampler.begin(params, 5, [])
    assert (device.download(sampler.state)[:2] == before).all()
    assert draws(device, logits, params, 2) == first


def test_another_seed_draws_other_tokens_and_all_64_bits_count(device):
    logits = np.zeros(700, np.float32)
    params = SamplingParams(**OFF)
    seeds = (0, 1, 1 << 32, 2**64 - 1)
    seen = [draws(device, logits, params, 2, seed) for seed in seeds]
    assert seen == [host_draws(logits, params, 2, seed) for seed in seeds]
    assert len({tuple(tokens) for tokens in seen}) == len(seeds)


def test_draws_follow_the_distribution(device):
    """Chi-square of 160 draws over 4 ids: 99.9 % quantile at 3 degrees of freedom is 16.27."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    tokens = draws(device, np.log(p).astype(np.float32), SamplingParams(**{**OFF, "top_k": 4}), 160)
    seen = np.bincount(tokens, minlength=4)
    assert ((seen - 160 * p) ** 2 / (160 * p)).sum() < 16.27


def test_a_draw_allocates_nothing(device, monkeypatch):
    sampler = sampler_of(device, 700)
    row = device.upload(logits_of(700, "normal"))

    def refuse(*args: object) -> None:
        raise AssertionError("allocation in a draw")

    for name in ("empty", "zeros"):
        monkeypatch.setattr(device, name, refuse)
    for corner in ({}, {"top_k": 5}):
        sampler.begin(SamplingParams(**{**OFF, **corner}), 0, [], n_logprobs=2)
        sampler.sample(row)


# ---- log probabilities


@pytest.mark.parametrize("n", [1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("n_vocab", [3, 1000])
def test_logprobs_are_of_the_models_own_distribution(device, n_vocab, n):
    """Mask, bias and filters change the token only. Bound: one rounding to float32."""
    logits = logits_of(n_vocab, "ties")
    params = SamplingParams(temperature=0.0, logit_bias={1: 100.0})
    sampler = sampler_of(device, n_vocab)
    sampler.begin(params, 5, [], n_logprobs=n)
    sampler.set_mask(mask_of(n_vocab, [0, 1]))
    sampler.sample(device.upload(logits), masked=True)
    draw = Draw.of(device.download(sampler.results)[0])
    own, best = top_logprobs(logits, 1, n)
    assert draw.token == 1
    assert draw.logprob == np.float32(own) or abs(draw.logprob - own) <= abs(own) * 2.0**-24
    assert [token for token, _ in draw.logprobs] == [token for token, _ in best]
    for (_, got), (_, want) in zip(draw.logprobs, best, strict=True):
        assert abs(got - want) <= abs(want) * 2.0**-23


def test_without_logprobs_a_draw_has_none_and_too_many_are_refused(device):
    sampler = sampler_of(device, 37)
    sampler.begin(SamplingParams(temperature=0.0), 5, [])
    sampler.sample(device.upload(logits_of(37, "normal")))
    draw = Draw.of(device.download(sampler.results)[0])
    assert (draw.logprob, draw.logprobs) == (None, ())
    with pytest.raises(UsageError, match="n_logprobs is 33"):
        sampler.begin(SamplingParams(), 5, [], n_logprobs=33)


# ---- plan


@pytest.mark.parametrize(
    ("n_vocab", "sm_count", "want"),
    [
        (151936, 132, (132, 1152)),
        (151936, 20, (38, 4096)),
        (1, 132, (1, 256)),
        (5000, 4, (4, 1280)),
    ],
)
def test_the_plan_gives_each_processor_a_run_of_the_vocabulary(n_vocab, sm_count, want):
    blocks, chunk = plan(n_vocab, sm_count)
    assert (blocks, chunk) == want
    assert (blocks - 1) * chunk < n_vocab <= blocks * chunk


def test_a_vocabulary_has_at_most_256_blocks():
    assert plan(1 << 20, 1000) == (256, 4096)
    with pytest.raises(UsageError, match="n_vocab is 1048577"):
        plan((1 << 20) + 1, 132)


def test_the_path_is_part_of_the_key_and_the_values_are_not(device):
    sampler = sampler_of(device, 700)
    keys = []
    for corner in ({"top_k": 256}, {"temperature": 0.0, "top_k": 0}, {"top_k": 257}, {}):
        sampler.begin(SamplingParams(**{**OFF, **corner}), 0, [])
        keys.append(sampler.key)
    assert keys == [(False, False)] * 2 + [(True, False)] * 2
    sampler.begin(SamplingParams(), 0, [], n_logprobs=1)
    assert sampler.key == (False, True)


def test_every_kernel_of_the_file_is_run_here_and_listed(device):
    names = set(instances())
    if hasattr(device, "launched"):
        assert {name for stem, name in device.launched if stem == "sampling"} == names

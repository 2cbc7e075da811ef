"""The host sampler: the definition in minfer_cuda/sampling.py, corner by corner."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from minfer_cuda.errors import ModelFileError, NumericsError, UsageError
from minfer_cuda.sampling import (
    SamplingParams,
    adjust,
    candidates,
    draw,
    philox,
    sample,
    top_logprobs,
    uniform,
    window_counts,
)

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def params(**changed: object) -> SamplingParams:
    return SamplingParams(**{**OFF, **changed})  # type: ignore[arg-type]


def kept(logits: np.ndarray, **changed: object) -> list[int]:
    return candidates(logits, params(**changed))[0].tolist()


# ---- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, words):
    assert philox(counter, key) == words


def test_uniform_uses_all_64_bits_of_seed_and_index_and_stays_below_one():
    assert uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24
    values = {uniform(s, i) for s in (1, 1 << 32, 2**64 - 1) for i in (0, 1, 1 << 32)}
    assert len(values) == 9
    assert all(0 <= v < 1 for v in values)


# ---- greedy


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_temperature_zero_is_argmax_with_the_lowest_id_on_ties_whatever_u_is(temperature):
    logits = row(1, 3, 3, 2)
    for u in (0.0, 0.999):
        p = SamplingParams(temperature=temperature, top_p=0.9)
        assert sample(logits, p, [], (), u) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_reported(bad, temperature):
    with pytest.raises(NumericsError, match="NaN or .inf"):
        sample(row(1, bad, 2), params(temperature=temperature), [], (), 0.5)


@pytest.mark.filterwarnings("error")
def test_a_penalty_that_leaves_float32_never_draws_or_says_so():
    seen = [0, 0, 0, 0]
    assert sample(row(9, 1), params(frequency_penalty=1e38), seen, (), 0.5) == 1
    with pytest.raises(NumericsError, match="penalty"):
        sample(row(9, 1), params(frequency_penalty=-1e38), seen, (), 0.5)


def test_minus_infinity_means_never_and_all_of_them_is_an_error():
    assert sample(row(-math.inf, 0, -math.inf), params(), [], (), 0.9999) == 1
    with pytest.raises(NumericsError):
        sample(row(-math.inf, -math.inf), params(), [], (), 0.5)


# ---- filters


def test_candidates_descend_with_the_lowest_id_first_on_ties_and_one_zero():
    assert kept(row(0.0, 2, 1, -0.0, 2)) == [1, 4, 2, 0, 3]


@pytest.mark.parametrize(
    ("k", "ids"), [(0, [1, 3, 0, 2]), (1, [1]), (2, [1, 3]), (9, [1, 3, 0, 2])]
)
def test_top_k_keeps_exactly_k_and_zero_or_more_than_the_vocabulary_keeps_all(k, ids):
    assert kept(row(1, 5, 0, 5), top_k=k) == ids


def test_top_k_takes_the_lowest_ids_of_those_that_tie_at_its_threshold():
    assert kept(row(7, 7, 9, 7, 7), top_k=3) == [2, 0, 1]


def test_top_k_equals_a_full_sort_on_many_random_rows_with_ties():
    rng = np.random.default_rng(0)
    for _ in range(200):
        logits = rng.integers(0, 12, 50).astype(np.float32)
        k = int(rng.integers(1, 50))
        full = sorted(range(50), key=lambda i: (-logits[i], i))
        assert kept(logits, top_k=k) == full[:k]


@pytest.mark.parametrize(
    ("p", "n"),
    [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4), (1.5, 4)],
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_p(p, n):
    # four equal masses: the sums are exact quarters
    assert kept(row(3, 3, 3, 3), top_p=p) == list(range(n))


def test_top_p_measures_the_set_that_top_k_left_at_temperature_one():
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert kept(logits, top_p=0.6) == [0, 1]
    # 0.4 / 0.7 = 0.571 and both at top_k 2; temperature plays no part
    assert kept(logits, top_p=0.56, top_k=2) == [0]
    assert kept(logits, top_p=0.58, top_k=2, temperature=0.01) == [0, 1]


@pytest.mark.parametrize(("p", "n"), [(0.0, 4), (0.2, 3), (0.3, 2), (0.6, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_most_likely(p, n):
    logits = np.log(row(1.0, 0.5, 0.25, 0.125))
    assert kept(logits, min_p=p) == list(range(n))


def test_a_min_p_below_every_float32_keeps_all():
    assert kept(row(4, 1, -9), min_p=1e-300) == [0, 1, 2]


def test_min_p_of_one_keeps_all_that_tie_with_the_first():
    assert kept(row(2, 1, 2), min_p=1.0) == [0, 2]


def test_temperature_comes_after_the_filters():
    ids, masses = candidates(np.log(row(0.5, 0.25, 0.25)), params(temperature=0.5))
    share = masses / masses.sum()
    np.testing.assert_allclose(share, [4 / 6, 1 / 6, 1 / 6], atol=1e-6)  # squared, float32 logs
    assert ids.tolist() == [0, 1, 2]


def test_a_mass_is_a_multiple_of_two_to_the_minus_forty_of_the_first():
    masses = candidates(row(0, -1, -28, -29, -1000), params())[1]
    assert masses.tolist() == [1 << 40, round(math.exp(-1) * 2**40), 1, 0, 0]


# ---- the draw


def test_draw_follows_the_inverse_of_the_running_sum():
    ids, masses = np.array([5, 2, 9]), np.array([2, 1, 1], np.int64)
    drawn = [draw(ids, masses, u) for u in (0.0, 0.49, 0.5, 0.74, 0.75, 0.9999)]
    assert drawn == [5, 5, 2, 2, 9, 9]


def test_a_candidate_of_mass_zero_is_never_drawn():
    ids, masses = np.array([0, 1, 2]), np.array([4, 0, 0], np.int64)
    assert draw(ids, masses, 1 - 2.0**-24) == 0


def test_draws_follow_the_distribution():
    """Chi-square of 5,000 draws over 4 ids: 99.9 % quantile at 3 degrees of freedom is 16.27."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(p).astype(np.float32)
    counts = Counter(sample(logits, params(), [], (), uniform(7, i)) for i in range(5000))
    expected = p * 5000
    seen = np.array([counts[i] for i in range(4)])
    assert ((seen - expected) ** 2 / expected).sum() < 16.27


def test_the_same_seed_gives_the_same_ids_and_another_seed_does_not():
    logits = np.zeros(4, np.float32)

    def run(seed: int) -> list[int]:
        return [sample(logits, params(), [], (), uniform(seed, i)) for i in range(50)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(set(run(1))) == 4


# ---- bias and penalties


def test_logit_bias_raises_lowers_and_forbids():
    logits = row(1, 2, 3)
    greedy = {"temperature": 0.0}
    assert sample(logits, params(**greedy, logit_bias={0: 5.0}), [], (), 0) == 0
    assert sample(logits, params(**greedy, logit_bias={2: -math.inf}), [], (), 0) == 1


def test_the_window_is_the_last_n_of_prompt_and_output():
    history = [7, 8, 9, 9]
    assert window_counts(history, 2, (), 10) == {9: 2}
    assert window_counts(history, 0, (), 10) == {}
    assert window_counts(history, -1, (), 10) == {7: 1, 8: 1, 9: 2}
    assert window_counts(history, 64, (), 10) == {7: 1, 8: 1, 9: 2}


def test_exempt_and_impossible_ids_are_not_penalised_but_take_their_place():
    assert window_counts([3, 2, -1, 99], 3, {2}, 10) == {}


def test_repeat_penalty_divides_positive_and_multiplies_other_logits():
    out = adjust(row(2, -2, 0, 5), params(repeat_penalty=2.0), [0, 1, 1, 2], ())
    assert out.tolist() == [1, -4, 0, 5]


def test_repeat_comes_before_frequency_and_presence_and_counts_scale_frequency():
    p = params(repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    assert adjust(row(2, 8), p, [1, 1, 1], ()).tolist() == [2, 8 / 2 - (3 * 0.25 + 1.0)]


def test_neutral_penalties_return_the_logits_bit_for_bit():
    logits = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    assert adjust(logits, params(), list(range(50)), ()).tobytes() == logits.tobytes()


def test_sampling_does_not_change_its_input():
    logits = row(1, 2, 3)
    sample(logits, params(repeat_penalty=2.0, logit_bias={0: 1.0}), [1], (), 0.5)
    assert logits.tolist() == [1, 2, 3]


# ---- parameters


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e300},  # the sampler computes in float32
        {"temperature": "hot"},
        {"top_k": 2.5},
        {"top_k": -1},
        {"top_p": -0.5},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repeat_penalty": 0.0},
        {"repeat_penalty": 1e-300},
        {"repeat_penalty": math.nan},
        {"frequency_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"presence_penalty": -1e300},
        {"penalty_window": -2},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: 1e300}},
        {"logit_bias": {10: 1.0}},
        {"logit_bias": {-1: 1.0}},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused_with_the_value(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(UsageError, match=name) as error:
        SamplingParams(**bad).validate(n_vocab=10)
    if not isinstance(value, dict):
        assert str(value) in str(error.value)


def test_the_file_overrides_defaults_and_the_user_overrides_the_file():
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.name": "x"}
    p = SamplingParams.from_metadata(metadata, top_k=5, top_p=None)
    assert (p.temperature, p.top_k, p.top_p) == (0.7, 5, 0.95)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(UsageError, match="tempreature"):
        SamplingParams.from_metadata({}, tempreature=1.0)


def test_a_default_of_the_file_that_is_no_number_is_refused_by_key():
    with pytest.raises(ModelFileError, match="general.sampling.temp"):
        SamplingParams.from_metadata({"general.sampling.temp": "hot"})
    with pytest.raises(ModelFileError, match="general.sampling.top_k"):
        SamplingParams.from_metadata({"general.sampling.top_k": math.nan})


# ---- log probabilities


def test_logprobs_are_of_the_models_own_distribution_lowest_id_first_on_ties():
    logits = np.log(row(0.25, 0.5, 0.25))
    own, best = top_logprobs(logits, 2, 2)
    assert own == pytest.approx(math.log(0.25), abs=1e-6)
    assert [i for i, _ in best] == [1, 0]
    assert best[0][1] == pytest.approx(math.log(0.5), abs=1e-6)
    assert top_logprobs(logits, 1, 0)[1] == ()

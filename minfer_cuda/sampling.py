"""Sampling parameters and the host sampler, the oracle of the device's.

`sample` maps one row of logits to one id by the steps below. A device sampler that follows them
gives the same id: every step is integer arithmetic, an IEEE operation that is rounded once, or
an exponential in float64 whose last bits are then rounded away.

0. Every parameter is rounded to float32 first. A logit that is NaN or +inf is a NumericsError;
   -inf is allowed and means "never". -0 and +0 are the same logit. Where a mask is given (of a
   grammar), the logit of an id that it lacks is -inf, whatever the model, bias and penalties say.
1. Logit bias: l[id] = l[id] + bias, float32.
2. Penalties, for each distinct id of the window that is in range and not exempt, c its count in
   the window. The window is the last `penalty_window` ids of prompt and output together (exempt
   ids take their place in it; 0: none, -1: all). In float32, each operation rounded by itself
   (no fused multiply-add): l = l / repeat where l > 0, else l * repeat; then, if frequency or
   presence is not 0, l = l - (c * frequency + presence).
3. Temperature under 1e-6: the answer is the largest l, lowest id on ties. No random number, no
   filter.
4. Candidates in order: descending l, lowest id first on ties. top-k keeps the first k of them
   (0, or k >= V: all).
5. z = l - l_max, one float32 subtraction. A mass is the integer rint(exp(z) * 2^40), the
   exponential and product in float64, ties to even. It fits int64: V <= 2^22 masses of <= 2^40.
   So sums are exact in any order, and a candidate under 2^-41 of the first has mass 0.
6. top-p: of these candidates the shortest prefix whose sum of masses, as float64, is at least
   float64(p) * float64(sum of all their masses), but at least one. p >= 1: all.
7. min-p: of these, those with z >= ln(min_p), the logarithm taken in float64 on the host and
   rounded to float32. 0: all. The first candidate (z = 0) always stays.
8. Temperature: the masses of what is left become rint(exp(z / T) * 2^40), quotient in float64.
9. Draw: t = the integer part of u * float64(sum of masses); the answer is the first candidate
   whose running sum of masses exceeds t. Candidates of mass 0 are thus never drawn.

The u of draw n (n = 0 for the first token after the prompt) is `uniform(seed, n)`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from minfer_cuda.errors import ModelFileError, NumericsError, UsageError

MAX_SEED = 2**64 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
GREEDY_BELOW = 1e-6  # a temperature under this is argmax
MASS_ONE = float(1 << 40)  # the mass of the most likely candidate
NO_DRAW = (
    "no token can be drawn: after bias, penalties and mask a logit is NaN or +inf, or all are "
    "-inf: the weights may be damaged (minfer info --check), or a bias or penalty is too large"
)

REALS = (
    "temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip

# GGUF metadata that a model's author may set, and the field it is the default of
METADATA_FIELDS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
    "general.sampling.penalty_last_n": "penalty_window",
}


@dataclass(frozen=True)
class SamplingParams:
    """Order: logit bias -> penalties (repeat, then frequency and presence) -> top-k -> top-p ->
    min-p -> temperature -> draw. Neutral values switch a step off."""

    temperature: float = 0.8  # 0: argmax, lowest id on ties, no random number used
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # >= 1: off; 0 keeps one token
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0  # 1: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 64  # 0: off, -1: the whole history
    seed: int | None = None  # None: drawn, then reported
    logit_bias: dict[int, float] = field(default_factory=dict)  # -inf: never this id

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The defaults, then the file's `general.sampling.*`, then `overrides` that are not None.

        Raises UsageError for an unknown name in `overrides` or a value `validate` refuses.
        """
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(overrides) - names)
        if unknown:
            known = ", ".join(sorted(names))
            raise UsageError(f"unknown sampling option {', '.join(unknown)}: known are {known}")
        values: dict[str, Any] = {}
        for key, name in METADATA_FIELDS.items():
            if key in metadata:
                values[name] = _file_number(key, metadata[key], type(getattr(cls, name)))
        values.update({k: v for k, v in overrides.items() if v is not None})
        params = cls(**values)
        params.validate()
        return params

    def validate(self, n_vocab: int | None = None) -> None:
        """Raise UsageError for a value that means nothing; with `n_vocab` also for a bias on an
        id that does not exist."""
        self._check_kinds()
        for name in ("temperature", "top_p", "min_p"):
            v = getattr(self, name)
            _require(v >= 0 and _fits_float32(v), name, v, "a number >= 0")
        _require(self.min_p <= 1, "min_p", self.min_p, "in 0..1")
        v = self.repeat_penalty
        positive = _fits_float32(v) and np.float32(v) > 0
        _require(positive, "repeat_penalty", v, "a number > 0 (1 is off)")
        for name in ("frequency_penalty", "presence_penalty"):
            _require(_fits_float32(v := getattr(self, name)), name, v, "finite")
        _require(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 is off)")
        _require(
            self.penalty_window >= -1,
            "penalty_window",
            self.penalty_window,
            ">= -1 (0 is off, -1 is the whole history)",
        )
        if self.seed is not None:
            _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in 0..{MAX_SEED}")
        for token, bias in self.logit_bias.items():
            good = bias == -math.inf or _fits_float32(bias)
            _require(good, f"logit_bias of id {token}", bias, "a number or -inf")
            if n_vocab is not None:
                _require(0 <= token < n_vocab, "logit_bias id", token, f"in 0..{n_vocab - 1}")

    def _check_kinds(self) -> None:
        """Whole numbers and numbers where they belong: 2.5 tokens would fail at the first draw."""
        for name in ("top_k", "penalty_window", "seed"):
            v = getattr(self, name)
            good = isinstance(v, Integral) or (name == "seed" and v is None)
            _require(good, name, v, "a whole number")
        for name in REALS:
            _require(isinstance(v := getattr(self, name), Real), name, v, "a number")

    @property
    def greedy(self) -> bool:
        """Whether a draw is an argmax, without a random number."""
        return self.temperature < GREEDY_BELOW


def _file_number(key: str, value: object, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelFileError(f"{key} is {value!r}: must be a number")
    if not math.isfinite(value):
        raise ModelFileError(f"{key} is {value}: must be finite")
    return kind(value)


def _fits_float32(value: float) -> bool:
    """Whether `value` is finite in float32, in which the sampler computes."""
    return abs(value) <= MAX_FLOAT32


def _require(good: bool, name: str, value: object, what: str) -> None:
    if not good:
        raise UsageError(f"{name} is {value}: must be {what}")


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of four counter words and two key words (Salmon et al., SC11)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of draw `index`: the upper 24 bits of Philox's first word.

    The key is the seed's low and high 32 bits; the counter (index low, index high, 0, 0).
    """
    counter = (index & 0xFFFFFFFF, index >> 32, 0, 0)
    return (philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[0] >> 8) * 2.0**-24


def window_counts(
    history: Sequence[int], window: int, exempt: Collection[int], n_vocab: int
) -> dict[int, int]:
    """How often each id to penalise occurs in the last `window` ids of `history` (step 2)."""
    recent = history if window < 0 else history[max(0, len(history) - window) :]
    counts: dict[int, int] = {}
    for token in recent:
        if 0 <= token < n_vocab and token not in exempt:
            counts[token] = counts.get(token, 0) + 1
    return counts


def adjust(
    logits: np.ndarray, params: SamplingParams, history: Sequence[int], exempt: Collection[int]
) -> np.ndarray:
    """A copy of `logits` (V,) float32 after logit bias and penalties (steps 1 and 2)."""
    out = np.array(logits, np.float32)
    for token, bias in params.logit_bias.items():
        out[token] += np.float32(bias)
    repeat, frequency, presence = (
        np.float32(v)
        for v in (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
    )
    if repeat == 1 and frequency == 0 and presence == 0:
        return out
    counts = window_counts(history, params.penalty_window, exempt, out.size)
    ids = np.fromiter(counts.keys(), np.int64, len(counts))
    times = np.fromiter(counts.values(), np.float32, len(counts))
    chosen = out[ids]
    with np.errstate(over="ignore"):  # -inf is never drawn, +inf is refused by `sample`
        chosen = np.where(chosen > 0, chosen / repeat, chosen * repeat)
        if frequency != 0 or presence != 0:
            chosen = chosen - (times * frequency + presence)
    out[ids] = chosen
    return out


def mask_words(n_vocab: int) -> int:
    """32-bit words of a mask: the bit `id % 32`, lowest first, of word `id / 32` allows `id`."""
    return -(-n_vocab // 32)


def allowed(mask: np.ndarray, n_vocab: int) -> np.ndarray:
    """bool (V,): which ids a mask, uint32 (mask_words(V),), allows."""
    return np.unpackbits(mask.view(np.uint8), count=n_vocab, bitorder="little").view(bool)


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int64, in candidate order) and masses (int64) of what may be drawn: steps 4 to 8."""
    ids = _ordered(logits, params.top_k)
    z = logits[ids] - logits[ids[0]]
    top_p = np.float32(params.top_p)
    if top_p < 1:
        sums = np.cumsum(_masses(z, 1.0))
        enough = sums.astype(np.float64) >= np.float64(top_p) * np.float64(sums[-1])
        ids = ids[: int(np.argmax(enough)) + 1]
        z = z[: ids.size]
    if (low := np.float32(params.min_p)) > 0:
        # z descends, so this is a prefix too
        keep = int(np.count_nonzero(z >= np.float32(math.log(low))))
        ids, z = ids[:keep], z[:keep]
    return ids, _masses(z, float(np.float32(params.temperature)))


def _ordered(logits: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest logits (0: all), descending, lowest id first on ties."""
    if not 0 < k < logits.size:
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, logits.size - k)[logits.size - k]
    above = np.flatnonzero(logits > threshold)
    level = np.flatnonzero(logits == threshold)[: k - above.size]
    ids = np.concatenate([above, level])
    return ids[np.argsort(-logits[ids], kind="stable")]


def _masses(z: np.ndarray, temperature: float) -> np.ndarray:
    return np.rint(np.exp(z.astype(np.float64) / temperature) * MASS_ONE).astype(np.int64)


def draw(ids: np.ndarray, masses: np.ndarray, u: float) -> int:
    """The candidate that u in [0, 1) falls on (step 9)."""
    sums = np.cumsum(masses)
    target = int(u * float(sums[-1]))
    return int(ids[np.searchsorted(sums, target, side="right")])


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    history: Sequence[int],
    exempt: Collection[int],
    u: float,
    mask: np.ndarray | None = None,
) -> int:
    """The id drawn from `logits` (V,) float32; the module's docstring is the definition.

    `history` is the prompt and output so far, `exempt` the ids that are never penalised (end
    tokens), `u` in [0, 1) is not used when `params.greedy`; `mask` see `mask_words`. Raises
    NumericsError.
    """
    adjusted = adjust(logits, params, history, exempt)
    if mask is not None:
        adjusted[~allowed(mask, adjusted.size)] = -np.inf
    best = adjusted.max()
    if not np.isfinite(best):  # max propagates NaN
        raise NumericsError(NO_DRAW)
    if params.greedy:
        return int(adjusted.argmax())
    return draw(*candidates(adjusted, params), u)


def top_logprobs(
    logits: np.ndarray, token: int, n: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Natural log probability of `token`, and the n most likely (id, log probability).

    Of softmax(logits) as the model gave them: before mask, bias, penalties, filters, temperature;
    float64; lowest id first on ties.
    """
    best = float(logits.max())
    total = best + math.log(np.exp(logits.astype(np.float64) - best).sum())
    ids = _ordered(logits, n) if n > 0 else ()
    return float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in ids)

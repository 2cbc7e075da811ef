"""The next token, drawn on the device by the host sampler's definition. See cuda/sampling.cu."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from minfer_cuda.config import MAX_LOGPROBS
from minfer_cuda.errors import NumericsError, UsageError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect
from minfer_cuda.sampling import NO_DRAW, SamplingParams, mask_words, window_counts

MAX_TOP_K = 256  # of the two-launch path; more candidates, or all, take four launches
_CHUNK = 4096  # most logits of a block
_MAX_BLOCKS = 256  # kMaxLists of cuda/sampling.cu
_THREADS = 512
_BINS_BYTES = 2048 * (8 + 8 + 4 + 4)
_EXEMPT = -(2**30)  # a count that no number of occurrences makes positive

# cuda/state.cuh: StepState and DrawResult
STATE = np.dtype(
    [("token", "i4"), ("position", "i4"), ("draws", "u8"), ("flags", "u4"), ("n_history", "i4"),
     ("unused", "i4", 2)]
)  # fmt: skip
RESULT = np.dtype(
    [("token", "i4"), ("flags", "u4"), ("logprob", "f4"), ("n_logprobs", "i4"),
     ("ids", "i4", MAX_LOGPROBS), ("logprobs", "f4", MAX_LOGPROBS)]
)  # fmt: skip
# cuda/sampling.cuh: SamplerParams
_PARAMS = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_z", "f4"), ("repeat", "f4"),
     ("frequency", "f4"), ("presence", "f4"), ("top_k", "i4"), ("window", "i4"),
     ("has_penalty", "i4"), ("has_bias", "i4"), ("n_logprobs", "i4"), ("seed", "u8")]
)  # fmt: skip


class _DrawShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("n_vocab", "n_slots", "advance")]


@dataclass(frozen=True)
class Draw:
    """One result. `logprobs` are (id, natural log probability), most likely first."""

    token: int
    logprob: float | None
    logprobs: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, record: np.ndarray) -> Draw:
        """From the bytes of one slot of `Sampler.results`. Raises NumericsError."""
        result = np.asarray(record).view(RESULT)[0]
        if result["flags"]:
            raise NumericsError(NO_DRAW)
        n = int(result["n_logprobs"])
        pairs = zip(result["ids"][:n].tolist(), result["logprobs"][:n].tolist(), strict=True)
        return cls(int(result["token"]), float(result["logprob"]) if n else None, tuple(pairs))


def plan(n_vocab: int, sm_count: int) -> tuple[int, int]:
    """(blocks, logits of a block). 151,936 on 132 processors: 132 blocks of 1,152.

    Raises UsageError for a vocabulary of more than 256 blocks of 4,096.
    """
    if n_vocab > _MAX_BLOCKS * _CHUNK:
        raise UsageError(f"n_vocab is {n_vocab}: the sampler takes up to {_MAX_BLOCKS * _CHUNK}")
    share = -(-n_vocab // min(sm_count, _MAX_BLOCKS))
    chunk = min(_CHUNK, max(256, -(-share // 32) * 32))
    return -(-n_vocab // chunk), chunk


def instances(types: Sequence[str] = ()) -> list[str]:
    """Every kernel of sampling.cu."""
    lists = [_local_top_k(*kind) for kind in ((False, False), (False, True), (True, False))]
    adjusts = [_adjust_logits(masked) for masked in (False, True)]
    names = ("fill_bins", "scatter_bins", "draw_top_k", "draw_bins", "logprobs")
    return [*lists, *adjusts, *(f"{name}<{_THREADS}>" for name in names)]


def _local_top_k(raw: bool, masked: bool) -> str:
    return f"local_top_k<{_word(raw)}, {_word(masked)}, {_THREADS}>"


def _adjust_logits(masked: bool) -> str:
    return f"adjust_logits<{_word(masked)}, {_THREADS}>"


def _word(flag: bool) -> str:
    return "true" if flag else "false"


class Sampler:
    """The sampler's buffers on a device, and its launches.

    `state` is the StepState as int32 (8,): `token` (1,) and `position` (1,) are views of it that
    the kernels of a step read. `results` (n_slots, RESULT.itemsize) uint8: draw n is written to
    slot n % n_slots, draws counted from `begin`.
    """

    RESULT_BYTES = RESULT.itemsize

    def __init__(
        self,
        device: Device,
        n_vocab: int,
        max_history: int,
        n_slots: int = 8,
        results: DeviceArray | None = None,
    ):
        """`max_history`: most ids of prompt and output together (n_ctx + 1). `results`: where
        draws are written, (n_slots, RESULT_BYTES) uint8; made here when it is not given."""
        self.n_vocab = n_vocab
        self.n_slots = n_slots if results is None else results.shape[0]
        self.max_history = max_history
        self._device = device
        self._blocks, self._chunk = plan(n_vocab, device.sm_count)
        self.state = device.zeros(STATE.itemsize // 4, np.int32)
        self.token, self.position = self.state[0:1], self.state[1:2]
        if results is None:
            results = device.zeros((n_slots, RESULT.itemsize), np.uint8)
        self.results = results
        self._params = device.zeros(_PARAMS.itemsize, np.uint8)
        self._bias = device.zeros(n_vocab, np.float32)
        self._mask = device.zeros(mask_words(n_vocab), np.uint32)
        self._counts = device.zeros(n_vocab, np.int32)
        self._history = device.zeros(max_history, np.int32)
        self._lists = device.empty(self._blocks * MAX_TOP_K, np.uint64)
        self._raw_sums = device.empty((self._blocks, 2), np.float64)
        self._keys = device.empty(n_vocab, np.uint32)
        self._bests = device.empty(self._blocks, np.uint32)
        self._bins = device.empty(_BINS_BYTES // 8, np.uint64)
        self._binned = device.empty(n_vocab, np.uint64)
        self.begin(SamplingParams(), 0, ())

    def begin(
        self,
        params: SamplingParams,
        seed: int,
        history: Sequence[int],
        exempt: Collection[int] = (),
        n_logprobs: int = 0,
    ) -> None:
        """Load parameters and penalty window (enqueued); the next draw is draw 0 of `seed`.

        `token` and `position` stay. Raises UsageError for a value that `validate` refuses and for
        n_logprobs outside 0..MAX_LOGPROBS.
        """
        params.validate(self.n_vocab)
        if not 0 <= n_logprobs <= MAX_LOGPROBS:
            raise UsageError(f"n_logprobs is {n_logprobs}: must be in 0..{MAX_LOGPROBS}")
        window = params.penalty_window if params.penalty_window <= self.max_history else -1
        neutral = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        penalty = window != 0 and neutral != (1.0, 0.0, 0.0)
        # the path decides which kernels run, so it is part of a graph's key; the rest is data
        self._full = not params.greedy and not 0 < params.top_k <= MAX_TOP_K
        self._n_logprobs = n_logprobs

        words = np.zeros(1, _PARAMS)
        words["temperature"], words["top_p"] = params.temperature, params.top_p
        low = np.float32(params.min_p)
        words["min_z"] = math.log(low) if low > 0 else -math.inf
        words["repeat"], words["frequency"], words["presence"] = neutral
        words["top_k"] = 1 if params.greedy else min(params.top_k, self.n_vocab)
        words["window"], words["has_penalty"] = window, penalty
        words["has_bias"], words["n_logprobs"] = bool(params.logit_bias), n_logprobs
        words["seed"] = seed
        self._device.upload(words.view(np.uint8), into=self._params)
        if params.logit_bias:
            bias = np.zeros(self.n_vocab, np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self._device.upload(bias, into=self._bias)
        if penalty:
            self._load_history(history, window, exempt)
        state = np.zeros(1, STATE)
        state["n_history"] = len(history)
        self._device.upload(state.view(np.int32)[2:], into=self.state[2:])

    def _load_history(self, history: Sequence[int], window: int, exempt: Collection[int]) -> None:
        counts = np.zeros(self.n_vocab, np.int32)
        seen = window_counts(history, window, exempt, self.n_vocab)
        counts[list(seen)] = list(seen.values())
        counts[[token for token in exempt if 0 <= token < self.n_vocab]] = _EXEMPT
        self._device.upload(counts, into=self._counts)
        if window > 0:  # id number n lies at n % window
            ring = np.full(self.max_history, -1, np.int32)
            first = max(0, len(history) - window)
            ring[np.arange(first, len(history)) % window] = history[first:]
            self._device.upload(ring, into=self._history)

    @property
    def key(self) -> tuple[bool, bool]:
        """Which launches `sample` makes: what a captured graph of it depends on."""
        return self._full, self._n_logprobs > 0

    def set_mask(self, mask: np.ndarray) -> None:
        """Load (enqueued) what draws with `masked` may give: uint32 (mask_words(V),), as the host
        sampler takes it."""
        self._device.upload(mask, into=self._mask)

    def sample(self, logits: DeviceArray, advance: int = 1, masked: bool = False) -> None:
        """Enqueue one draw from `logits` (V,) float32: `token`, a slot of `results`, the window and
        the counters are updated, and `position` grows by `advance`. NaN or +inf in the logits, or
        no finite one among those allowed, sets a flag in the result; the token is then 0."""
        expect("sample", "logits", logits, (self.n_vocab,), np.float32)
        shape = _DrawShape(self.n_vocab, self.n_slots, advance)
        tail = (self._params, self.state, self._counts, self._history, self.results, shape)
        if self._full:
            self._bin(logits, masked)
            self._run(
                f"draw_bins<{_THREADS}>",
                1,
                self._bins,
                self._binned,
                self._bests,
                self._blocks,
                *tail,
            )
        else:
            self._list(logits, _local_top_k(False, masked))
            self._run(f"draw_top_k<{_THREADS}>", 1, self._lists, self._blocks, *tail)
        if self._n_logprobs:
            self._list(logits, _local_top_k(True, False))
            self._run(
                f"logprobs<{_THREADS}>", 1, logits, self._lists, self._raw_sums, self._blocks,
                self._params, self.state, self.results, shape,
            )  # fmt: skip

    def _list(self, logits: DeviceArray, name: str) -> None:
        self._run(
            name, self._blocks, logits, self._params, self._bias, self._counts, self._mask,
            self._lists, self._raw_sums, self.n_vocab, self._chunk,
        )  # fmt: skip

    def _bin(self, logits: DeviceArray, masked: bool) -> None:
        ends = (self.n_vocab, self._chunk)
        keys = (self._keys, self._bests)
        self._run(
            _adjust_logits(masked), self._blocks, logits, self._params, self._bias, self._counts,
            self._mask, *keys, self._bins, *ends,
        )  # fmt: skip
        self._run(f"fill_bins<{_THREADS}>", self._blocks, *keys, self._params, self._bins, *ends)
        self._run(
            f"scatter_bins<{_THREADS}>", self._blocks, *keys, self._params, self._bins,
            self._binned, *ends,
        )  # fmt: skip

    def _run(self, name: str, grid: int, *args: DeviceArray | int | ctypes.Structure) -> None:
        self._device.kernel("sampling", name)(grid, _THREADS, *args)

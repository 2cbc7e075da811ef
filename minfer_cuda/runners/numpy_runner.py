"""The CPU path: one step at a time, in float32 NumPy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import LOADING, Progress, Token, check_rows, check_sizes
from minfer_cuda.errors import ContextFullError, NumericsError, OutOfMemoryError, UsageError
from minfer_cuda.gguf import GGUFFile, TensorInfo
from minfer_cuda.host_memory import available_bytes
from minfer_cuda.kv_cache import kv_dtype
from minfer_cuda.models.qwen2 import Qwen2, Tap
from minfer_cuda.ops.numpy_ops import Matrix, NumpyOps, PackedMatrix
from minfer_cuda.sampling import SamplingParams, sample, top_logprobs, uniform
from minfer_cuda.weights import Rows, load_weights

# share of the available memory that float32 weights may take
RESIDENT_SHARE = 0.6


class NumpyRunner:
    """`Runner` on the CPU. Steps are computed when `read` or a later call needs them, so that a
    generation that ends does not compute the step it was ahead by."""

    capture_seconds = 0.0

    def __init__(
        self,
        file: GGUFFile,
        config: Qwen2Config,
        n_ctx: int,
        kv_type: str = "f16",
        n_batch: int = 2048,
        progress: Progress | None = None,
        notify: Callable[[str], None] | None = None,
    ):
        """`progress` is called as the file's weights are read, `notify` with what the user should
        hear about them."""
        kv_values = kv_dtype(kv_type)
        check_sizes(n_ctx, n_batch)
        self.n_ctx = n_ctx
        self.n_batch = min(n_batch, n_ctx)
        self.kv_type = kv_type
        self._config = config
        needed, room = resident_bytes(file), available_bytes() * RESIDENT_SHARE
        self._resident = needed <= room
        if notify and not self._resident:
            notify(
                f"float32 weights would take {needed / 2**20:,.0f} MiB, and {room / 2**20:,.0f} "
                f"MiB may be used: they are dequantised at each use, which is slow"
            )
        loading = progress and partial(progress, LOADING)
        weights = load_weights(file, config, self._weight, progress=loading, notice=notify)
        self._weight_bytes = sum(info.nbytes for info in file.tensors.values())
        self.model = Qwen2(config, weights)
        self.ops = _ops(config, self.n_ctx, kv_values)
        self._logits = np.empty((0, config.n_vocab), np.float32)
        self._pending: deque[Callable[[], None]] = deque()  # forwards and draws put off
        self._drawn: deque[Token] = deque()
        self.begin(SamplingParams(temperature=0.0), 0, (), frozenset())

    def _weight(self, info: TensorInfo, rows: Rows) -> Matrix:
        """A vector as float32; a matrix dequantised where there is room, else left in the file."""
        if len(info.shape) == 1:
            return info.quant.dequantize(rows(0, 1)).reshape(info.shape)
        n, k = info.shape
        packed = PackedMatrix(rows, info.quant, (n, k))
        rows_only = info.name == "token_embd.weight" and not self._config.tied_embeddings
        return packed.dense() if self._resident and not rows_only else packed

    def describe(self) -> str:
        """One line: device, how the weights are held, the cache, bytes."""
        held = "float32 in memory" if self._resident else "dequantised at each use (slow)"
        cache = self.ops.cache.nbytes / 2**20
        return (
            f"CPU (NumPy): weights {self._weight_bytes / 2**20:,.0f} MiB in the file, {held}; "
            f"KV cache {self.kv_type}, {self.n_ctx} positions, {cache:,.0f} MiB"
        )

    def prefill(self, ids: Sequence[int], start: int, n_out: int = 1) -> None:
        check_rows(len(ids), n_out, self.n_batch)
        self._catch_up()
        self.forward(ids, start, n_out)

    def forward(self, ids: Sequence[int], start: int, n_out: int, tap: Tap | None = None) -> None:
        """One pass over `ids` at positions start, start + 1, ..., keeping the last n_out rows'
        logits; `tap` sees the values of `Qwen2.forward`. Raises NumericsError where a logit is not
        finite; ContextFullError and UsageError before anything is written."""
        self.ops.set_step(ids, range(start, start + len(ids)))
        self._logits = self.model.forward(self.ops, n_out, tap)
        if not np.isfinite(self._logits).all():
            raise NumericsError(
                f"logits at position {start + len(ids) - 1} are not finite: the weights may be "
                f"damaged (minfer info --check)"
            )

    def logits(self, n_out: int = 1) -> np.ndarray:
        self._compute_pending()
        if not 1 <= n_out <= len(self._logits):
            raise UsageError(f"{n_out} rows of logits asked for, {len(self._logits)} kept")
        return np.array(self._logits[len(self._logits) - n_out :])

    def begin(
        self,
        params: SamplingParams,
        seed: int,
        history: Sequence[int],
        exempt: frozenset[int],
        n_logprobs: int = 0,
    ) -> None:
        self._catch_up()
        self._params = params
        self._seed = seed
        self._history = list(history)
        self._exempt = exempt
        self._n_logprobs = n_logprobs
        self._n_drawn = 0

    def sample(self, mask: np.ndarray | None = None) -> None:
        self._pending.append(lambda: self._draw(mask))

    def feed(self, position: int) -> None:
        if not 0 <= position < self.n_ctx:
            raise ContextFullError(position + 1, self.n_ctx)
        self._pending.append(lambda: self.forward([self._history[-1]], position, 1))

    def step(self, position: int) -> None:
        self.feed(position)
        self.sample()

    def read(self) -> Token:
        while not self._drawn:
            if not self._pending:
                raise UsageError("read without a sample or step before it")
            self._compute_next()
        return self._drawn.popleft()

    def close(self) -> None:
        self._pending.clear()
        self._drawn.clear()
        del self.model, self.ops, self._logits

    def _catch_up(self) -> None:
        """Compute what was put off, and forget draws not read."""
        self._compute_pending()
        self._drawn.clear()

    def _compute_pending(self) -> None:
        while self._pending:
            self._compute_next()

    def _compute_next(self) -> None:
        """The oldest forward or draw; an error drops everything that waits."""
        work = self._pending.popleft()
        try:
            work()
        except BaseException:
            self._pending.clear()
            raise

    def _draw(self, mask: np.ndarray | None) -> None:
        logits = self._logits[-1]
        u = 0.0 if self._params.greedy else uniform(self._seed, self._n_drawn)
        token = sample(logits, self._params, self._history, self._exempt, u, mask)
        n = self._n_logprobs
        self._drawn.append(Token(token, *(top_logprobs(logits, token, n) if n else ())))
        self._history.append(token)
        self._n_drawn += 1


def resident_bytes(file: GGUFFile) -> int:
    """Bytes of the matrices in float32, without an embedding table that only gives rows."""
    untied = "output.weight" in file.tensors
    return sum(
        4 * info.shape[0] * info.shape[1]
        for info in file.tensors.values()
        if len(info.shape) == 2 and not (untied and info.name == "token_embd.weight")
    )


def _ops(config: Qwen2Config, n_ctx: int, kv_dtype: type) -> NumpyOps:
    try:
        return NumpyOps(config, n_ctx, kv_dtype)
    except MemoryError:
        size = np.dtype(kv_dtype).itemsize * 2 * config.n_layers * n_ctx * config.n_kv_heads
        raise OutOfMemoryError(
            f"the KV cache of {n_ctx} positions needs {size * config.head_dim / 2**20:,.0f} MiB: "
            f"lower --n-ctx or take --kv-type f16"
        ) from None

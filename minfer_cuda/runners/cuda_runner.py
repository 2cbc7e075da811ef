"""The GPU path: buffers, weights and cache on the device; a decode step is one graph launch."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import COMPILING, LOADING, Progress, Token, check_rows, check_sizes
from minfer_cuda.errors import ContextFullError, NumericsError, OutOfMemoryError, UsageError
from minfer_cuda.gguf import GGUFFile, TensorInfo
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.layouts import Matrix, ceil_div, matrix_bytes
from minfer_cuda.kernels.matmul_f16 import instances_of, with_one_peak, with_peak
from minfer_cuda.kernels.read import read_bandwidth
from minfer_cuda.kernels.repack import repack
from minfer_cuda.kernels.sampling import Draw, Sampler
from minfer_cuda.kv_cache import KVCache, kv_bytes
from minfer_cuda.models.qwen2 import Qwen2, Tap
from minfer_cuda.ops import ModelWeights
from minfer_cuda.ops.cuda_ops import CudaOps, Step
from minfer_cuda.prefill import VARIABLE, most_float32_rows, most_int8_rows
from minfer_cuda.quants import QuantType
from minfer_cuda.rope import rope_tables
from minfer_cuda.sampling import SamplingParams
from minfer_cuda.weights import Rows, load_weights, model_tensors
from minfer_cuda.workspace import Sizes, Workspace, workspace_bytes

MIB = 1 << 20
PIECE = 16 * MIB  # of a tensor, read from the file at once
SLOTS = 8  # draws the host may leave unread
EXACT_ROWS = 16  # tokens of a prompt up to which each length has a graph of its own
RESERVE = 96 * MIB  # left free for the sampler, graphs and the loaded kernels


class Steps(Protocol):
    """How a step is run: `graph.StepGraphs`, or eagerly."""

    capture_seconds: float  # what captures took until now

    def run(self, key: Hashable, step: Callable[[], None]) -> None: ...


class EagerSteps:
    """Steps launched as they come."""

    capture_seconds = 0.0

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        step()


def graph_rows(count: int) -> int:
    """The rows that a prompt of `count` tokens is run with, so that few graphs serve every length:
    multiples of a sixteenth of the next power of two, at least of 8. What comes after the prompt
    is hidden from it by the causal mask, and overwritten by what is said next."""
    if count <= EXACT_ROWS:
        return count
    step = max(8, 1 << (count - 1).bit_length() >> 4)
    return ceil_div(count, step) * step


class CudaRunner:
    """`Runner` on a device. Every call enqueues; `logits` and `read` wait."""

    def __init__(
        self,
        device: Any,
        file: GGUFFile,
        config: Qwen2Config,
        n_ctx: int,
        kv_type: str = "f16",
        n_batch: int = 2048,
        progress: Progress | None = None,
        notify: Callable[[str], None] | None = None,
        steps: Steps | None = None,
    ):
        """`device` a CudaDevice (or one that runs kernels elsewhere); `steps` defaults to captured
        graphs, or eager launches with MINFER_NO_GRAPH=1. Raises OutOfMemoryError, before weights
        are loaded, where the device has too little memory."""
        check_sizes(n_ctx, n_batch)
        self.n_ctx = n_ctx
        self.n_batch = min(n_batch, n_ctx)
        self.config = config
        self._device: Device = device
        self.kv_type = kv_type
        self._sizes = _sizes(file, config, device, self.n_batch, n_ctx)
        self._check_memory(file, device)
        device.compile(self._slow_kernels(file), progress and partial(progress, COMPILING))
        loading = progress and partial(progress, LOADING)
        self._weights = load_weights(
            file, config, self._upload, cuda=True, progress=loading, notice=notify
        )
        device.synchronize()
        self._prepare(config, n_ctx, kv_type)
        self._steps = steps if steps is not None else _graphs(device)
        self.begin(SamplingParams(temperature=0.0), 0, (), frozenset())

    def _slow_kernels(self, file: GGUFFile) -> list[tuple[str, str]]:
        """What compiles for seconds each, better on all cores at once than when first used: the
        blocks' products of long prompts. Of the head few rows are asked for."""
        blocks = [info for info in _matrices(file, self.config) if info.name.startswith("blk.")]
        # loading refuses types without kernels by name
        types = {info.quant for info in blocks if info.quant.cuda_name is not None}
        kernels = [instances_of(self._device, q) for q in types if self._sizes.reads_f16(q)]
        return sorted(set().union(*kernels))

    def _upload(self, info: TensorInfo, read: Rows) -> DeviceArray | Matrix:
        if len(info.shape) == 1:
            return self._device.upload(read(0, 1).reshape(-1).view(np.float32))
        rows, cols = info.shape
        raw = self._device.empty(info.nbytes, np.uint8)
        step = max(1, PIECE // info.row_bytes)
        for start in range(0, rows, step):  # host memory holds no more than one piece
            stop = min(start + step, rows)
            into = raw[start * info.row_bytes : stop * info.row_bytes]
            self._device.upload(read(start, stop).reshape(-1), into=into)
        if info.quant.block_size == 1:
            matrix = Matrix(info.quant, rows, cols, raw)
        else:
            matrix = repack(self._device, info.quant, raw, rows, cols)
        return with_peak(self._device, matrix) if self._sizes.reads_f16(info.quant) else matrix

    def _prepare(self, config: Qwen2Config, n_ctx: int, kv_type: str) -> None:
        device = self._device
        weights, biases = _with_joined_qkv(device, self._weights)
        table = np.stack(rope_tables(config, n_ctx), axis=-1)
        self._buffers = Workspace(device, config, self._sizes)
        self.cache = KVCache(device, config, n_ctx, kv_type)
        self.ops = CudaOps(
            device, config, self._buffers, self.cache, device.upload(table), biases,
            fuse_qkv=os.environ.get("MINFER_NO_FUSE_QKV") != "1",
            fuse_ffn=os.environ.get("MINFER_NO_FUSE_FFN") != "1",
        )  # fmt: skip
        self.model = Qwen2(config, weights)
        self._draws, results = device.pinned((SLOTS, Sampler.RESULT_BYTES), np.uint8)
        self.sampler = Sampler(device, config.n_vocab, n_ctx + 1, results=results)
        self._logits: DeviceArray | None = None
        self._one_row: DeviceArray = None  # where every forward for one row leaves it
        self._next_position = -1  # what the device's state holds, once steps run
        self._fed = False  # whether `feed` has run since the last draw
        self._unread: deque[tuple[int, Any]] = deque()  # draw number, its event

    def memory(self) -> dict[str, int]:
        """Bytes by purpose: what `describe` sums up."""
        named = [self._weights.token_embd, self._weights.output]
        named += [getattr(w, f) for w in self._weights.layers for f in w.__dataclass_fields__]
        weights = {id(w): (w.data if isinstance(w, Matrix) else w).nbytes for w in named}
        return {
            "weights": sum(weights.values()),
            "KV cache": self.cache.data.nbytes,
            "workspace": workspace_bytes(self.config, self._sizes),
        }

    def describe(self) -> str:
        """One line: device, bytes on it by purpose, cache type, and what serves prompts."""
        s = self._sizes
        prompts = "float32" if s.q8_rows == 0 else "int8"
        if s.f16 and s.rows > s.q8_rows:
            prompts = f"f16 above {s.q8_rows} tokens" if s.q8_rows > 1 else "f16"
        elif s.f16:
            prompts += ", F16 and BF16 matrices f16"
        parts = ", ".join(f"{name} {n / MIB:,.0f} MiB" for name, n in self.memory().items())
        return (
            f"{self._device.name} (sm_{self._device.arch}): {parts}; "
            f"{self.n_ctx} positions in {self.kv_type}; prompts {prompts}"
        )

    @property
    def capture_seconds(self) -> float:
        return self._steps.capture_seconds

    def prefill(self, ids: Sequence[int], start: int, n_out: int = 1) -> None:
        self.forward(ids, start, n_out)
        self._next_position, self._fed = -1, False

    def forward(self, ids: Sequence[int], start: int, n_out: int, tap: Tap | None = None) -> None:
        """One pass over `ids` at positions start, start + 1, ..., keeping the last n_out rows'
        logits. Raises ContextFullError and UsageError before anything is written."""
        count = len(ids)
        check_rows(count, n_out, self.n_batch)
        if not 0 <= start <= self.n_ctx - count:
            raise ContextFullError(start + count, self.n_ctx)
        host = np.asarray(ids, np.int32)
        if host.min() < 0 or host.max() >= self.config.n_vocab:
            raise UsageError(f"a token id is not in 0..{self.config.n_vocab - 1}")
        rows = min(graph_rows(count), self.n_batch)
        replayed = tap is None and n_out == 1 and rows <= self.n_ctx - start
        if replayed:
            host = np.pad(host, (0, rows - count), mode="edge")
        tokens, place = self._buffers["tokens"][: len(host)], self._buffers["place"]
        self._device.upload(host, into=tokens)
        self._device.upload(np.array([start, count - 1], np.int32), into=place)
        if replayed:
            step = Step(tokens, place[:1], place[1:] if rows > EXACT_ROWS else None)
            key = ("prefill", rows, self.ops.fuse_qkv, self.ops.fuse_ffn)
            self._steps.run(key, lambda: self._forward(step, 1))
            self._logits = self._one_row
        else:
            self._forward(Step(tokens, place[:1]), n_out, tap)

    def _forward(self, step: Step, n_out: int, tap: Tap | None = None) -> None:
        self.ops.set_step(step)
        self._logits = self.model.forward(self.ops, n_out, tap)
        if n_out == 1:
            self._one_row = self._logits

    def logits(self, n_out: int = 1) -> np.ndarray:
        if self._logits is None or not 1 <= n_out <= len(self._logits):
            kept = 0 if self._logits is None else len(self._logits)
            raise UsageError(f"{n_out} rows of logits asked for, {kept} kept")
        rows = self._device.download(self._logits[len(self._logits) - n_out :])
        if not np.isfinite(rows).all():
            raise NumericsError(
                "logits are not finite: the weights may be damaged (minfer info --check)"
            )
        return rows

    def begin(
        self,
        params: SamplingParams,
        seed: int,
        history: Sequence[int],
        exempt: frozenset[int],
        n_logprobs: int = 0,
    ) -> None:
        self._device.synchronize()  # nothing may still write the draws that are forgotten
        self._unread.clear()
        self._drawn = 0
        self.sampler.begin(params, seed, history, exempt, n_logprobs)

    def sample(self, mask: np.ndarray | None = None) -> None:
        if self._logits is None:
            raise UsageError("sample without a prefill before it")
        masked = mask is not None
        if mask is not None:
            self.sampler.set_mask(mask)
        if self._fed:
            key = ("draw", masked, *self.sampler.key)
            self._steps.run(key, lambda: self._draw(masked))
            self._next_position, self._fed = self._next_position + 1, False
        else:
            self.sampler.sample(self._logits[-1], advance=0, masked=masked)
        self._push()

    def feed(self, position: int) -> None:
        self._enter(position)
        self._steps.run(("feed", self.ops.fuse_qkv, self.ops.fuse_ffn), self._feed)
        self._logits = self._one_row  # a replay runs none of our lines
        self._fed = True

    def step(self, position: int) -> None:
        self._enter(position)
        key = ("decode", self.ops.fuse_qkv, self.ops.fuse_ffn, *self.sampler.key)
        self._steps.run(key, self._decode)
        self._logits = self._one_row
        self._next_position, self._fed = position + 1, False
        self._push()

    def _enter(self, position: int) -> None:
        """See to it that the device's state holds `position`."""
        if not 0 <= position < self.n_ctx:
            raise ContextFullError(position + 1, self.n_ctx)
        if position != self._next_position:  # the first step after a prefill
            self._device.upload(np.array([position], np.int32), into=self.sampler.position)
            self._next_position = position

    # what graphs are captured from

    def _decode(self) -> None:
        self._feed()
        self._draw(masked=False)

    def _feed(self) -> None:
        self._forward(Step(self.sampler.token, self.sampler.position), 1)

    def _draw(self, masked: bool) -> None:
        self.sampler.sample(self._one_row[-1], advance=1, masked=masked)

    def _push(self) -> None:
        if len(self._unread) == SLOTS:
            raise UsageError(f"{SLOTS} draws are waiting: read before the next step")
        self._unread.append((self._drawn, self._device.record()))
        self._drawn += 1

    def read(self) -> Token:
        if not self._unread:
            raise UsageError("read without a sample or step before it")
        number, event = self._unread.popleft()
        self._device.wait(event)
        draw = Draw.of(self._draws[number % SLOTS])
        return Token(draw.token, draw.logprob, draw.logprobs)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, steps are launched kernel by kernel, without graphs."""
        steps, self._steps = self._steps, EagerSteps()
        try:
            yield
        finally:
            self._steps = steps

    def read_bandwidth(self) -> float:
        """Bytes per second that the device reads of its memory, measured now."""
        return read_bandwidth(self._device)

    def close(self) -> None:
        """Wait for what runs, then free every buffer, also those of a device that was lost."""
        try:
            self._device.synchronize()
        finally:
            self._unread.clear()
            for name in (
                "_steps",
                "model",
                "ops",
                "cache",
                "sampler",
                "_weights",
                "_buffers",
                "_logits",
            ):
                delattr(self, name)

    def _check_memory(self, file: GGUFFile, device: Any) -> None:
        """Refuse a model that cannot fit, saying what would."""
        tensors = [file.tensors[name] for name in model_tensors(self.config, file)]
        weights = sum(_device_bytes(info) for info in tensors)
        staging = max(info.nbytes for info in tensors)
        fixed = weights + RESERVE + workspace_bytes(self.config, self._sizes)
        cache = kv_bytes(self.config, self.n_ctx, self.kv_type)
        needed, free = max(fixed + cache, weights + staging), device.free_bytes
        if needed <= free:
            return
        each = kv_bytes(self.config, 1, self.kv_type)
        fits = min(self.config.n_ctx_train, (free - fixed) // each)
        hint = f"--n-ctx {fits} would fit" if fits > 0 else "the weights alone do not fit"
        raise OutOfMemoryError(
            f"{device.name}: {needed / MIB:,.0f} MiB needed (weights {weights / MIB:,.0f}, "
            f"KV cache {cache / MIB:,.0f} for {self.n_ctx} positions), {free / MIB:,.0f} MiB free: "
            f"{hint}"
        )


def _matrices(file: GGUFFile, config: Qwen2Config) -> list[TensorInfo]:
    """The tensors that products read: all matrices but a table that only gives rows."""
    names = [name for name in model_tensors(config, file) if len(file.tensors[name].shape) == 2]
    if not config.tied_embeddings:
        names.remove("token_embd.weight")
    return [file.tensors[name] for name in names]


def _sizes(file: GGUFFile, config: Qwen2Config, device: Device, rows: int, context: int) -> Sizes:
    int8_rows = most_int8_rows(device.arch, os.environ.get(VARIABLE))
    types = {info.quant for info in _matrices(file, config)}
    floats = {quant for quant in types if quant.block_size == 1}

    def within(most: int | None) -> int:
        return rows if most is None else min(rows, most)

    float_rows = [within(most_float32_rows(device.arch, quant)) for quant in floats]
    q8_rows = [within(int8_rows)] if types - floats else []

    def quant_of(layer: int, name: str) -> QuantType:
        return file.tensors[f"blk.{layer}.{name}.weight"].quant

    layers = range(config.n_layers)
    unlike = any(quant_of(i, "ffn_gate") != quant_of(i, "ffn_up") for i in layers)
    return Sizes(
        rows=rows,
        context=context,
        float_rows=max(float_rows, default=0),
        q8_rows=max(q8_rows, default=0),
        f16_rows=min(float_rows + q8_rows) + 1,
        unlike_ffn=unlike,
        sm_count=device.sm_count,
    )


def _device_bytes(info: TensorInfo) -> int:
    if len(info.shape) == 1:
        return 4 * info.shape[0]
    return matrix_bytes(info.quant, *info.shape)


def _with_joined_qkv(
    device: Device, weights: ModelWeights
) -> tuple[ModelWeights, list[DeviceArray]]:
    """The biases of q, k, v of a layer in one array, for the kernel that adds them at once; the
    layer's own are parts of it. Neighbours of one type get one peak, for the product of both."""
    layers, joined = [], []
    for w in weights.layers:
        w = replace(w, **_with_one_peak(device, {"q": w.q, "k": w.k, "v": w.v}))
        host = [device.download(bias) for bias in (w.q_bias, w.k_bias, w.v_bias)]
        bias = device.upload(np.concatenate(host))
        q, k = len(host[0]), len(host[0]) + len(host[1])
        layers.append(replace(w, q_bias=bias[:q], k_bias=bias[q:k], v_bias=bias[k:]))
        joined.append(bias)
    return replace(weights, layers=tuple(layers)), joined


def _with_one_peak(device: Device, named: dict[str, Matrix]) -> dict[str, Matrix]:
    result: dict[str, Matrix] = {}
    for _, group in itertools.groupby(named.items(), key=lambda item: item[1].quant):
        names, matrices = zip(*group, strict=True)
        joined = all(w.peak is not None for w in matrices)
        if joined:
            matrices = with_one_peak(device, matrices)
        result.update(zip(names, matrices, strict=True))
    return result


def _graphs(device: Any) -> Steps:
    from minfer_cuda.graph import StepGraphs

    return StepGraphs(device, enabled=os.environ.get("MINFER_NO_GRAPH") != "1")

"""From a file's tensors to `ModelWeights`: all is checked first, then uploaded in file order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import ModelFileError, UnsupportedModelError
from minfer_cuda.gguf import GGUFFile, TensorInfo
from minfer_cuda.ops import LayerWeights, ModelWeights
from minfer_cuda.quants import QUANT_TYPES

W = TypeVar("W")
Rows = Callable[[int, int], np.ndarray]  # reads rows start..stop as the file has them: uint8
Upload = Callable[[TensorInfo, Rows], W]
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]

_F32 = QUANT_TYPES[0]


def layer_tensors(config: Qwen2Config) -> dict[str, tuple[str, Shape]]:
    """Field of LayerWeights -> (name inside the block, shape)."""
    d, f, q, kv = config.d_model, config.d_ffn, config.q_width, config.kv_width
    return {
        "attn_norm": ("attn_norm.weight", (d,)),
        "q": ("attn_q.weight", (q, d)),
        "k": ("attn_k.weight", (kv, d)),
        "v": ("attn_v.weight", (kv, d)),
        "q_bias": ("attn_q.bias", (q,)),
        "k_bias": ("attn_k.bias", (kv,)),
        "v_bias": ("attn_v.bias", (kv,)),
        "o": ("attn_output.weight", (d, q)),
        "ffn_norm": ("ffn_norm.weight", (d,)),
        "gate": ("ffn_gate.weight", (f, d)),
        "up": ("ffn_up.weight", (f, d)),
        "down": ("ffn_down.weight", (d, f)),
    }


def model_tensors(config: Qwen2Config, file: GGUFFile) -> dict[str, Shape]:
    """Name and shape of every tensor that this model is made of; `output.weight` and `output.bias`
    only where the file has them."""
    v, d = config.n_vocab, config.d_model
    optional = {"output.weight": (v, d), "output.bias": (v,)}
    shapes: dict[str, Shape] = {"token_embd.weight": (v, d), "output_norm.weight": (d,)}
    shapes |= {name: shape for name, shape in optional.items() if name in file.tensors}
    for i in range(config.n_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer_tensors(config).values()}
    return shapes


def load_weights(
    file: GGUFFile,
    config: Qwen2Config,
    upload: Upload[W],
    *,
    cuda: bool = False,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> ModelWeights:
    """Upload every tensor of the model once and name the results.

    upload    (info, rows) -> the backend's weight; rows(start, stop) reads from the file, now or
              later. Matrices come in the file's own type; norms and biases always as one row of
              float32 (info says F32).
    cuda      refuse, before any upload, types that have no kernels
    progress  called with (bytes done, bytes in all) before the first tensor and after each
    notice    called with a sentence about each tensor that the model does not use

    Raises ModelFileError for a missing or misshapen tensor, UnsupportedModelError for a type or an
    additional tensor that cannot be computed with.
    """
    shapes = model_tensors(config, file)
    wanted = [_checked(file, name, shape, cuda) for name, shape in shapes.items()]
    for message in _unused(file, config, shapes):
        if notice:
            notice(message)
    wanted.sort(key=lambda info: (info.part, info.offset))
    total = sum(info.nbytes for info in wanted)
    loaded: dict[str, W] = {}
    done = 0
    if progress:
        progress(done, total)
    for info in wanted:
        done += info.nbytes
        loaded[info.name] = upload(*_readable(file, info))
        if progress:
            progress(done, total)
    return _named(config, loaded)


def _readable(file: GGUFFile, info: TensorInfo) -> tuple[TensorInfo, Rows]:
    """A tensor and how to read it; a vector of another type as float32."""
    if len(info.shape) > 1 or info.quant is _F32:
        return info, partial(file.rows, info.name)
    floats = info.quant.dequantize(file.data(info.name)).view(np.uint8).reshape(1, -1)
    return replace(info, quant=_F32, nbytes=floats.nbytes), lambda start, stop: floats[start:stop]


def _named(config: Qwen2Config, loaded: dict[str, W]) -> ModelWeights:
    fields = layer_tensors(config)
    layers = tuple(
        LayerWeights(**{field: loaded[f"blk.{i}.{name}"] for field, (name, _) in fields.items()})
        for i in range(config.n_layers)
    )
    return ModelWeights(
        token_embd=loaded["token_embd.weight"],
        layers=layers,
        output_norm=loaded["output_norm.weight"],
        output=loaded.get("output.weight", loaded["token_embd.weight"]),
        output_bias=loaded.get("output.bias"),
    )


def _checked(file: GGUFFile, name: str, shape: Shape, cuda: bool) -> TensorInfo:
    """The tensor, present, of that shape and of a type that can be computed with."""
    info = file.tensors.get(name)
    if info is None:
        hint = ": Qwen2 needs the biases of q, k and v" if name.endswith(".bias") else ""
        raise ModelFileError(f"{file.path}: tensor {name} is missing{hint}")
    while len(info.shape) > len(shape) and info.shape[0] == 1:
        info = replace(info, shape=info.shape[1:])
    if info.shape != shape:
        raise ModelFileError(
            f"{file.path}: tensor {name} has shape {info.shape}, the metadata says {shape}"
        )
    if info.quant.unpack is None or (cuda and info.quant.cuda_name is None):
        usable = [q.name for q in QUANT_TYPES.values() if q.cuda_name or not cuda]
        hint = "" if info.quant.unpack is None else "; --device cpu can run it"
        raise UnsupportedModelError(
            f"{file.path}: tensor {name} has type {info.type_name}, which is not supported "
            f"(supported: {', '.join(usable)}{hint})"
        )
    return info


def _unused(file: GGUFFile, config: Qwen2Config, shapes: dict[str, Shape]) -> list[str]:
    """A sentence for each tensor left out; those that would change the result are refused."""
    notices = []
    for name in file.tensors:
        if name in shapes:
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        if name == "rope_freqs.weight":
            _check_rope_freqs(file)
            notices.append(f"tensor {name} is not used: its factors are all 1")
        elif rest == "attn_rot_embd.weight":
            notices.append(f"tensor {name} is not used: RoPE is computed from its base")
        elif name.startswith("blk.") and block.isdecimal() and int(block) >= config.n_layers:
            notices.append(f"tensor {name} is not used: the model has {config.n_layers} blocks")
        elif name.startswith(("blk.", "output", "token_embd")):
            raise UnsupportedModelError(
                f"{file.path}: tensor {name} is not part of Qwen2, and without it the result would "
                f"be another model's"
            )
        else:
            notices.append(f"tensor {name} is not used: it is not part of Qwen2")
    return notices


def _check_rope_freqs(file: GGUFFile) -> None:
    info = file.tensors["rope_freqs.weight"]
    if not np.all(info.quant.dequantize(file.data(info.name)) == 1):
        raise UnsupportedModelError(
            f"{file.path}: rope_freqs.weight has factors other than 1: this RoPE scaling is not "
            f"supported (supported: yarn)"
        )

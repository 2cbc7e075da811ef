"""minfer-cuda: a local engine for GGUF Qwen2-family models around hand-written CUDA kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minfer_cuda.errors import MinferError
    from minfer_cuda.grammar import Grammar
    from minfer_cuda.llm import LLM, Completion
    from minfer_cuda.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Grammar", "MinferError", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "minfer_cuda.llm",
    "Completion": "minfer_cuda.llm",
    "Grammar": "minfer_cuda.grammar",
    "MinferError": "minfer_cuda.errors",
    "SamplingParams": "minfer_cuda.sampling",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: `minfer --help` must not wait for NumPy."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

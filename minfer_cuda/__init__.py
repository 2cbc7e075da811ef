"""minfer-cuda: a local engine for GGUF Qwen2-family models around hand-written CUDA kernels."""

__version__ = "0.1.0"

"""Architectures by the name that `general.architecture` gives them."""

from minfer_cuda.models.qwen2 import Qwen2

ARCHITECTURES = {"qwen2": Qwen2}

"""Fixtures that several tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ggufs
import hypothesis
import pytest
from command_line import model  # noqa: F401 - a fixture
from devices import device, pytest_collection_modifyitems  # noqa: F401 - a fixture, a hook
from hub import hub  # noqa: F401 - a fixture
from kernel_coverage import (  # noqa: F401 - hooks
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from kernel_fakes import compiles, cupy, nvrtc, sources  # noqa: F401 - fixtures

from minfer_cuda.tokenizer import Tokenizer

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script: what is
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started here would ignore it too

# Wall time says nothing on a shared machine, and a failing example must come back on every run.
hypothesis.settings.register_profile("minfer", deadline=None, derandomize=True)
hypothesis.settings.load_profile("minfer")

TINY_SPECIALS = {  # spelling -> token type: 3 control, 4 user-defined
    "<|fim_prefix|>": 3, "<|fim_middle|>": 3, "<|fim_suffix|>": 3,
    "<tool_call>": 4, "</tool_call>": 4, "<think>": 4, "</think>": 4, "<think>x": 4,
}  # fmt: skip


def _model(size: str, variable: str) -> Path:
    default = f"models/qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
    path = Path(os.environ.get(variable) or default)
    if not path.is_file():
        pytest.skip(f"no {path}: set {variable} or run scripts/get_model.py {size}")
    return path


@pytest.fixture(scope="session")
def model_05b() -> Path:
    return _model("0.5b", "MINFER_TEST_MODEL_05B")


@pytest.fixture(scope="session")
def model_15b() -> Path:
    return _model("1.5b", "MINFER_TEST_MODEL_15B")


def tiny_vocabulary() -> dict[str, Any]:
    """Tokenizer metadata of a small byte-level vocabulary with Qwen2's special tokens."""
    tokens, types, merges = ggufs.vocabulary()
    tokens = [*tokens, *TINY_SPECIALS, "[PAD0]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*types, *TINY_SPECIALS.values(), 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
    }


@pytest.fixture
def tiny_metadata() -> dict[str, Any]:
    return tiny_vocabulary()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_vocabulary())

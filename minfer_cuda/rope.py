"""Rotary position tables: angles in float64, once, at load.

Pair i of a head is (x[i], x[i + E/2]) (the NEOX order, for which GGUF keeps Qwen2's q and k
unpermuted), rotated by the angle position * base^(-2i/E) (RoFormer, arXiv 2104.09864).

YaRN (arXiv 2309.00071, section 3.2 and 3.4) as ggml and Hugging Face compute it: pairs that turn
more than `beta_fast` times within the original context keep their frequency, pairs that turn less
than `beta_slow` times have it divided by `factor`, a linear ramp over the pair index between the
two (its ends rounded outwards to whole pairs); cos and sin are multiplied by 0.1 ln(factor) + 1,
and by the file's attention factor where it has one, as ggml does.
"""

from __future__ import annotations

import math

import numpy as np

from minfer_cuda.config import Qwen2Config, RopeScaling


def inverse_frequencies(config: Qwen2Config) -> np.ndarray:
    """Radians per position of each pair: float64 (E/2)."""
    half = config.head_dim // 2
    pairs = np.arange(half, dtype=np.float64)
    frequencies = config.rope_base ** (-pairs / half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low = max(math.floor(_pair_turning(config, scaling, scaling.beta_fast)), 0)
    high = min(math.ceil(_pair_turning(config, scaling, scaling.beta_slow)), config.head_dim - 1)
    # 0.001: both ends on one pair is a step, not a division by zero
    slow = np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequencies * (1 - slow) + frequencies / scaling.factor * slow


def _pair_turning(config: Qwen2Config, scaling: RopeScaling, turns: float) -> float:
    """The (fractional) pair that turns `turns` times within the original context."""
    wavelengths = math.log(scaling.original_context / (turns * 2 * math.pi))
    return config.head_dim * wavelengths / (2 * math.log(config.rope_base))


def attention_scale(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: 1 without YaRN."""
    if scaling is None:
        return 1.0
    mscale = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return mscale * (1.0 if scaling.attention_factor is None else scaling.attention_factor)


def rope_tables(config: Qwen2Config, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position below n_ctx: float32 (n_ctx, E/2) each."""
    angles = np.arange(n_ctx, dtype=np.float64)[:, None] * inverse_frequencies(config)
    scale = attention_scale(config.rope_scaling)
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)

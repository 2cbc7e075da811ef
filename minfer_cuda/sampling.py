"""Sampling parameters and the host sampler, the oracle of the device's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """Order: logit bias -> penalties (repeat, then frequency and presence) -> top-k -> top-p ->
    min-p -> temperature -> draw. Neutral values switch a step off."""

    temperature: float = 0.8  # 0: argmax, lowest id on ties, no random number used
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # >= 1: off; <= 0 keeps one token
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0  # 1: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 64  # 0: off, -1: the whole history
    seed: int | None = None  # None: drawn, then reported
    logit_bias: dict[int, float] = field(default_factory=dict)

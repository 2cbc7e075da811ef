"""minfer generate: answer one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from minfer_cuda.errors import UsageError

from . import options
from .app import say
from .model import Sampling, Settings, closing_line, draws_at_random, open_model, stream


def generate(
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; without it, or as -, stdin is read."),
    ] = None,
    n_ctx: options.NCtx = options.N_CTX,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    system: options.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without a template.")
    ] = False,
    device: options.Device = "auto",
    kv_type: options.KV = options.KVType.F16,
    chat_template: options.ChatTemplate = None,
    rope_freq_base: options.RopeBase = None,
    verbose: options.Verbose = False,
) -> None:
    """Answer one prompt. stdout has the answer and nothing else.

    Example: minfer generate model.gguf "Why is the sky blue?" --temp 0.2
    """
    if raw and system is not None:
        raise UsageError("--raw takes no --system: write it into the prompt")
    sampling = Sampling(
        temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty, seed
    )
    sampling.check()
    text = read_prompt(prompt)
    settings = Settings(n_ctx, device, kv_type.value, chat_template, rope_freq_base)
    with open_model(model, settings, verbose) as llm:
        params = sampling.params(llm, ignore_eos)
        completion = llm.generate(
            text, system=system, raw=raw, max_tokens=max_tokens, stop=stop or (), params=params
        )
        try:
            stream(completion)
        finally:
            if completion.tokens:
                say(closing_line(completion, draws_at_random(params)))


def read_prompt(argument: str | None) -> str:
    """The argument, or stdin without its last newline; bytes that are not UTF-8 become U+FFFD.
    Raises UsageError where there is no prompt."""
    text = argument
    if argument in (None, "-"):
        if argument is None and sys.stdin.isatty():
            raise UsageError("no prompt: give one as an argument, or pipe it to stdin")
        text = sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
    if not text:
        raise UsageError("the prompt is empty")
    return text

"""minfer generate: answer one prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minfer_cuda.config import MAX_LOGPROBS
from minfer_cuda.errors import UsageError

from . import options
from .answer import Events, Printer, emit, stream
from .app import say
from .files import read_prompt, read_text
from .model import Sampling, Settings, closing_line, draws_at_random, open_model
from .terminal import harmless
from .thinking import begins_in_thought

if TYPE_CHECKING:
    from minfer_cuda.grammar import Grammar
    from minfer_cuda.llm import LLM

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The prompt; without it, or as -, stdin is read."),
]
Suffix = Annotated[
    str | None,
    typer.Option(
        "--suffix", metavar="TEXT", help="Fill in what stands between the prompt and this text."
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|TEXT",
        help="Answer in JSON that this schema allows; {} allows any.",
    ),
]
GrammarFile = Annotated[
    Path | None,
    options.existing_file(
        "--grammar", help="Answer in the language of this grammar, in Lark's notation or in GBNF."
    ),
]
Regex = Annotated[
    str | None,
    typer.Option("--regex", metavar="PATTERN", help="Answer with a match of this expression."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a line: every token, then the end.")
]
LogProbs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        min=1,
        max=MAX_LOGPROBS,
        help="With --json: log probabilities of each token and of the N most likely.",
    ),
]
Echo = Annotated[bool, typer.Option("--echo", help="Print the prompt before the answer.")]


@dataclass(frozen=True)
class Request:
    """What is asked: the prompt and how it is put to the model."""

    prompt: str
    system: str | None
    raw: bool
    suffix: str | None
    grammar: Grammar | None = None

    def check(self) -> None:
        """Raise UsageError for combinations that mean nothing."""
        if self.raw and self.system is not None:
            raise UsageError("--raw takes no --system: write it into the prompt")
        if self.suffix is not None and (self.system is not None or self.raw):
            raise UsageError("--suffix takes neither --system nor --raw: no template is used")

    def encode(self, llm: LLM) -> list[int]:
        """The ids of the prompt."""
        if self.suffix is not None:
            return llm.tokenizer.encode_infill(self.prompt, self.suffix)
        return llm.encode(self.prompt, system=self.system, raw=self.raw)

    def end_ids(self, llm: LLM) -> frozenset[int]:
        """The tokens that end the answer."""
        ends = llm.tokenizer.end_ids
        return ends if self.suffix is None else ends | llm.tokenizer.fim_ends

    def opens_thought(self, llm: LLM, ids: list[int]) -> bool:
        """Whether the answer to the prompt `ids` begins within a thought."""
        return self.grammar is None and begins_in_thought(ids, llm.tokenizer)


def generate(
    model: options.Model,
    prompt: Prompt = None,
    prompt_file: options.PromptFile = None,
    suffix: Suffix = None,
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
    json_schema: JsonSchema = None,
    grammar: GrammarFile = None,
    regex: Regex = None,
    system: options.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without a template.")
    ] = False,
    echo: Echo = False,
    as_json: Json = False,
    logprobs: LogProbs = None,
    hide_thinking: options.HideThinking = False,
    device: options.Device = "auto",
    kv_type: options.KV = None,
    chat_template: options.ChatTemplate = None,
    rope_freq_base: options.RopeBase = None,
    verbose: options.Verbose = False,
) -> None:
    """Answer one prompt. stdout has the answer and nothing else.

    Example: minfer generate model.gguf "Why is the sky blue?" --temp 0.2
    """
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs goes with --json")
    sampling = Sampling(
        temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty, seed
    )
    sampling.check()
    shape = read_grammar(json_schema, grammar, regex)
    if shape is not None and ignore_eos:
        raise UsageError("--ignore-eos: a schema or grammar tells where the answer may end")
    request = Request(read_prompt(prompt, prompt_file), system, raw, suffix, shape)
    request.check()
    settings = Settings(n_ctx, device, kv_type and kv_type.value, chat_template, rope_freq_base)
    with open_model(model, settings, verbose) as llm:
        ids, end_ids = request.encode(llm), request.end_ids(llm)
        params = sampling.params(llm, end_ids if ignore_eos else ())
        completion = llm.complete(
            ids,
            max_tokens=max_tokens,
            stop=stop or (),
            end_ids=end_ids,
            n_logprobs=logprobs or 0,
            grammar=shape,
            params=params,
        )
        if echo:
            echo_prompt(request, ids, as_json)
        try:
            if as_json:
                Events(completion, llm.tokenizer).stream()
            else:
                stream(completion, Printer(request.opens_thought(llm, ids), hide_thinking))
        finally:
            if completion.tokens:
                closing = closing_line(completion, draws_at_random(params))
                say(closing, "dim")


def echo_prompt(request: Request, ids: list[int], as_json: bool) -> None:
    """The prompt, as it was given; an answer in a template begins on a line of its own."""
    if as_json:
        emit("prompt", text=request.prompt, ids=ids)
    else:
        continued = request.raw or request.suffix is not None
        print(harmless(request.prompt, sys.stdout), end="" if continued else "\n", flush=True)


def read_grammar(schema: str | None, file: Path | None, pattern: str | None) -> Grammar | None:
    """What the answer has to look like, by at most one of the three. Raises UsageError."""
    if len([given for given in (schema, file, pattern) if given is not None]) > 1:
        raise UsageError("--json-schema, --grammar and --regex exclude each other")
    if schema is None and file is None and pattern is None:
        return None
    from minfer_cuda.grammar import Grammar

    if schema is not None:
        return Grammar.json_schema(schema_text(schema))
    return Grammar.lark(read_text(file)) if file is not None else Grammar.regex(pattern or "")


def schema_text(given: str) -> str:
    """The schema itself, or what is in the file of that name."""
    if given.lstrip().startswith("{"):
        return given
    if not Path(given).is_file():
        raise UsageError(f"--json-schema: {given!r} is neither a file nor a schema, as in {{...}}")
    return read_text(Path(given))

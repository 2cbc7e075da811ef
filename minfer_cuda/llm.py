"""Text in, text out: a model file, its tokenizer and template, and an engine on a device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from types import NoneType
from typing import Any

from minfer_cuda.chat_template import ChatTemplate
from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import LOADING, Engine, Progress, Stats, Token
from minfer_cuda.errors import DeviceError, OutOfMemoryError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.grammar import Grammar, GrammarVocabulary, Matcher
from minfer_cuda.runners import make_runner, prepare
from minfer_cuda.sampling import SamplingParams
from minfer_cuda.stops import TextStream
from minfer_cuda.tokenizer import Tokenizer


class Turn:
    """A context manager that one thread at a time may enter; another gets a UsageError."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise UsageError("another thread generates with this model: one at a time")

    def __exit__(self, *error: object) -> None:
        self.lock.release()


class Completion(Iterator[str]):
    """The pieces of one answer, each computed when it is asked for.

    `text` is what was given out so far, `tokens` what was generated, the end token too; `stats`
    is kept current. Iterating another completion of the same model ends this one for good; while
    another thread computes a piece of any, `next` raises UsageError.
    """

    def __init__(self, tokens: Iterator[Token], stream: TextStream, stats: Stats, turn: Turn):
        self.tokens: list[Token] = []
        self.text = ""
        self.stats = stats
        self._source = tokens
        self._stream = stream
        self._turn = turn
        self._open = True

    @property
    def ids(self) -> list[int]:
        """The ids generated so far."""
        return [token.id for token in self.tokens]

    @property
    def finish_reason(self) -> str:
        """ "stop" (an end token), "stop string", "grammar" (complete, nothing can follow),
        "length", or "interrupted", also while it runs."""
        return "stop string" if self._stream.stopped is not None else self.stats.finish_reason

    def __next__(self) -> str:
        with self._turn:
            return self._next()

    def _next(self) -> str:
        while self._open:
            token = next(self._source, None)
            if token is None:
                piece = self.end()
            else:
                self.tokens.append(token)
                piece = self._stream.push(token.id)
                self.text += piece
                if self._stream.stopped is not None:
                    piece += self.end()
            if piece:
                return piece
        raise StopIteration

    def end(self) -> str:
        """Generate no more; returns the text that was held back (the start of a stop string, an
        unfinished character) and is now given out."""
        if not self._open:
            return ""
        self._open = False
        close: Callable[[], None] = getattr(self._source, "close", lambda: None)
        close()
        piece = self._stream.finish()
        self.text += piece
        return piece


class Laps:
    """Seconds of one thing after the other, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """What was done since the last end was part of `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def expect(kind: type | tuple[type, ...], what: str, **values: Any) -> None:
    """Raise UsageError where a value of that name is not of `kind`, which is `what` in words."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise UsageError(f"{name} is {value!r}: must be {what}")


class LLM:
    """A model, loaded and ready. A context manager: `close` frees the device's memory. It answers
    one thread at a time; to another that asks meanwhile it gives a UsageError.

    path            a .gguf file, of a split model its first part
    n_ctx           positions of the KV cache; 0: what the model was trained for
    device          "auto" (CUDA where it is usable), "cuda", "cuda:N", "cpu"
    kv_type         "f16" or "f32"; None: f16 on CUDA, f32 on the CPU
    n_batch         most prompt tokens forwarded at once
    rope_freq_base  instead of the file's
    chat_template   instead of the file's: the path of a Jinja file, or "chatml"
    progress        called with ("compiling kernels", kernels done, kernels in all) while kernels
                    are compiled that no earlier start has left, then with ("loading", bytes done,
                    bytes in all)
    notify          called with each sentence that the user should hear (device taken, defaults
                    assumed), as it comes up; all of them are in `notices`

    `load_seconds` says how long each part of loading took.

    Raises the typed errors of `minfer_cuda.errors`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_ctx: int = 4096,
        device: str = "auto",
        kv_type: str | None = None,
        n_batch: int = 2048,
        rope_freq_base: float | None = None,
        chat_template: str | None = None,
        progress: Progress | None = None,
        notify: Callable[[str], None] | None = None,
    ):
        expect(Integral, "a whole number", n_ctx=n_ctx, n_batch=n_batch)
        expect(str, "a text", device=device)
        if n_ctx < 0:
            raise UsageError(f"n_ctx is {n_ctx}: must be >= 1, or 0 for the model's own")
        self.notices: list[str] = []
        self._notify = notify
        laps = Laps()

        def told(doing: str, done: int, total: int) -> None:
            laps.end(("upload" if doing == LOADING else "kernels") if done else "device")
            if progress:
                progress(doing, done, total)

        prepare(device)
        self.file = GGUFFile.open(path)
        try:
            self.config = Qwen2Config.from_gguf(self.file, rope_base=rope_freq_base)
            laps.end("file")
            self.tokenizer = Tokenizer(self.file.metadata)
            for notice in (*self.config.notices, *self.tokenizer.notices):
                self._say(notice)
            self._template = ChatTemplate.from_metadata(self.file.metadata, chat_template)
            self._check_trained_length(n_ctx)
            laps.end("tokenizer")
            runner = make_runner(
                self.file,
                self.config,
                device=device,
                n_ctx=n_ctx or self.config.n_ctx_train,
                kv_type=kv_type,
                n_batch=n_batch,
                progress=told,
                notify=self._say,
            )
        except BaseException as error:
            self.file.close()
            if isinstance(error, MemoryError):
                problem = f"this machine has too little memory: {error}"
                raise OutOfMemoryError(problem) from error
            raise
        self.engine = Engine(runner, self.config)
        laps.end("buffers")
        self.load_seconds = laps.seconds
        self._turn = Turn()
        self._open = True

    @property
    def n_ctx(self) -> int:
        """Positions of the KV cache."""
        return self.engine.n_ctx

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; what it has to say is said when it is first used."""
        for notice in self._template.notices:
            self._say(notice)
        return self._template

    def sampling(self, **options: Any) -> SamplingParams:
        """The fields of `SamplingParams` given here, else the file's defaults, else the library's.
        Raises UsageError for an unknown name or a value that means nothing."""
        params = SamplingParams.from_metadata(self.file.metadata, **options)
        params.validate(self.config.n_vocab)
        return params

    def encode(self, prompt: str, *, system: str | None = None, raw: bool = False) -> list[int]:
        """The ids of a prompt: as a user's message in the chat template, after a `system` message
        if one is given; or, `raw`, as it stands, special tokens by their spelling."""
        expect(str, "a text", prompt=prompt)
        expect((str, NoneType), "a text or None", system=system)
        if not raw:
            messages = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return self.template.encode(messages, self.tokenizer)
        if system is not None:
            raise UsageError("a raw prompt has no system message: write it into the prompt")
        return self.tokenizer.encode(prompt, parse_special=True)

    def generate(
        self,
        prompt: str,
        *,
        system: str | None = None,
        raw: bool = False,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        n_logprobs: int = 0,
        grammar: Grammar | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer `prompt` (see `encode` for `system` and `raw`); the rest is `complete`'s."""
        ids = self.encode(prompt, system=system, raw=raw)
        return self.complete(
            ids,
            max_tokens=max_tokens,
            stop=stop,
            n_logprobs=n_logprobs,
            grammar=grammar,
            params=params,
            **sampling,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        n_logprobs: int = 0,
        grammar: Grammar | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Completion:
        """The next message after `messages` (dicts of `role` and `content`); the rest is
        `complete`'s."""
        ids = self.template.encode(messages, self.tokenizer, tools=tools)
        return self.complete(
            ids,
            max_tokens=max_tokens,
            stop=stop,
            n_logprobs=n_logprobs,
            grammar=grammar,
            params=params,
            **sampling,
        )

    def complete(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        end_ids: Iterable[int] = (),
        n_logprobs: int = 0,
        grammar: Grammar | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Completion:
        """Continue the token ids of a prompt.

        max_tokens  None: the room that the context leaves
        stop        strings that end the answer and are not part of it
        end_ids     tokens that end the answer beside the model's own
        n_logprobs  how many of the most likely tokens each `Token` names
        grammar     what the answer has to look like; an answer that another reason ends before the
                    grammar allows it is a beginning of one
        sampling    fields of `SamplingParams`, or all of them as `params`

        What the cache holds of an earlier prompt is not computed again. Raises UsageError and
        ContextFullError at once, before anything is computed.
        """
        if params is not None and sampling:
            raise UsageError(f"params and {', '.join(sampling)} are given: take one or the other")
        expect((Integral, NoneType), "a whole number or None", max_tokens=max_tokens)
        expect(Integral, "a whole number", n_logprobs=n_logprobs)
        expect((SamplingParams, NoneType), "a SamplingParams or None", params=params)
        expect(Sequence, "a text or a list of texts", stop=stop)
        stops = (stop,) if isinstance(stop, str) else stop
        for text in stops:
            expect(str, "a text or a list of texts", stop=text)
        stream = TextStream(self.tokenizer, stops)
        with self._turn:
            tokens = self.engine.generate(
                ids,
                params or self.sampling(**sampling),
                max_tokens,
                self.tokenizer.end_ids.union(end_ids),
                n_logprobs,
                None if grammar is None else self._matcher(grammar),
            )
            return Completion(tokens, stream, self.engine.stats, self._turn)

    @cached_property
    def _grammar_vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self.tokenizer, self.config.n_vocab)

    def _matcher(self, grammar: Grammar) -> Matcher:
        if not isinstance(grammar, Grammar):
            made = "Grammar.json_schema, Grammar.lark or Grammar.regex"
            raise UsageError(f"grammar is of type {type(grammar).__name__}: make one by {made}")
        matcher = self._grammar_vocabulary.matcher(grammar)
        for notice in matcher.notices:
            self._say(notice)
        return matcher

    def close(self) -> None:
        """Free the weights and the cache; closing again does nothing."""
        if self._open:
            self._open = False
            try:
                with self._turn.lock:  # not while another thread computes
                    self.engine.close()
            finally:
                self.file.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except DeviceError:
            if error is None:
                raise  # else it is the same failure again

    def _say(self, notice: str) -> None:
        self.notices.append(notice)
        if self._notify:
            self._notify(notice)

    def _check_trained_length(self, n_ctx: int) -> None:
        trained = self.config.n_ctx_train
        if n_ctx > trained:
            self._say(
                f"n_ctx {n_ctx} is more than the {trained} positions the model was trained for"
            )

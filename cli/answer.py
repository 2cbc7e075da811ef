"""An answer as it comes: for people, or as JSON events."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .terminal import Spinner, harmless, styled
from .thinking import Piece, ThoughtSplitter

if TYPE_CHECKING:
    from minfer_cuda.engine import Token
    from minfer_cuda.llm import Completion
    from minfer_cuda.tokenizer import Tokenizer


class Printer:
    """What a person sees of one answer: thoughts dimmed, or not at all."""

    def __init__(self, in_thought: bool = False, hide_thinking: bool = False):
        """`in_thought`: the prompt has opened a thought already."""
        self._splitter = ThoughtSplitter(in_thought)
        self._hide = hide_thinking
        self._after_thought = False  # the blank lines between a hidden thought and the answer
        self._last = "\n"

    def push(self, text: str) -> str:
        """What to print of the text that `text` makes certain."""
        return self._shown(self._splitter.push(text))

    def finish(self) -> str:
        """What to print of the rest, and a newline where the answer has none at its end."""
        rest = self._shown(self._splitter.finish())
        return rest if self._last == "\n" else rest + "\n"

    def _shown(self, pieces: Iterable[Piece]) -> str:
        shown = ""
        for piece in pieces:
            text = piece.text
            if piece.thought and self._hide:
                self._after_thought = True
                continue
            if self._after_thought:
                text = text.lstrip()
                self._after_thought = not text
            if text:
                self._last = text[-1]
            text = harmless(text, sys.stdout)
            shown += styled(text, "dim", sys.stdout) if piece.thought else text
        return shown


def stream(completion: Completion, printer: Printer) -> None:
    """Print an answer as it comes; on terminals after a spinner that turns until it begins.

    KeyboardInterrupt ends the completion, prints what was held back and goes on to the caller.
    """
    with Spinner() as spinner:

        def show(text: str) -> None:
            if text:
                spinner.stop()
                print(text, end="", flush=True)

        try:
            for text in completion:
                show(printer.push(text))
        except KeyboardInterrupt:
            show(printer.push(completion.end()))
            raise
        finally:
            show(printer.finish())


class Events:
    """The JSON events of one answer, one object per line on stdout.

    The `text`s of all `token` and `text` events make the answer: a token that leaves a character
    or a possible stop string open has none, what is still open at the end comes as `text`.
    """

    def __init__(self, completion: Completion, tokenizer: Tokenizer):
        self._completion = completion
        self._tokenizer = tokenizer
        self._n_told = 0

    def stream(self) -> None:
        """Emit an answer as it comes, and `end` at last, after an interrupt too."""
        try:
            for text in self._completion:
                self._tell(text)
        except KeyboardInterrupt:
            self._tell(self._completion.end())
            raise
        finally:
            self._tell("")
            self._end()

    def _tell(self, text: str) -> None:
        tokens = self._completion.tokens[self._n_told :]
        self._n_told += len(tokens)
        for token in tokens:
            emit("token", **self._about(token), text=text if token is tokens[-1] else "")
        if text and not tokens:
            emit("text", text=text)

    def _about(self, token: Token) -> dict[str, Any]:
        about: dict[str, Any] = {"id": token.id, "token": self._tokenizer.token_text(token.id)}
        if token.logprob is not None:
            about["logprob"] = token.logprob
            about["top"] = [
                {"id": i, "token": self._tokenizer.token_text(i), "logprob": logprob}
                for i, logprob in token.logprobs
            ]
        return about

    def _end(self) -> None:
        stats = self._completion.stats
        emit(
            "end",
            text=self._completion.text,
            finish_reason=self._completion.finish_reason,
            seed=stats.seed,
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused_tokens,
            prefill_seconds=stats.prefill_seconds,
            generated_tokens=stats.generated_tokens,
            decode_seconds=stats.decode_seconds,
        )


def emit(event: str, **fields: Any) -> None:
    """One event, in ASCII: it is the same in every locale."""
    print(json.dumps({"event": event, **fields}), flush=True)

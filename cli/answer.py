"""An answer as it comes: for people, or as JSON events."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .terminal import Spinner, styled
from .thinking import CLOSE, Piece, ThoughtSplitter

if TYPE_CHECKING:
    from minfer_cuda.engine import Token
    from minfer_cuda.llm import Completion
    from minfer_cuda.tokenizer import Tokenizer


class Printer:
    """Prints the pieces of one answer on stdout, thoughts dimmed or not at all."""

    def __init__(self, in_thought: bool = False, hide_thinking: bool = False):
        """`in_thought`: the prompt has opened a thought already."""
        self._splitter = ThoughtSplitter(in_thought)
        self._hide = hide_thinking
        self._after_thought = False  # the blank lines between a hidden thought and the answer
        self._last = "\n"

    def push(self, text: str) -> bool:
        """Print what `text` makes certain; whether anything was printed."""
        return self._print(self._splitter.push(text))

    def finish(self) -> None:
        """Print the rest, and a newline where the answer has none at its end."""
        self._print(self._splitter.finish())
        if self._last != "\n":
            print(flush=True)

    def _print(self, pieces: Iterable[Piece]) -> bool:
        shown = ""
        for piece in pieces:
            if not piece.thought:
                text = piece.text.lstrip() if self._after_thought else piece.text
                self._after_thought = self._after_thought and not text
                shown += text
            elif self._hide:
                self._after_thought = piece.text.endswith(CLOSE)
            else:
                shown += styled(piece.text, "dim", sys.stdout)
                self._last = piece.text[-1]
            if not piece.thought and shown:
                self._last = shown[-1]
        if shown:
            print(shown, end="", flush=True)
        return bool(shown)


def stream(completion: Completion, printer: Printer) -> None:
    """Print an answer as it comes, after a spinner on terminals.

    KeyboardInterrupt ends the completion, prints what was held back and goes on to the caller.
    """
    with Spinner() as spinner:
        try:
            for text in completion:
                spinner.stop()
                printer.push(text)
        except KeyboardInterrupt:
            spinner.stop()
            printer.push(completion.end())
            raise
        finally:
            spinner.stop()
            printer.finish()


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

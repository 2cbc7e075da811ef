"""Constrained decoding: answers that follow a JSON schema, a grammar or a regular expression.

The llguidance library reads grammars and tells which tokens may come next. It is imported when the
first grammar is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_cuda.errors import GrammarError, UsageError
from minfer_cuda.tokenizer import Tokenizer, well_formed

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Between the parts of a JSON text: nothing, a space, or a new line and its indentation. The library
# would allow any run, in which a model can go on to the end of the context.
WHITESPACE = r"( |\n[ \t]{0,40})?"
NOTHING_FITS = "the grammar cannot go on: no token of the vocabulary fits"
EXCERPT = re.compile(r"\s*(\d+ \||\^+\s*$)")  # a line of the grammar under a message, and its marks


@dataclass(frozen=True)
class Grammar:
    """What an answer has to look like; made by one of the methods, each of which raises UsageError
    with the library's words for what it cannot read. `source` is the library's own form."""

    source: str

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """JSON that a schema allows; `{"type": "object"}` for any object. A schema that asks for
        what cannot be enforced is refused."""
        from llguidance import LLMatcher

        try:
            text = well_formed(schema) if isinstance(schema, str) else json.dumps(schema)
            source = LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": WHITESPACE}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the JSON schema cannot be read: {error}") from None
        return cls(source)._checked("JSON schema")

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar, in Lark's notation (rule `start`) or in GBNF (rule `root`)."""
        from llguidance import grammar_from

        try:
            source = grammar_from("grammar", well_formed(text))
        except ValueError as error:
            raise UsageError(f"the grammar cannot be read: {error}") from None
        return cls(source)._checked("grammar")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """All of the answer matches a regular expression without look-around."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(well_formed(pattern)))._checked(
            "regular expression"
        )

    def _checked(self, what: str) -> Grammar:
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(self.source)
        if failed:
            raise UsageError(f"the {what} cannot be used: {plain(messages[0])}")
        return self


class GrammarVocabulary:
    """The tokens of a model as grammars need them. Made once for a model: it takes a second."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int):
        """`n_vocab`: rows of logits, at least the vocabulary's size. Raises GrammarError where the
        vocabulary has no end token."""
        from llguidance import LLTokenizer

        if not tokenizer.end_ids:
            raise GrammarError("the vocabulary names no end token: a grammar could not end")
        words: Any = _Words(tokenizer)  # as good as the library's wrapper, whose type it asks for
        ends = sorted(tokenizer.end_ids)
        self._tokenizer = LLTokenizer(words, n_vocab=n_vocab, eos_token=ends)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A grammar at its beginning. Raises UsageError where it names tokens that do not exist."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)  # messages without the parser's state
        matcher = LLMatcher(self._tokenizer, grammar.source, log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(f"the grammar cannot be used: {plain(matcher.get_error())}")
        return Matcher(matcher)


class Matcher:
    """The `Constraint` of one answer. `notices`: what of the grammar is not enforced."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher
        self.notices = tuple(map(plain, matcher.get_grammar_warnings()))

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """See `engine.Constraint`. Raises GrammarError, also where no token fits."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        if not mask.any():
            raise GrammarError(NOTHING_FITS)
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        problem = self._matcher.get_error()
        if "KeyboardInterrupt" in problem:  # Ctrl-C while the library called `_Words`
            raise KeyboardInterrupt
        if problem.startswith("NoExtension"):
            raise GrammarError(NOTHING_FITS)
        raise GrammarError(f"the grammar cannot go on: {plain(problem)}")


class _Words:
    """What the library asks of a tokenizer: the attributes of its TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        ids = range(tokenizer.n_vocab)
        self.eos_token_id = min(tokenizer.end_ids)
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]
        self.tokens = [
            tokenizer.token_text(i).encode()
            if tokenizer.is_control(i)
            else tokenizer.token_bytes(i)
            for i in ids
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=False)


def plain(message: str) -> str:
    """The library's message without its picture of the grammar."""
    text = message.removesuffix("<non-verbose/>").strip()
    return " ".join(line.strip() for line in text.splitlines() if not EXCERPT.match(line))

"""The loop of a chat: entries in, answers out. Answers go to stdout, all else to stderr."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minfer_cuda.errors import (
    ContextFullError,
    DeviceError,
    MinferError,
    NumericsError,
    SessionError,
    TemplateError,
)

from . import commands
from .answer import Printer, stream
from .app import complain, counted, say
from .entries import Entry
from .model import closing_line, draws_at_random
from .thinking import begins_in_thought

if TYPE_CHECKING:
    from minfer_cuda.conversation import Conversation
    from minfer_cuda.engine import Stats
    from minfer_cuda.llm import LLM, Completion
    from minfer_cuda.sampling import SamplingParams


@dataclass
class Choices:
    """How answers are generated and shown; /set changes the first two."""

    params: SamplingParams
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    hide_thinking: bool = False


@dataclass
class Totals:
    """Sums over the answers of a chat."""

    answers: int = 0
    new_tokens: int = 0  # of prompts, forwarded
    kept_tokens: int = 0  # of prompts, found in the cache
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, stats: Stats) -> None:
        """Count one more answer."""
        self.answers += 1
        self.new_tokens += stats.prompt_tokens - stats.reused_tokens
        self.kept_tokens += stats.reused_tokens
        self.generated_tokens += stats.generated_tokens
        self.prefill_seconds += stats.prefill_seconds
        self.decode_seconds += stats.decode_seconds


class Repl:
    """A chat in progress. `leaving`: a command has asked to end it; `refused`: how many messages
    the model could not be given."""

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        choices: Choices,
        session: Path | None = None,
    ):
        """`session`: the file that is kept up to date."""
        self.llm = llm
        self.conversation = conversation
        self.choices = choices
        self.session = session
        self.totals = Totals()
        self.last = ""  # the last answer's counts and speeds
        self.n_seeds = 0  # answers since the seed was chosen
        self.leaving = False
        self.refused = 0
        self._unsaved = False

    def run(
        self, entries: Iterable[Entry], single_turn: bool = False, patient: bool = False
    ) -> None:
        """Until the entries end or a command leaves; one message only when `single_turn`.

        `patient`: an interrupt that comes just after a reply has ended does not leave the chat.
        Raises SessionError when the session file is not up to date at the end, and what the only
        message of a `single_turn` has failed by.
        """
        for entry in entries:
            try:
                answered = self.handle(entry)
            except KeyboardInterrupt:
                if not patient:
                    raise
                self.conversation.rollback()
                answered = True
            except (ContextFullError, TemplateError) as e:  # nothing has changed
                if single_turn:
                    raise
                complain(e)
                self.refused += 1
                answered = False
            if self.leaving or (single_turn and answered):
                break
        if self._unsaved and self.session is not None:
            self.conversation.save(self.session)

    def handle(self, entry: Entry) -> bool:
        """Deal with one entry; whether it was a message that the model answered. Raises
        ContextFullError and TemplateError, and nothing has changed, for one that it cannot be
        given."""
        if not entry.text.strip():
            return False
        if entry.text.startswith("/") and not entry.literal:
            try:
                commands.run(self, entry.text)
            except (DeviceError, NumericsError):  # the model cannot go on
                raise
            except MinferError as e:
                complain(e)
            return False
        self.reply(self.conversation.begin_turn(entry.text))
        return True

    def note(self, text: str) -> None:
        """Say something about the chat."""
        say(text, "dim")

    def reply(self, ids: list[int]) -> None:
        """Generate for a prompt, print, keep. An interrupt keeps what was said until then."""
        if dropped := self.conversation.dropped:
            oldest = counted(dropped, "message")
            self.note(f"note: the context is full: the oldest {oldest} dropped, with the answers")
        printer = Printer(begins_in_thought(ids, self.llm.tokenizer), self.choices.hide_thinking)
        completion: Completion | None = None
        try:
            completion = self.llm.complete(
                ids,
                max_tokens=self.choices.max_tokens,
                stop=self.choices.stop,
                params=self._next_params(),
            )
            stream(completion, printer)
        except KeyboardInterrupt:
            if completion is None or not completion.text:
                self.conversation.rollback()
                self.note("interrupted before the first word: the message is taken back")
                return
        except BaseException:
            self.conversation.rollback()
            raise
        self.conversation.end_turn(completion.ids, completion.text, completion.finish_reason)
        self._report(completion)
        self.save()

    def _report(self, completion: Completion) -> None:
        stats = completion.stats
        self.totals.add(stats)
        used = stats.prompt_tokens + stats.generated_tokens
        closing = closing_line(completion, draws_at_random(self.choices.params))
        self.last = f"{closing}, context {used} / {self.llm.n_ctx}"
        self.note(self.last)

    def _next_params(self) -> SamplingParams:
        """A chosen seed counts on from reply to reply, so that /regen gives another answer."""
        params = self.choices.params
        if params.seed is None:
            return params
        self.n_seeds += 1
        return replace(params, seed=(params.seed + self.n_seeds - 1) % 2**64)

    def save(self) -> None:
        """Write the session, where there is one. A failure is said, and tried again later."""
        if self.session is None:
            return
        try:
            self.conversation.save(self.session)
            self._unsaved = False
        except SessionError as e:
            self._unsaved = True
            complain(e)

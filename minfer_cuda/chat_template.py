"""Messages to prompt: the model's own Jinja template, rendered as Hugging Face renders it.

Templates come out of model files and are not trusted: they run in minijinja, which reaches neither
Python objects nor files, with a limit on the work, in a process of their own with limits on memory
and time (`template_process`). What the messages say is not trusted either: in `ChatTemplate.encode`
only what the template itself writes can become a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer_cuda import template_process
from minfer_cuda.errors import TemplateError, UsageError
from minfer_cuda.gguf_header import ARRAYS
from minfer_cuda.template_process import Refusal
from minfer_cuda.tokenizer import any_of, special_text, well_formed

if TYPE_CHECKING:
    from minfer_cuda.tokenizer import Tokenizer

Message = Mapping[str, Any]  # at least `role`; mostly `content`

CHATML = """\
{%- if tools %}{{ raise_exception("the ChatML template cannot show tools") }}{% endif %}
{%- if not messages | selectattr("role", "equalto", "system") | list %}
{{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|im_start|>" ~ message.role ~ "\\n" ~ (message.content or "") ~ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}"""
OVERRIDE_HINT = "choose one with --chat-template FILE|chatml"
PRIVATE_RANGES = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE), (0xE000, 0xF900))
_PROBE = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)


class ChatTemplate:
    """A chat template, tried when it is first used. Messages and tools are what JSON can hold.

    Missing or unusable templates of a file are replaced by ChatML where the vocabulary has
    `<|im_start|>`; `notices` then says why. `clock` is what `strftime_now` reads.
    """

    def __init__(
        self, source: str, *, bos_text: str | None = None, eos_text: str | None = None
    ) -> None:
        """A template given by its source; there is no replacement for it."""
        self._source: str | None = source
        self._fallback_reason = ""  # why `_source` is None
        self._tokens: Sequence[str] = ()  # those of ChatML among them can replace `_source`
        texts = {"bos_token": bos_text, "eos_token": eos_text}
        self._variables = {name: text for name, text in texts.items() if text is not None}
        self._notices: tuple[str, ...] = ()
        self.clock: Callable[[], datetime] = datetime.now
        self._now = datetime.min

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], override: str | None = None
    ) -> ChatTemplate:
        """The template of a model file. `override` is `chatml` or the path of a file that holds a
        template. Raises UsageError when that file cannot be read; that no template can be used is
        only raised (TemplateError) when one is needed: by `render`, `encode` and `notices`."""
        texts = {f"{key}_text": special_text(metadata, key) for key in ("bos", "eos")}
        if override == "chatml":
            return cls(CHATML, **texts)
        if override is not None:
            try:
                return cls(Path(override).read_text("utf-8-sig"), **texts)
            except (OSError, ValueError) as error:
                raise UsageError(f"--chat-template {override}: {error}") from error
        template_process.start()
        template = cls("", **texts)
        template._source, template._fallback_reason = _find(metadata)
        template._tokens = metadata["tokenizer.ggml.tokens"]
        return template

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should hear about the template in use. Tries it."""
        _ = self.source
        return self._notices

    @cached_property
    def source(self) -> str:
        """The Jinja source in use. Tries it."""
        problem = self._fallback_reason
        if self._source is not None:
            try:
                self._probe(self._source)
                return self._source
            except TemplateError as error:
                problem = f"the chat template does not render: {error}"
        if "<|im_start|>" not in self._tokens:
            raise TemplateError(f"{problem}; {OVERRIDE_HINT}")
        self._notices = (f"{problem}; ChatML is used instead",)
        return CHATML

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text, as Hugging Face's `apply_chat_template` renders it. Raises
        TemplateError when no template can be used or this one rejects the messages."""
        self._now = self.clock()
        return self._render(messages, tools, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        generated: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """The prompt as token ids: those of the whole rendered text, except that special spellings
        which come from the messages or tools are ordinary text.

        `generated` gives, for indices into `messages`, the ids that the model once generated for
        that content. They stand in its place wherever the template prints the content unchanged.
        """
        self._now = self.clock()
        messages, tools = _map_texts(messages, well_formed), _map_texts(tools, well_formed)
        prompt = _Prompt(self, messages, tools, add_generation_prompt, tokenizer)
        return prompt.encode(generated or {})

    def _probe(self, source: str) -> None:
        """Raise TemplateError unless a first turn renders, and a second one at least reaches a
        verdict of the template's own."""
        self._now = self.clock()
        self._run(source, _PROBE[:1], None, True)
        try:
            self._run(source, _PROBE, None, True)
        except Refusal:
            return

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool) -> str:
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError("a message is a mapping with `role` and `content`")
        messages, tools = _map_texts(messages, well_formed), _map_texts(tools, well_formed)
        try:
            return self._run(self.source, messages, tools, add_generation_prompt)
        except Refusal as error:
            raise TemplateError(f"the chat template rejects these messages: {error}") from error

    def _run(self, source: str, messages: Any, tools: Any, add_generation_prompt: bool) -> str:
        values = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        return template_process.render(source, values, self._now)


class _Prompt:
    """One call of `ChatTemplate.encode`.

    The prompt is rendered once as it is, and once with private characters standing for what must
    not be read as a special token. The second rendering counts when, put back, it equals the first:
    otherwise the template looked at what was replaced, and less is replaced.
    """

    def __init__(
        self, template: ChatTemplate, messages: Any, tools: Any, generation: bool, tokenizer: Any
    ):
        self._template = template
        self._messages: list[dict[str, Any]] = messages
        self._tools = tools
        self._generation = generation
        self._tokenizer: Tokenizer = tokenizer
        self._plain = template._render(messages, tools, generation)
        contents = json.dumps([messages, tools], ensure_ascii=False, default=str)
        self._used = {*contents, *self._plain, *template.source}
        self._free = self._private_characters()
        self._restore: dict[int, str] = {}  # private character -> the text that it stands for

    def encode(self, generated: Mapping[int, Sequence[int]]) -> list[int]:
        """The ids of the prompt, see `ChatTemplate.encode`."""
        splices = self._splice(generated)
        text = self._marked_text()
        cut = re.compile("([" + "".join(splices) + "])") if splices else re.compile("(?!)")
        ids: list[int] = []
        for part in self._tokenizer.split_special(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            for piece in cut.split(part):
                if piece in splices:
                    ids += splices[piece]
                elif piece:
                    ids += self._tokenizer.encode(piece.translate(self._restore), False)
        return ids

    def _splice(self, generated: Mapping[int, Sequence[int]]) -> dict[str, Sequence[int]]:
        """Put a private character in place of each content that has generated ids and that the
        template prints unchanged. Returns the ids per character."""
        wanted = {
            i: self._stand_in(self._messages[i]["content"])
            for i in generated
            if self._messages[i].get("content")
        }

        def replaced(indices: Iterable[int]) -> list[dict[str, Any]]:
            messages = list(self._messages)
            for i in indices:
                messages[i] = {**messages[i], "content": wanted[i]}
            return messages

        def unchanged(indices: Iterable[int]) -> bool:
            return self._restored(self._text(replaced(indices), self._tools)) == self._plain

        kept = list(wanted)
        if kept and not unchanged(kept):
            kept = [i for i in kept if unchanged([i])]
        self._messages = replaced(kept)
        return {wanted[i]: generated[i] for i in kept}

    def _marked_text(self) -> str:
        """The rendered prompt in which content cannot be read as a special token.

        First every punctuation mark that occurs in special tokens is replaced wherever content
        holds it, so that nothing is pieced together from two contents or from content and template
        either. A template may look for such marks (`</think>` in an assistant's content): then the
        assistant's texts keep all but control tokens, then others keep all but special tokens; but
        only a rendering with the same control tokens as the first is taken.
        """
        specials = self._tokenizer.specials
        control = [text for text, token in specials.items() if self._tokenizer.is_control(token)]
        guards = set().union(*map(_guards, specials)) & self._used
        marks = {ord(character): self._stand_in(character) for character in sorted(guards)}

        def all_marks(text: str) -> str:
            return text.translate(marks)

        def control_spellings(text: str) -> str:
            return _translate_spellings(text, control, marks)

        def spellings(text: str) -> str:
            return _translate_spellings(text, specials, marks)

        def marked(assistant: Callable[[str], str], other: Callable[[str], str]) -> str:
            messages = [
                _map_texts(m, assistant if m.get("role") == "assistant" else other)
                for m in self._messages
            ]
            return self._text(messages, _map_texts(self._tools, other))

        safe = marked(all_marks, all_marks)
        if self._restored(safe) == self._plain:
            return safe
        for other in (all_marks, spellings):
            text = marked(control_spellings, other)
            if self._restored(text) == self._plain and self._control(text) == self._control(safe):
                return text
        return safe

    def _control(self, text: str) -> list[str | int]:
        parts = self._tokenizer.split_special(text)
        return [
            part for part in parts if isinstance(part, int) and self._tokenizer.is_control(part)
        ]

    def _text(self, messages: Any, tools: Any) -> str:
        return self._template._render(messages, tools, self._generation)

    def _restored(self, text: str) -> str:
        return text.translate(self._restore)

    def _stand_in(self, text: str) -> str:
        character = next(self._free)
        self._restore[ord(character)] = text
        return character

    def _private_characters(self) -> Iterator[str]:
        for start, end in PRIVATE_RANGES:
            yield from (c for c in map(chr, range(start, end)) if c not in self._used)
        raise TemplateError("the messages use every private character of Unicode: nothing is left")


def _find(metadata: Mapping[str, Any]) -> tuple[str | None, str]:
    """The file's template, or None and the reason. `tokenizer.chat_template` comes first, then
    among the named ones `default`, then the first."""
    key = "tokenizer.chat_template"
    names = metadata.get("tokenizer.chat_templates")
    names = [n for n in names if isinstance(n, str)] if isinstance(names, ARRAYS) else []
    for candidate in (key, f"{key}.default", *(f"{key}.{name}" for name in names)):
        source = metadata.get(candidate)
        if source is not None:
            if isinstance(source, str):
                return source, ""
            return None, f"{candidate} is a {type(source).__name__}, not a text"
    return None, "the file has no chat template"


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(k, change): _map_texts(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(v, change) for v in value]
    return value


def _guards(spelling: str) -> set[str]:
    """Characters without which `spelling` cannot be matched, and by which a template is unlikely
    to tell messages apart: its punctuation, if it has any."""
    marks = {c for c in spelling if not (c.isalnum() or c.isspace() or c == "_")}
    return marks or {spelling[0]}


def _translate_spellings(text: str, spellings: Iterable[str], table: Mapping[int, str]) -> str:
    """`text` with every occurrence of `spellings` translated, overlapping ones too."""
    inside: set[int] = set()
    for match in re.finditer(f"(?=({any_of(spellings)}))", text):
        inside.update(range(match.start(), match.end(1)))
    if not inside:
        return text
    return "".join(c.translate(table) if i in inside else c for i, c in enumerate(text))

"""Text to token ids and back: byte-level BPE with the qwen2 split, built from GGUF metadata.

The merging is done by the `tokenizers` library. Control and user-defined tokens are matched here,
so that the caller decides for each piece of text whether their spellings count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from minfer_cuda.errors import TokenizerError
from minfer_cuda.gguf_header import ARRAYS, Strings
from minfer_cuda.printable import shown

# Qwen2's own pre-tokenizer rule: digits one by one, newlines end a run, case-blind contractions.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_SPLITS = ("qwen2", "deepseek-r1-qwen")  # the R1 distills kept Qwen's rule
END_TEXTS = ("<|im_end|>", "<|endoftext|>")
FIM_END_TEXTS = {"fim_pad": "<|fim_pad|>", "fim_rep": "<|repo_name|>", "fim_sep": "<|file_sep|>"}
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # `tokenizer.ggml.token_type`; 1 is normal
NOT_TEXT = (UNKNOWN, CONTROL, USER_DEFINED, UNUSED)
FIM_KEYS = {  # the second names are those of older files
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
}


def byte_characters() -> list[str]:
    """The character that stands for each byte 0-255 in a byte-level vocabulary (GPT-2's map):
    printable Latin-1 stands for itself, the other 68 bytes take U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates (bytes that were not UTF-8 in an
    argument, broken JSON escapes) replaced by U+FFFD, so that it can be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def any_of(spellings: Iterable[str]) -> str:
    """A regular expression that matches any of `spellings`, the longest that fits."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


class Tokenizer:
    """The vocabulary of one model. No BOS is ever added, whatever the file says: Qwen2 has none,
    and templates that want one print it.

    `end_ids`: ids that end a reply. `bos_text`, `eos_text`: spellings for templates, or None.
    `fim_prefix`, `fim_suffix`, `fim_middle`: ids of the fill-in-the-middle tokens, or None.
    `fim_ends`: ids that end what fills the middle, beside `end_ids`: padding, the next file, the
    next repository.
    `notices`: defaults taken that the user should hear about.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Build from GGUF metadata. Raises TokenizerError when the vocabulary is not a byte-level
        BPE with the qwen2 split, or is incomplete."""
        self._metadata = metadata
        notices: list[str] = []
        self._tokens = list(vocabulary(metadata))
        self._types = self._read_types(notices)
        self._check_split(notices)
        self.n_vocab = len(self._tokens)
        self._ids = dict(zip(self._tokens, range(self.n_vocab), strict=True))
        self._bpe = self._build()

        special = [i for i, kind in enumerate(self._types) if kind in (CONTROL, USER_DEFINED)]
        self._specials = {self._tokens[i]: i for i in special if self._tokens[i]}
        self._special = re.compile(any_of(self._specials))

        self.bos_text = special_text(metadata, "bos")
        self.eos_text = special_text(metadata, "eos")
        named = [self._named_id(key, notices) for key in ("eos", "eot", "eom")]
        named += [self._ids.get(text) for text in END_TEXTS]
        self.end_ids = frozenset(i for i in named if i is not None)
        if not self.end_ids:
            notices.append("the vocabulary names no end token: replies end at the token limit")
        self.fim_prefix = self._fim_id("prefix")
        self.fim_suffix = self._fim_id("suffix")
        self.fim_middle = self._fim_id("middle")
        named = [self._named_id(key, notices) for key in FIM_END_TEXTS]
        named += [self._ids.get(text) for text in FIM_END_TEXTS.values()]
        self.fim_ends = frozenset(i for i in named if i is not None)
        self.notices = tuple(notices)

    @property
    def specials(self) -> Mapping[str, int]:
        """Spelling to id of the control and user-defined tokens."""
        return self._specials

    def is_control(self, token: int) -> bool:
        """Whether `token` is a control token, which text never shows."""
        return 0 <= token < self.n_vocab and self._types[token] == CONTROL

    def id_of(self, text: str) -> int | None:
        """The id of the vocabulary entry spelt exactly `text` (byte-level characters), or None."""
        return self._ids.get(text)

    def split_special(self, text: str) -> Iterator[str | int]:
        """Cut `text` at the spellings of special tokens, leftmost first and longest first: yields
        non-empty runs of ordinary text and ids of special tokens, in order."""
        end = 0
        for match in self._special.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self._specials[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """The ids of `text`. With `parse_special` the spellings of control and user-defined tokens
        become these tokens, otherwise they are ordinary text. Lone surrogates become U+FFFD."""
        text = well_formed(text)
        ids: list[int] = []
        for part in self.split_special(text) if parse_special else (text,):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._bpe.encode(part, add_special_tokens=False).ids
        return ids

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """The ids that ask for what stands between `prefix` and `suffix`, ordinary text both.
        Raises TokenizerError, naming them, where the vocabulary lacks the tokens for it."""
        marks = {"prefix": self.fim_prefix, "suffix": self.fim_suffix, "middle": self.fim_middle}
        missing = ", ".join(f"<|fim_{role}|>" for role, token in marks.items() if token is None)
        if missing:
            raise TokenizerError(
                f"this model cannot fill in the middle: its vocabulary lacks {missing}"
            )
        before, after, middle = (token for token in marks.values() if token is not None)
        parts = ([before], self.encode(prefix, False), [after], self.encode(suffix, False))
        return [*chain.from_iterable(parts), middle]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to the output: none for control and unused tokens and for
        ids outside the vocabulary (a head may have more rows). May end inside a character."""
        if not 0 <= token < self.n_vocab or self._types[token] in (UNKNOWN, CONTROL, UNUSED):
            return b""
        text = self._tokens[token]
        if self._types[token] != USER_DEFINED and all(c in BYTE_OF for c in text):
            return bytes(BYTE_OF[c] for c in text)
        return well_formed(text).encode("utf-8")

    def token_text(self, token: int) -> str:
        """How to show `token` to a person: its spelling, control tokens too; bytes that are not
        UTF-8 by themselves as U+FFFD."""
        if self.is_control(token):
            return self._tokens[token]
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> str:
        """The text that `ids` print, invalid UTF-8 as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _read_types(self, notices: list[str]) -> Sequence[int]:
        types = self._metadata.get("tokenizer.ggml.token_type")
        if types is None:
            notices.append("tokenizer.ggml.token_type is missing: no token is taken as special")
            return [1] * len(self._tokens)
        if not isinstance(types, list) or len(types) != len(self._tokens):
            n_types = len(types) if isinstance(types, list) else shown(types)
            raise TokenizerError(
                f"tokenizer.ggml.token_type has {n_types} entries for {len(self._tokens)} tokens: "
                "the file contradicts itself"
            )
        return types

    def _check_split(self, notices: list[str]) -> None:
        pre = self._metadata.get("tokenizer.ggml.pre")
        if pre is None:
            notices.append("tokenizer.ggml.pre is missing: taken as qwen2")
        elif pre not in KNOWN_SPLITS:
            raise TokenizerError(
                f"tokenizer.ggml.pre is {shown(pre)}: this engine splits text by "
                f"{' and '.join(KNOWN_SPLITS)} only"
            )

    def _build(self) -> tokenizers.Tokenizer:
        missing = [byte for character, byte in BYTE_OF.items() if character not in self._ids]
        if missing:
            raise TokenizerError(
                f"{len(missing)} of the 256 byte tokens are missing from the vocabulary "
                f"(the first is byte 0x{missing[0]:02x}): not every text could be encoded"
            )
        merges = list(_texts(self._metadata, "merges"))
        self._check_ordinary(set(merges))
        pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
        try:
            bpe = models.BPE(self._ids, pairs)
        except Exception as error:  # the library raises bare Exception for a bad merge
            raise TokenizerError(f"the merges do not fit the vocabulary: {error}") from error
        split = pre_tokenizers.Split(tokenizers.Regex(QWEN2_SPLIT), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer = tokenizers.Tokenizer(bpe)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        return tokenizer

    def _check_ordinary(self, merges: Set[object]) -> None:
        """Refuse a vocabulary in which ordinary text can become a token that is not text."""
        for token in [i for i, kind in enumerate(self._types) if kind in NOT_TEXT]:
            text, kind = self._tokens[token], self._types[token]
            if self._ids[text] != token:
                continue  # its spelling stands for another one
            cuts = (f"{text[:i]} {text[i:]}" for i in range(1, len(text)))
            if text in BYTE_OF or any(cut in merges for cut in cuts):
                raise TokenizerError(
                    f"token {token}, {shown(text)}, has type {kind}, but ordinary text becomes it: "
                    "the file contradicts itself"
                )

    def _named_id(self, key: str, notices: list[str]) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = _id_in(value, self.n_vocab)
        if value is not None and token is None:
            notices.append(
                f"tokenizer.ggml.{key}_token_id is {shown(value)}, outside the vocabulary of "
                f"{self.n_vocab}: ignored"
            )
        return token

    def _fim_id(self, role: str) -> int | None:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in FIM_KEYS[role]]
        named = (_id_in(self._metadata.get(key), self.n_vocab) for key in keys)
        return next((i for i in named if i is not None), self._ids.get(f"<|fim_{role}|>"))


def vocabulary(metadata: Mapping[str, Any]) -> Sequence[str]:
    """The token spellings of a byte-level BPE vocabulary; TokenizerError for any other."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(
            f"tokenizer.ggml.model is {shown(model)}: only gpt2 (byte-level BPE) vocabularies are "
            "read"
        )
    return _texts(metadata, "tokens")


def _texts(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    """An array of strings, one or more. Raises TokenizerError."""
    key = f"tokenizer.ggml.{name}"
    texts = metadata.get(key)
    if not isinstance(texts, ARRAYS) or not texts:
        raise TokenizerError(f"{key} is missing or empty: convert the model again")
    if not isinstance(texts, Strings) and set(map(type, texts)) != {str}:
        raise TokenizerError(f"{key} holds what is not a text")
    return texts


def special_text(metadata: Mapping[str, Any], key: str) -> str | None:
    """The spelling of the token that `tokenizer.ggml.{key}_token_id` names, or None."""
    tokens = vocabulary(metadata)
    token = _id_in(metadata.get(f"tokenizer.ggml.{key}_token_id"), len(tokens))
    return None if token is None else tokens[token]


def _id_in(value: object, n_vocab: int) -> int | None:
    return value if type(value) is int and 0 <= value < n_vocab else None

"""Python's string methods that minijinja does not know, for templates that call them.

Jinja2 calls the methods of Python's `str`; minijinja has its own strings with the commonest of
them. Filters can be added to it, methods cannot: `text.rsplit(",")` becomes
`(text | rsplit(","))`.
"""

from __future__ import annotations

import re

METHODS = (
    "casefold", "center", "expandtabs", "ljust", "partition", "removeprefix", "removesuffix",
    "rindex", "rjust", "rpartition", "rsplit", "swapcase", "translate", "zfill",
)  # fmt: skip

_CALL = re.compile(rf"\.\s*(?:{'|'.join(METHODS)})\s*\(")
_TAG = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_WORD = re.compile(
    r"""\s+ | '(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | \w+ | .""", re.DOTALL | re.VERBOSE
)


def methods_as_filters(source: str) -> str:
    """`source` with every call of `METHODS` inside its tags written as a filter."""
    if not _CALL.search(source):
        return source
    return _TAG.sub(lambda tag: _rewrite(tag[0][:2], tag[0][2:-2]) + tag[0][-2:], source)


def _rewrite(opening: str, expression: str) -> str:
    out = [opening]
    operand: int | None = None  # where in `out` the value begins that a dot would apply to
    brackets: list[tuple[int, bool]] = []  # per open bracket: its operand, and if it is a METHODS'
    words = _WORD.findall(expression)
    last = ""  # the word before, white space aside
    for word in words:
        is_call = False
        if word.isspace():
            out.append(word)
            continue
        if word in "([{":
            is_call = word == "(" and last.startswith("|")
            begin = len(out) if operand is None or word == "{" else operand
            brackets.append((begin, is_call))
            operand = None
            out.append(word)
        elif word in ")]}" and brackets:
            operand, is_call = brackets.pop()
            out.append(word + ")" if is_call else word)
        elif last == "." and word in METHODS and operand is not None:
            dot = max(i for i, written in enumerate(out) if written == ".")
            out[dot] = " | "
            out.insert(operand, "(")
            out.append(word)
            last = "|" + word
            continue
        else:
            if word != "." and last != ".":
                operand = len(out) if word[0].isalnum() or word[0] in "_'\"" else None
            out.append(word)
        last = word
    return "".join(out)

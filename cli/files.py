"""Texts that the user gives: in files, and as a prompt."""

from __future__ import annotations

import sys
from pathlib import Path

from minfer_cuda.errors import MinferError, UsageError

BOM = "\ufeff"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises MinferError, with the byte, for
    any other."""
    try:
        return path.read_bytes().decode("utf-8").removeprefix(BOM)
    except UnicodeDecodeError as e:
        raise MinferError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from None
    except OSError as e:
        raise MinferError(f"cannot read {path}: {e.strerror}") from None


def without_last_newline(text: str) -> str:
    """`text` without the line end that editors and `echo` put there, in Unix or Windows form."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def read_prompt(argument: str | None, file: Path | None = None) -> str:
    """The argument, the file's text, or stdin without its last newline; bytes of an argument or of
    stdin that are not UTF-8 become U+FFFD. Raises UsageError where there is no prompt, or more than
    one."""
    if file is not None:
        if argument is not None:
            raise UsageError("PROMPT and --prompt-file exclude each other")
        text = without_last_newline(read_text(file))
    elif argument in (None, "-"):
        if argument is None and sys.stdin.isatty():
            raise UsageError("no prompt: give one as an argument, or pipe it to stdin")
        given = sys.stdin.buffer.read().decode("utf-8", "replace")
        text = without_last_newline(given.removeprefix(BOM))
    else:
        from minfer_cuda.tokenizer import well_formed

        text = well_formed(argument or "")
    if not text:
        raise UsageError("the prompt is empty")
    return text

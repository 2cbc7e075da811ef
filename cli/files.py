"""Texts that the user gives: in files, and as a prompt."""

from __future__ import annotations

import sys
from pathlib import Path

from minfer_cuda.errors import MinferError, UsageError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises MinferError, with the byte, for any other."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise MinferError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from None
    except OSError as e:
        raise MinferError(f"cannot read {path}: {e.strerror}") from None


def read_prompt(argument: str | None, file: Path | None = None) -> str:
    """The argument, the file's text, or stdin without its last newline; bytes on stdin that are
    not UTF-8 become U+FFFD. Raises UsageError where there is no prompt, or more than one."""
    if file is not None:
        if argument is not None:
            raise UsageError("PROMPT and --prompt-file exclude each other")
        text = read_text(file).removesuffix("\n")
    elif argument in (None, "-"):
        if argument is None and sys.stdin.isatty():
            raise UsageError("no prompt: give one as an argument, or pipe it to stdin")
        text = sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
    else:
        text = argument or ""
    if not text:
        raise UsageError("the prompt is empty")
    return text

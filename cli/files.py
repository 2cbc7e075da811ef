"""Text files that the user names."""

from __future__ import annotations

from pathlib import Path

from minfer_cuda.errors import MinferError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises MinferError, with the byte, for any other."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise MinferError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from None
    except OSError as e:
        raise MinferError(f"cannot read {path}: {e.strerror}") from None

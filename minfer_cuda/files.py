"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PART_SUFFIX = ".part"  # of what is not whole yet


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file, for its owner alone, that takes the name `path` when the block ends.

    Where the block or the disk fails, or a signal comes, what was at `path` stays and nothing new
    is left; only kill -9 leaves `.NAME.*.part`. Raises OSError, also where `path` is something that
    must not be replaced: a device, a pipe, a folder.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        with open(part, "xb", opener=_private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

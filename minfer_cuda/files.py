"""Files that are written whole or not at all, and by one process at a time."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

PART_SUFFIX = ".part"  # of what is not whole yet
WAIT_S = 0.1  # between two attempts to get a lock


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o600) -> Iterator[IO[bytes]]:
    """A new file, for its owner alone unless `mode` says more, that takes the name `path` when the
    block ends.

    Where the block or the disk fails, or a signal comes, what was at `path` stays and nothing new
    is left; only kill -9 leaves `.NAME.*.part`. Raises OSError, also where `path` is something that
    must not be replaced: a device, a pipe, a folder.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the file lock `path`, which one process at a time can; the file exists meanwhile.

    `waiting` is called at each attempt that fails. The system lets go of the lock of a process that
    dies, however it does. Raises OSError where no lock can be made.
    """
    file = _acquire(path, waiting)
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows keeps what is open
            path.unlink(missing_ok=True)
        file.close()


def _acquire(path: Path, waiting: Callable[[], None]) -> IO[bytes]:
    while True:
        file = path.open("ab")
        if _try_lock(file.fileno()) and _is_at(path, file.fileno()):
            return file
        file.close()
        waiting()
        time.sleep(WAIT_S)


def _try_lock(number: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def _is_at(path: Path, number: int) -> bool:
    """Whether the open file still has its name: who had it locked before has removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(number))
    except FileNotFoundError:
        return False


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none, any more or yet."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0

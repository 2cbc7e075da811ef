"""One file over HTTP: resumed where it was cut, taken only when size and SHA-256 are right."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from minfer_cuda.errors import StoreError
from minfer_cuda.files import PART_SUFFIX, locked, size_of

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0  # without a byte
MOST_FAILURES = 5  # in a row, without a new byte
PAUSE_S = 1.0  # after the first failure; doubled after each other
SPARE_BYTES = 64 << 20  # of the disk, left free

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Remote:
    """A file that a server offers. `sha256` None: the server names none, only the size counts."""

    url: str
    size: int
    sha256: str | None
    headers: Mapping[str, str] = field(default_factory=dict)


def fetch(remote: Remote, target: Path, progress: Progress) -> None:
    """Put the file at `target`, which appears only once it is whole and verified.

    What an earlier call has left unfinished is not fetched again; where another process fetches the
    file, it is waited for. Raises StoreError.
    """
    unfinished = part_path(remote, target)
    lock = target.with_name(f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, lambda: progress(size_of(unfinished), remote.size)):
            if not is_whole(target, remote.size):
                _fetch(remote, unfinished, target, progress)
    except OSError as e:
        raise StoreError(f"cannot write {e.filename or unfinished}: {e.strerror or e}") from e


def _fetch(remote: Remote, unfinished: Path, target: Path, progress: Progress) -> None:
    with unfinished.open("a+b") as file:
        transfer = _Transfer(remote, file, progress)
        transfer.run()
    if remote.sha256 is not None and transfer.digest.hexdigest() != remote.sha256:
        unfinished.unlink()
        raise StoreError(
            f"{remote.url} came with the sha256 {transfer.digest.hexdigest()}, it should be "
            f"{remote.sha256}: it was removed, try again"
        )
    os.replace(unfinished, target)


def is_whole(target: Path, size: int) -> bool:
    """Whether the file is here; it is by its size."""
    return target.is_file() and size_of(target) == size


def part_path(remote: Remote, target: Path) -> Path:
    """Where the unfinished file lies: another version of it is another file."""
    return target.with_name(f"{target.name}.{(remote.sha256 or 'unverified')[:12]}{PART_SUFFIX}")


def check_space(files: Iterable[tuple[Remote, Path]], folder: Path) -> None:
    """Raise StoreError, with both numbers, when what is missing of `files` does not fit."""
    missing = 0
    for remote, target in files:
        missing += remote.size - size_of(part_path(remote, target))
    free = shutil.disk_usage(folder).free
    if missing + SPARE_BYTES > free:
        raise StoreError(
            f"{missing / 1e9:.2f} GB to fetch, {free / 1e9:.2f} GB free in {folder}: free some, or "
            "name another folder with MINFER_MODEL_DIR"
        )


class _Transfer:
    """The bytes of one file on their way into `file`, hashed as they come."""

    def __init__(self, remote: Remote, file: IO[bytes], progress: Progress):
        self.remote = remote
        self.file = file
        self.progress = progress
        self._restart(keep=True)

    def run(self) -> None:
        """Fetch what is missing. Raises StoreError when it cannot be had."""
        failures = 0
        while self.done < self.remote.size:
            before = self.done
            try:
                self._receive()
                problem = "the connection was cut"
            except urllib.error.HTTPError as e:
                problem = f"HTTP {e.code} {e.reason}"
                if e.code == 416:
                    self._restart(keep=False)
                elif e.code < 500 and e.code not in (408, 429):
                    raise StoreError(f"{self.remote.url}: {problem}") from None
            except (urllib.error.URLError, http.client.HTTPException, _Cut) as e:
                problem = str(getattr(e, "reason", e)) or type(e).__name__
            failures = 0 if self.done > before else failures + 1
            if failures == MOST_FAILURES:
                raise StoreError(
                    f"{self.remote.url}: {problem}; {self.done} of {self.remote.size} bytes are "
                    "kept, the same command goes on from there"
                )
            if failures:
                time.sleep(PAUSE_S * 2 ** (failures - 1))

    def _restart(self, keep: bool) -> None:
        """Begin anew; with `keep` after the bytes that are there already."""
        self.digest = hashlib.sha256()
        self.file.seek(0)
        self.done = 0
        while keep and (chunk := self.file.read(CHUNK_BYTES)):
            self.digest.update(chunk)
            self.done += len(chunk)
        if not keep or self.done > self.remote.size:
            self.file.truncate(0)
            self.digest, self.done = hashlib.sha256(), 0

    def _receive(self) -> None:
        """One request, until its end, a cut, or the size that was promised."""
        headers = {**self.remote.headers, "Accept-Encoding": "identity"}
        if self.done:
            headers["Range"] = f"bytes={self.done}-"
        with _open(self.remote.url, headers) as response:
            if self.done and response.status != 206:  # the server cannot resume
                self._restart(keep=False)
            length = response.headers.get("Content-Length")
            left = self.remote.size - self.done
            if length is not None and int(length) != left:
                raise StoreError(
                    f"{self.remote.url} has {int(length) + self.done} bytes, "
                    f"{self.remote.size} were promised"
                )
            while self.done < self.remote.size:
                chunk = _read(response, min(CHUNK_BYTES, self.remote.size - self.done))
                if not chunk:
                    return
                self.file.write(chunk)
                self.digest.update(chunk)
                self.done += len(chunk)
                self.progress(self.done, self.remote.size)


class _Cut(Exception):
    """The connection failed while it was read; apart from what fails when the disk is written."""


def _read(response: Any, n_bytes: int) -> bytes:
    try:
        data: bytes = response.read1(n_bytes)
    except OSError as e:
        raise _Cut(e.strerror or str(e)) from e
    return data


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Does not tell the token of one host to another."""

    def redirect_request(self, req: Any, *others: Any) -> urllib.request.Request | None:
        new = super().redirect_request(req, *others)
        if new is not None and urlsplit(new.full_url).netloc != urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def _open(url: str, headers: Mapping[str, str]) -> Any:
    opener = urllib.request.build_opener(_Redirects)  # proxies of the environment included
    return opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=TIMEOUT_S)


def get_json(url: str, headers: Mapping[str, str]) -> Any:
    """The JSON document at `url`. Raises StoreError."""
    try:
        with _open(url, headers) as response:
            return json.loads(response.read(CHUNK_BYTES))
    except urllib.error.HTTPError as e:
        raise StoreError(f"{url}: HTTP {e.code} {e.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise StoreError(f"{url}: {getattr(e, 'reason', e)}") from e

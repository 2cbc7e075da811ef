"""GGUF files (versions 2 and 3, whole or split).

A model file is untrusted: gguf_header.py bounds what is read, and here every tensor must be
aligned, lie inside its file and apart from the others before anyone sees it.

Files are read, not mapped: a page of a mapped file that someone has cut or overwritten kills the
process (SIGBUS) or is another model's, whenever it is touched; a read that finds the file changed
is a ModelFileError. Whoever wants little memory reads few rows at a time.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from minfer_cuda.errors import ModelFileError
from minfer_cuda.gguf_header import HeaderGoesOn, HeaderReader, Value, header_bytes
from minfer_cuda.printable import shown
from minfer_cuda.quants import QuantType

if TYPE_CHECKING:
    import numpy as np

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what its bytes mean."""

    name: str
    quant: QuantType
    shape: tuple[int, ...]  # NumPy order: (N, K) for a matrix of N rows out, K columns in
    offset: int  # from the start of its part's file
    nbytes: int
    part: int = 0  # index into the file's parts

    @property
    def type_id(self) -> int:
        return self.quant.type_id

    @property
    def type_name(self) -> str:
        return self.quant.name

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.quant.block_size * self.quant.block_bytes

    @property
    def n_rows(self) -> int:
        return self.nbytes // self.row_bytes


class GGUFFile:
    """An open model: metadata, tensor table, and the tensors' bytes.

    Use it as a context manager; nothing can be read after `close`.
    """

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self.path: Path = parts[0].path
        self.metadata: dict[str, Value] = parts[0].metadata
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise ModelFileError(f"{part.path}: tensor {tensor.name} is in two parts")
                self.tensors[tensor.name] = tensor

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Read the header of `path` and, for part 1 of a split model, of its other parts.

        Raises ModelFileError for whatever is not a sound GGUF file, with the reason, and
        UnsupportedModelError for a tensor type that nothing here knows.
        """
        parts = [_Part(Path(path), 0)]
        try:
            for index, sibling in enumerate(_other_parts(parts[0]), start=1):
                parts.append(_Part(sibling, index))
            _check_split(parts)
            return cls(parts)
        except BaseException:
            for part in parts:
                part.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Of all parts together."""
        return sum(part.size for part in self._parts)

    @property
    def n_parts(self) -> int:
        return len(self._parts)

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor, read now: uint8 (nbytes). Raises as `rows` does."""
        return self.rows(name, 0, self._info(name).n_rows).reshape(-1)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """The bytes of rows start..stop of a tensor, read now: uint8 (stop - start, row bytes).

        Raises ModelFileError where the file has no such tensor, was closed, or was cut or written
        to since it was opened. From any thread.
        """
        import numpy as np  # late: who reads no tensor does not wait for it

        info = self._info(name)
        offset = info.offset + start * info.row_bytes
        out = np.empty((stop - start, info.row_bytes), np.uint8)
        self._parts[info.part].read(offset, out.reshape(-1).data)
        return out

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: there is no tensor {name}")
        return info

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Part:
    """One file: header parsed, contents read when asked for."""

    def __init__(self, path: Path, index: int):
        self.path = path
        self.index = index
        self._file = _open_file(path)
        self._lock = threading.Lock()  # of the file's position
        try:
            opened = os.fstat(self._file.fileno())
            self.size, self._changed = opened.st_size, opened.st_mtime_ns
            if self.size == 0:
                raise ModelFileError(f"{path} is empty: download it again")
            try:
                self._parse(header_bytes(self.size, usual=True))
            except HeaderGoesOn:
                self._parse(header_bytes(self.size))
        except BaseException:
            self.close()
            raise

    def _parse(self, n_bytes: int) -> None:
        """Take the header from the file's first bytes."""
        header = bytearray(n_bytes)
        self.read(0, memoryview(header))
        reader = HeaderReader(header, self.size, self.path)
        n_tensors, n_values = reader.header()
        self.metadata = reader.metadata(n_values)
        self.tensors = self._tensors(reader, n_tensors)

    def _tensors(self, reader: HeaderReader, count: int) -> list[TensorInfo]:
        alignment = _alignment(self.metadata, self.path)
        entries = reader.tensor_table(count)
        start = -(-reader.pos // alignment) * alignment
        tensors = [
            TensorInfo(name, quant, shape, start + offset, nbytes, self.index)
            for name, quant, shape, offset, nbytes in entries
        ]
        self._check_layout(tensors, start, alignment)
        return tensors

    def _check_layout(self, tensors: list[TensorInfo], start: int, alignment: int) -> None:
        """Each tensor aligned, inside the file, and apart from the others."""
        whole = start + sum(t.nbytes + alignment for t in tensors)
        for t in tensors:
            if (t.offset - start) % alignment:
                raise ModelFileError(
                    f"{self.path}: tensor {t.name} is unaligned: offset {t.offset - start} is not "
                    f"a multiple of {alignment}"
                )
            end = t.offset + t.nbytes
            if end > max(self.size, whole):
                raise ModelFileError(
                    f"{self.path}: tensor {t.name} lies outside the file: offset "
                    f"{t.offset - start}, {t.nbytes} bytes"
                )
            if end > self.size:
                raise ModelFileError(
                    f"{self.path} is truncated: tensor {t.name} ends at byte {end}, the file has "
                    f"{self.size}: download it again"
                )
        ordered = sorted(tensors, key=lambda t: t.offset)
        for before, after in zip(ordered, ordered[1:], strict=False):
            if before.offset + before.nbytes > after.offset:
                raise ModelFileError(f"{self.path}: tensors {before.name} and {after.name} overlap")

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with what the file had there when it was opened. Raises ModelFileError."""
        done, got = 0, 1
        with self._lock:
            if self._file.closed:
                raise ModelFileError(f"{self.path} has been closed")
            try:
                self._file.seek(offset)
                while done < len(into) and got:
                    got = self._file.readinto(into[done:])
                    done += got
            except OSError as error:
                raise ModelFileError(f"{self.path} cannot be read: {error.strerror}") from error
            now = os.fstat(self._file.fileno())  # after the read: nothing older can be in it
        if done < len(into) or now.st_size < self.size or now.st_mtime_ns != self._changed:
            raise ModelFileError(
                f"{self.path} was changed while open: {self.size} bytes then, {now.st_size} now: "
                f"start again"
            )

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file.close()


def _open_file(path: Path) -> FileIO:
    """A regular file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before open, which waits on a pipe
            raise ModelFileError(f"{path} is not a regular file: name a .gguf file")
        return FileIO(path)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be opened: {error}") from error


def _is_int(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not _is_int(value) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelFileError(
            f"{path}: general.alignment is {shown(value)}, not a power of two from 1 to "
            f"{MAX_ALIGNMENT}"
        )
    return int(value)


def _split_value(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not _is_int(value) or value < 0:
        raise ModelFileError(f"{part.path}: {key} is {shown(value)}, not a count")
    return int(value)


def _other_parts(first: _Part) -> list[Path]:
    """Paths of parts 2..N of a split model; empty for a whole one."""
    count = _split_value(first, "split.count", 1)
    if count <= 1:
        return []
    number = _split_value(first, "split.no", 0) + 1
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None:
        raise ModelFileError(
            f"{first.path} is part {number} of {count}, but is not named "
            f"NAME-{number:05d}-of-{count:05d}.gguf, by which the others are found"
        )
    base, named_number, named_count = match[1], int(match[2]), int(match[3])
    if (named_number, named_count) != (number, count):
        raise ModelFileError(
            f"{first.path} is named part {named_number} of {named_count}, "
            f"but says that it is part {number} of {count}"
        )
    if number != 1:
        raise ModelFileError(
            f"{first.path} is part {number} of {count}: open {base}-00001-of-{count:05d}.gguf"
        )
    paths = [
        first.path.with_name(f"{base}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)
    ]
    for number, path in enumerate(paths, start=2):
        if not path.exists():
            raise ModelFileError(f"{path} does not exist: part {number} of {count} is missing")
    return paths


def _check_split(parts: list[_Part]) -> None:
    """Each part says which it is, and together they hold the tensors that part 1 promises."""
    if len(parts) == 1:
        return
    for i, part in enumerate(parts):
        number, count = _split_value(part, "split.no", 0), _split_value(part, "split.count", 1)
        if (number, count) != (i, len(parts)):
            raise ModelFileError(
                f"{part.path} says that it is part {number + 1} of {count}, "
                f"expected part {i + 1} of {len(parts)}"
            )
    found = sum(len(part.tensors) for part in parts)
    promised = _split_value(parts[0], "split.tensors.count", found)
    if found != promised:
        raise ModelFileError(
            f"{parts[0].path}: the {len(parts)} parts hold {found} tensors, "
            f"split.tensors.count is {promised}"
        )

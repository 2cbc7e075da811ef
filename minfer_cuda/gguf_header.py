"""The header of a GGUF file: magic, counts, metadata, tensor table, in the order of the file.

Nothing in it is trusted: each count and length is compared with the bytes that are left before it
is used, and what costs most per byte is counted, so that a header never takes more memory than some
ten times its bytes, half a GiB in all. Format: the GGUF specification of the ggml project, versions
2 and 3.
"""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from minfer_cuda.errors import ModelFileError
from minfer_cuda.quants import QuantType, quant_type

Value = Any  # int, float, bool, str, Strings, or a list of these (of lists of these)

MAX_DIMS = 4
MAX_ARRAY_DEPTH = 2
USUAL_HEADER_BYTES = 1 << 23  # read at first: 64 MiB would take a tenth of a second
MAX_HEADER_BYTES = 1 << 26  # metadata and tensor table; a 152k vocabulary takes 6 MB
MAX_ENTRIES = 1 << 16  # metadata values, tensors, arrays within an array; large models have 2,000
MAX_NAME = 1024  # characters of a key or tensor name

# struct codes of the value types
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MIN_VALUE_BYTES = {_STRING: 8, _ARRAY: 12}


class Strings(Sequence[str]):
    """An array of strings, each decoded when it is asked for: a vocabulary with its merges has
    300,000 of them, and `minfer info` shows six of each. Equal to the list of the same strings."""

    def __init__(self, raw: bytes, starts: array[int]):
        """`raw`: sound UTF-8, before each string 8 other bytes. `starts`: where each string begins
        in it, and where one after the last would."""
        self._raw = raw
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._raw[self._starts[i] : self._starts[i + 1] - 8].decode()

    def __iter__(self) -> Iterator[str]:
        raw = self._raw
        for start, after in pairwise(self._starts):
            yield raw[start : after - 8].decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ARRAYS) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


ARRAYS = (list, Strings)  # the types of an array


class HeaderGoesOn(ModelFileError):
    """The header does not end within what has been read of the file."""


def header_bytes(size: int, usual: bool = False) -> int:
    """How much of a file of so many bytes may be its header, or is enough as a rule."""
    return min(size, USUAL_HEADER_BYTES if usual else MAX_HEADER_BYTES, MAX_HEADER_BYTES)


class HeaderReader:
    """A position in a header, and reads that cannot leave it. Raises ModelFileError."""

    def __init__(self, buffer: bytearray, size: int, path: Path):
        """`buffer`: the first `header_bytes(size)` of a file of `size` bytes."""
        self.buffer = buffer
        self.end = len(buffer)
        self.size = size
        self.path = path
        self.pos = 0
        self.n_entries = 0

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def need(self, n_bytes: int, what: str) -> None:
        """Raise unless n_bytes are left."""
        if n_bytes <= self.end - self.pos:
            return
        if self.end < self.size:
            longer = f"the header is longer than {MAX_HEADER_BYTES} bytes at {what}"
            raise HeaderGoesOn(f"{self.path}: {longer}")
        raise self.fail(
            f"the header is truncated: {what} needs {n_bytes} bytes at byte {self.pos}, "
            f"{self.end - self.pos} are left: download the file again"
        )

    def few(self, count: int, what: str) -> None:
        """Raise where these are more entries, with all before them, than any model has."""
        self.n_entries += count
        if self.n_entries > MAX_ENTRIES:
            raise self.fail(f"{count} {what}: at most {MAX_ENTRIES} entries are read in all")

    def scalar(self, code: str, what: str) -> Value:
        n = struct.calcsize("<" + code)
        self.need(n, what)
        (value,) = struct.unpack_from("<" + code, self.buffer, self.pos)
        self.pos += n
        return value

    def string(self, what: str) -> str:
        n = self.scalar("Q", f"the length of {what}")
        self.need(n, what)
        raw = self.buffer[self.pos : self.pos + n]
        self.pos += n
        return self.decoded(raw, what)

    def decoded(self, raw: bytes | bytearray, what: str) -> str:
        """The text of a string's bytes."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None

    def name(self, what: str) -> str:
        """A string that messages can print as it is: no control characters, no great length."""
        text = self.string(what)
        if not text or len(text) > MAX_NAME or not text.isprintable():
            raise self.fail(f"{what} is not a printable name of 1 to {MAX_NAME}: {text[:40]!r}")
        return text

    def header(self) -> tuple[int, int]:
        """Magic and version; the counts of tensors and of metadata values."""
        magic = bytes(self.buffer[:4])
        if magic != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {magic!r}, not b'GGUF'")
        self.pos = 4
        version = self.scalar("I", "the version")
        if version in (0x02000000, 0x03000000):
            raise self.fail("this is a big-endian GGUF file: convert it to little-endian")
        if version == 1:
            raise self.fail("GGUF version 1 is too old: convert the model again")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not known: versions 2 and 3 are")
        return self.scalar("Q", "the tensor count"), self.scalar("Q", "the metadata count")

    def metadata(self, count: int) -> dict[str, Value]:
        self.need(count * 13, f"{count} metadata values")  # key length, type and one byte at least
        self.few(count, "metadata values")
        values: dict[str, Value] = {}
        for i in range(count):
            key = self.name(f"metadata key {i}")
            if key in values:
                raise self.fail(f"metadata key {key!r} occurs twice")
            values[key] = self.value(self.scalar("I", f"the type of {key!r}"), key, 0)
        return values

    def value(self, kind: int, key: str, depth: int) -> Value:
        if kind == _STRING:
            return self.string(f"metadata {key!r}")
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        if kind == 7:
            return self.scalar("B", f"metadata {key!r}") != 0
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], f"metadata {key!r}")
        raise self.fail(f"metadata {key!r} has value type {kind}, which GGUF does not define")

    def array(self, key: str, depth: int) -> Sequence[Value]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"metadata {key!r} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self.scalar("I", f"the element type of {key!r}")
        count = self.scalar("Q", f"the length of {key!r}")
        if kind not in _SCALARS and kind not in _MIN_VALUE_BYTES:
            raise self.fail(f"metadata {key!r} has element type {kind}, which GGUF does not define")
        code = _SCALARS.get(kind)
        size = struct.calcsize("<" + code) if code else _MIN_VALUE_BYTES[kind]
        self.need(count * size, f"the array {key!r} of {count} values")
        if kind == _STRING:
            return self.strings(key, count)
        if code is None:
            self.few(count, f"arrays in {key!r}")
            return [self.value(kind, key, depth) for _ in range(count)]
        start, self.pos = self.pos, self.pos + count * size
        elements: Any = memoryview(self.buffer)[start : self.pos]
        values: list[Value] = elements.cast(code).tolist()  # little-endian, as every host here
        return values

    def strings(self, key: str, count: int) -> Strings:
        """As `string`, count times: all are found and known to be UTF-8, none is decoded yet."""
        view = memoryview(self.buffer)[self.pos :]
        length = struct.Struct("<Q").unpack_from
        starts = array("Q")
        add = starts.append
        long: list[int] = []
        pos, last = 0, len(view) - 8
        for _ in range(count):
            if pos > last:
                break
            (n,) = length(view, pos)
            start = pos + 8
            add(start)
            pos = start + n
            if n > 127:
                long.append(start)
        if pos > len(view):  # by the last of them
            start = starts.pop()
            self.pos += start
            self.need(pos - start, f"string {len(starts)} of {key!r}")
        if len(starts) < count:
            self.pos += pos
            self.need(8, f"string {len(starts)} of {key!r}")
        self.pos += pos
        add(pos + 8)
        raw = bytearray(view[:pos])
        for start in long:  # the bytes of other lengths are ASCII: no part of a longer character
            raw[start - 8 : start] = bytes(8)
        try:
            raw.decode()  # a tenth of the time that all take one by one
        except UnicodeDecodeError as error:
            i = bisect_right(starts, error.start) - 1
            self.decoded(raw[starts[i] : starts[i + 1] - 8], f"string {i} of {key!r}")  # raises
        return Strings(bytes(raw), starts)

    def tensor_table(self, count: int) -> list[tuple[str, QuantType, tuple[int, ...], int, int]]:
        """(name, type, shape, offset in the data section, bytes) of each tensor."""
        self.need(count * 32, f"the table of {count} tensors")  # 8 + 4 + 8 + 4 + 8 bytes at least
        self.few(count, "tensors")
        table = []
        seen: set[str] = set()
        for i in range(count):
            name = self.name(f"the name of tensor {i}")
            if name in seen:
                raise self.fail(f"tensor {name} occurs twice")
            seen.add(name)
            shape = self.shape(name)
            quant = quant_type(self.scalar("I", f"the type of tensor {name}"), name)
            offset = self.scalar("Q", f"the offset of tensor {name}")
            if shape[-1] % quant.block_size:
                raise self.fail(
                    f"tensor {name} has rows of {shape[-1]} values, not a multiple of the "
                    f"{quant.block_size} values in a {quant.name} block"
                )
            nbytes = math.prod(shape) // quant.block_size * quant.block_bytes
            table.append((name, quant, shape, offset, nbytes))
        return table

    def shape(self, name: str) -> tuple[int, ...]:
        """NumPy order: the file lists the contiguous dimension first."""
        n_dims = self.scalar("I", f"the dimensions of tensor {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name} has {n_dims} dimensions, 1 to {MAX_DIMS} are possible")
        dims = [self.scalar("Q", f"the shape of tensor {name}") for _ in range(n_dims)]
        if 0 in dims:
            raise self.fail(f"tensor {name} has a dimension of 0: {dims}")
        return tuple(reversed(dims))

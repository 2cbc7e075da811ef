"""The reader takes sound files as they are and refuses damaged ones with the reason."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as V
from ggufs import RawGGUF, array, key_value, tensor_entry, text, write_gguf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import MinferError, ModelFileError, UnsupportedModelError
from minfer_cuda.gguf import GGUFFile, _Part
from minfer_cuda.gguf_header import Strings
from minfer_cuda.info import SHOWN_VALUES, describe

U64_MAX = (1 << 64) - 1
F32, Q8_0 = 0, 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"attn_q": "Q4_K", "attn_v": "Q6_K", "output": "Q8_0", "default": "F16"}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", types=types)


def opened(path: Path, raw: RawGGUF | bytes) -> GGUFFile:
    path = path / "x.gguf"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.build())
    return GGUFFile.open(path)


def refused(path: Path, raw: RawGGUF | bytes, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        opened(path, raw)


def one_tensor(dims: list[int], kind: int = F32, offset: int = 0, n_data: int = 128) -> RawGGUF:
    return RawGGUF(entries=[tensor_entry("t", dims, kind, offset)], data=bytes(n_data))


# --- sound files ---


def test_tensors_equal_those_of_the_gguf_package(tiny: Path) -> None:
    reference = {t.name: t for t in gguf.GGUFReader(tiny).tensors}
    with GGUFFile.open(tiny) as file:
        assert list(file.tensors) == list(reference)
        for name, info in file.tensors.items():
            want = reference[name]
            assert info.type_name == want.tensor_type.name
            assert info.shape == tuple(int(n) for n in reversed(want.shape))
            assert (info.offset, info.nbytes) == (want.data_offset, want.n_bytes)
            data = file.data(name)
            assert data.dtype == np.uint8
            np.testing.assert_array_equal(data, want.data.reshape(-1).view(np.uint8))
        assert file.size_bytes == tiny.stat().st_size


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(tmp_path: Path, version: int) -> None:
    scalars = {
        "B": (0, 200), "b": (1, -3), "H": (2, 65535), "h": (3, -4), "I": (4, 1 << 31),
        "i": (5, -5), "f": (6, 0.5), "?": (7, True), "Q": (10, U64_MAX), "q": (11, -6),
        "d": (12, 1e300),
    }  # fmt: skip
    values = [key_value(c, k, struct.pack("<" + c, v)) for c, (k, v) in scalars.items()]
    values.append(key_value("text", 8, text("żółw")))
    values.append(key_value("ints", 9, array(5, 3, struct.pack("<3i", -1, 0, 7))))
    values.append(key_value("texts", 9, array(8, 2, text("") + text("b"))))
    nested = array(9, 2, array(2, 1, struct.pack("<H", 9)) + array(8, 1, text("c")))
    values.append(key_value("nested", 9, nested))
    values.append(key_value("none", 9, array(8, 0)))
    with opened(tmp_path, RawGGUF(values=values, version=version)) as file:
        got = file.metadata
    assert [got[c] for c in scalars] == [v for _, v in scalars.values()]
    assert got["?"] is True
    assert (got["text"], got["ints"], got["texts"]) == ("żółw", [-1, 0, 7], ["", "b"])
    assert (got["nested"], got["none"]) == ([[9], ["c"]], [])


@pytest.mark.parametrize(
    ("kind", "code", "values"),
    [
        (0, "B", [0, 255]), (1, "b", [-128, 127]), (2, "H", [0, 65535]), (3, "h", [-32768, 1]),
        (4, "I", [0, (1 << 32) - 1]), (5, "i", [-(1 << 31), 1]), (6, "f", [0.5, -0.0]),
        (7, "B", [0, 1, 2, 255]), (10, "Q", [0, U64_MAX]), (11, "q", [-(1 << 63), 1]),
        (12, "d", [1e300, 5e-324]),
    ],
)  # fmt: skip
def test_an_array_of_every_number_type_is_read_wherever_it_lies(
    tmp_path: Path, kind: int, code: str, values: list[float]
) -> None:
    packed = array(kind, len(values), struct.pack(f"<{len(values)}{code}", *values))
    want = [v != 0 for v in values] if kind == 7 else values
    for shift in range(3):
        raw = RawGGUF(values=[key_value("k" * (1 + shift), 9, packed)])
        with opened(tmp_path, raw) as file:
            (got,) = file.metadata.values()
        assert repr(got) == repr(want)


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_the_files_alignment_is_used(tmp_path: Path, alignment: int) -> None:
    raw = one_tensor([2], n_data=8)
    raw.alignment = alignment
    raw.values = [key_value("general.alignment", 4, struct.pack("<I", alignment))]
    raw.data = struct.pack("<2f", 1.5, 2.5)
    with opened(tmp_path, raw) as file:
        assert file.data("t").view("<f4").tolist() == [1.5, 2.5]


def test_data_outlives_the_file(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file:
        norm = file.data("output_norm.weight")
    assert np.isfinite(norm.view("<f4")).all()
    with pytest.raises(ModelFileError, match="has been closed"):
        file.data("output_norm.weight")
    file.close()


def test_an_unknown_tensor_is_named(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file, pytest.raises(ModelFileError, match="no tensor blk.9"):
        file.data("blk.9")


# --- files that are something else ---


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"version https://git-lfs", "not a GGUF file: it starts with b'vers'"),
        (b"GGUF", "truncated: the version"),
        (b"GGUF\x01\0\0\0" + bytes(40), "version 1 is too old"),
        (b"GGUF\x04\0\0\0" + bytes(40), "version 4 is not known"),
        (b"GGUF\0\0\0\x03" + bytes(40), "big-endian"),
        (b"GGUF\0\0\0\x02" + bytes(40), "big-endian"),
        (b"GGUF\x03\0\0\0" + bytes(7), "truncated: the tensor count"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, raw: bytes, match: str) -> None:
    refused(tmp_path, raw, match)


def test_paths_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        GGUFFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be opened"):
        GGUFFile.open("a\0b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_refused_without_waiting_on_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open(tmp_path / "pipe.gguf")


# --- counts and lengths that lie ---


@pytest.mark.parametrize("huge", [1 << 20, 1 << 32, 1 << 63, U64_MAX])
def test_huge_counts_are_compared_with_the_bytes_left(tmp_path: Path, huge: int) -> None:
    refused(tmp_path, RawGGUF(n_values=huge), f"truncated: {huge} metadata values")
    refused(tmp_path, RawGGUF(n_tensors=huge), f"truncated: the table of {huge} tensors")
    for kind in (0, 5, 8, 9, 12):
        raw = RawGGUF(values=[key_value("k", 9, array(kind, huge))])
        refused(tmp_path, raw, f"truncated: the array 'k' of {huge} values")
    lengths = struct.pack("<Q", huge)
    refused(tmp_path, RawGGUF(values=[key_value("k", 8, lengths)]), "truncated: metadata 'k'")
    values = [key_value("k", 9, array(8, 1, lengths))]
    refused(tmp_path, RawGGUF(values=values), "truncated: string 0 of 'k'")
    refused(tmp_path, RawGGUF(values=[lengths + bytes(20)]), "truncated: metadata key 0")
    refused(tmp_path, RawGGUF(entries=[lengths + bytes(40)]), "truncated: the name of tensor 0")


def test_a_string_one_byte_short_at_the_very_end_is_truncated(tmp_path: Path) -> None:
    values = [key_value("k", 9, array(8, 2, text("ab") + text("cde")))]
    raw = RawGGUF(values=values).build()
    opened(tmp_path, raw).close()
    refused(tmp_path, raw[:-1], "truncated: string 1 of 'k'")


def test_a_header_longer_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minfer_cuda.gguf_header.MAX_HEADER_BYTES", 100)
    refused(tmp_path, RawGGUF(values=[key_value("k", 8, text("x" * 200))]), "longer than 100")


def test_no_more_of_a_file_is_read_than_its_header_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minfer_cuda.gguf_header.USUAL_HEADER_BYTES", 120)
    sizes: list[int] = []
    read = _Part.read
    monkeypatch.setattr(
        _Part, "read", lambda self, at, into: (sizes.append(len(into)), read(self, at, into))
    )
    for length, sizes_read in ((10, [120]), (300, [120, 1024])):
        raw = RawGGUF(values=[key_value("k", 8, text("x" * length))]).build()
        with opened(tmp_path, raw.ljust(1024, b"\0")) as file:
            assert file.metadata["k"] == "x" * length
        assert sizes == sizes_read
        sizes.clear()


def test_nesting_is_bounded(tmp_path: Path) -> None:
    three = array(9, 1, array(9, 1, array(0, 1, b"\0")))
    refused(tmp_path, RawGGUF(values=[key_value("k", 9, three)]), "nests arrays deeper than 2")
    deep = b"".join(array(9, 1) for _ in range(50_000))
    refused(tmp_path, RawGGUF(values=[key_value("k", 9, deep)]), "nests arrays deeper than 2")


def test_unknown_value_types_are_named(tmp_path: Path) -> None:
    refused(tmp_path, RawGGUF(values=[key_value("k", 13, bytes(8))]), "'k' has value type 13")
    values = [key_value("k", 9, array(99, 1, bytes(8)))]
    refused(tmp_path, RawGGUF(values=values), "'k' has element type 99")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, RawGGUF(values=[key_value("k", 8, text(b"\xff"))]), "'k' is not UTF-8")
    values = [key_value("k", 9, array(8, 2, text("a") + text(b"\xe6\xad")))]
    refused(tmp_path, RawGGUF(values=values), "string 1 of 'k' is not UTF-8")


PIECES = [b"", b"a\0", "żó".encode(), "\u6b63\U0001f600".encode(), b"\xe6", b"\xad\xa3", b"\xff"]
BYTES = st.sampled_from(PIECES) | st.binary(max_size=4) | st.text(max_size=300).map(str.encode)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.lists(BYTES, max_size=8))
@example(raw=[b"\xc3", b"x" * 128])  # the length would end the character
@example(raw=[b"x" * 0xC3 + b"\xc3", b"\xa9"])
@example(raw=["é".encode() * 64, b"a" * 127, b"b" * 128, b"c" * 300, b""])
def test_an_array_of_strings_is_what_decoding_one_by_one_gives(
    tmp_path: Path, raw: list[bytes]
) -> None:
    file = RawGGUF(values=[key_value("k", 9, array(8, len(raw), b"".join(map(text, raw))))])
    want = []
    for i, one in enumerate(raw):
        try:
            want.append(one.decode())
        except UnicodeDecodeError as e:
            match = f"string {i} of 'k' is not UTF-8: {e.reason} at byte {e.start}$"
            refused(tmp_path, file, match)
            return
    with opened(tmp_path, file) as found:
        got = found.metadata["k"]
    assert (len(got), list(got), got[:], repr(got)) == (len(want), want, want, repr(want))
    assert got == want and want == got and got != [*want, "x"]
    assert [got[i] for i in range(-len(want), len(want))] == want * 2
    assert (got[1:6:2], got[-2:]) == (want[1:6:2], want[-2:])
    for outside in (len(want), -len(want) - 1):
        with pytest.raises(IndexError):
            got[outside]


def test_no_string_of_an_array_is_decoded_before_it_is_asked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    one = Strings.__getitem__
    monkeypatch.setattr(Strings, "__iter__", lambda self: pytest.fail("all are decoded"))
    monkeypatch.setattr(Strings, "__getitem__", lambda self, i: (asked.append(i), one(self, i))[1])
    with GGUFFile.open(tiny) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        config = Qwen2Config.from_gguf(file)
        assert config.n_vocab == len(tokens) > 200 and asked == []
        describe(file, config)
    assert {i for i in asked if isinstance(i, int)} == set(range(SHOWN_VALUES))


@pytest.mark.parametrize("name", ["", "a\x1b[31m", "x" * 2000])
def test_names_that_cannot_be_printed_are_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path, RawGGUF(values=[key_value(name, 0, bytes(20))]), "not a printable name")
    refused(tmp_path, RawGGUF(entries=[tensor_entry(name, [1], F32, 0)]), "not a printable name")


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    values = [key_value("k", 0, b"\1"), key_value("k", 0, b"\2")]
    refused(tmp_path, RawGGUF(values=values), "'k' occurs twice")
    entries = [tensor_entry("t", [8], F32, 0), tensor_entry("t", [8], F32, 32)]
    refused(tmp_path, RawGGUF(entries=entries, data=bytes(64)), "tensor t occurs twice")


@pytest.mark.parametrize("value", [0, 3, 48, 1 << 21, 1 << 30, 1 << 31])
def test_a_bad_alignment_is_refused(tmp_path: Path, value: int) -> None:
    raw = RawGGUF(values=[key_value("general.alignment", 4, struct.pack("<I", value))])
    refused(tmp_path, raw, f"general.alignment is {value}, not a power of two")


def test_an_alignment_that_is_no_number_is_refused(tmp_path: Path) -> None:
    for raw in (
        key_value("general.alignment", 8, text("32")),
        key_value("general.alignment", 7, b"\1"),
    ):
        refused(tmp_path, RawGGUF(values=[raw]), "general.alignment is .* not a power of two")


# --- tensors ---


@pytest.mark.parametrize("n_dims", [0, 5, 0xFFFFFFFF])
def test_dimension_counts_out_of_range_are_refused(tmp_path: Path, n_dims: int) -> None:
    entry = text("t") + struct.pack("<I", n_dims) + bytes(60)
    refused(tmp_path, RawGGUF(entries=[entry]), f"t has {n_dims} dimensions")


@pytest.mark.parametrize("dims", [[(1 << 42) + 1, 1 << 22], [U64_MAX, 2], [1 << 32, 1 << 32]])
def test_sizes_past_64_bits_do_not_wrap(tmp_path: Path, dims: list[int]) -> None:
    refused(tmp_path, one_tensor(dims), "tensor t")


def test_a_dimension_of_zero_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, one_tensor([8, 0]), "t has a dimension of 0")


@pytest.mark.parametrize("offset", [1 << 40, U64_MAX - 31, U64_MAX - 63])
def test_offsets_outside_the_file_are_refused(tmp_path: Path, offset: int) -> None:
    refused(tmp_path, one_tensor([8], offset=offset), "t lies outside the file")


@pytest.mark.parametrize("offset", [1, 4, 31, U64_MAX])
def test_unaligned_offsets_are_refused(tmp_path: Path, offset: int) -> None:
    refused(tmp_path, one_tensor([8], offset=offset), f"t is unaligned: offset {offset}")


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    entries = [tensor_entry("a", [16], F32, 0), tensor_entry("b", [8], F32, 32)]
    refused(tmp_path, RawGGUF(entries=entries, data=bytes(96)), "a and b overlap")
    entries = [tensor_entry("a", [8], F32, 32), tensor_entry("b", [8], F32, 32)]
    refused(tmp_path, RawGGUF(entries=entries, data=bytes(96)), "a and b overlap")


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, one_tensor([33, 2], Q8_0), "t has rows of 33 values.*32 values in a Q8_0")


@pytest.mark.parametrize("kind", [4, 31, 38, 250])
def test_unknown_tensor_types_are_refused_by_name(tmp_path: Path, kind: int) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"tensor t has .*{kind}"):
        opened(tmp_path, one_tensor([32], kind))


def test_a_file_without_its_last_byte_is_truncated(tmp_path: Path) -> None:
    raw = one_tensor([32], n_data=128)
    opened(tmp_path, raw).close()
    refused(tmp_path, raw.build()[:-1], "truncated: tensor t ends at byte")


def test_a_file_cut_anywhere_in_its_header_is_refused(tmp_path: Path) -> None:
    values = [key_value("k", 9, array(8, 2, text("ab") + text("c"))), key_value("n", 4, bytes(4))]
    raw = RawGGUF(
        values=values, entries=[tensor_entry("t", [8, 2], F32, 0)], data=bytes(64)
    ).build()
    for cut in range(len(raw)):
        with pytest.raises(ModelFileError):
            opened(tmp_path, raw[:cut])


@pytest.mark.parametrize("damage", ["truncate", "rewrite"])
def test_a_file_changed_while_open_is_noticed_before_its_data_is_read(
    tmp_path: Path, damage: str
) -> None:
    path = one_tensor([32]).write(tmp_path / "x.gguf")
    with GGUFFile.open(path) as file:
        if damage == "truncate":
            changed = path.stat().st_mtime_ns
            os.truncate(path, 40)
            os.utime(path, ns=(changed, changed))  # the size alone gives it away
        else:
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(1, 1))  # not left to the clock's resolution
        with pytest.raises(ModelFileError, match="changed while open"):
            file.data("t")


def test_a_file_replaced_while_open_is_still_read(tmp_path: Path) -> None:
    raw = one_tensor([2], n_data=8)
    raw.data = struct.pack("<2f", 1.5, 2.5)
    path = raw.write(tmp_path / "x.gguf")
    with GGUFFile.open(path) as file:
        (tmp_path / "y.gguf").write_bytes(b"something else")
        os.replace(tmp_path / "y.gguf", path)
        assert file.data("t").view("<f4").tolist() == [1.5, 2.5]


# --- split files ---


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", split_max_tensors=12)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_a_split_model_equals_the_whole_one(parts: list[Path], tmp_path: Path) -> None:
    assert len(parts) == 3
    whole = write_gguf(tmp_path / "whole.gguf")
    with GGUFFile.open(parts[0]) as file, GGUFFile.open(whole) as want:
        assert file.n_parts == 3
        assert file.size_bytes == sum(p.stat().st_size for p in parts)
        assert set(file.tensors) == set(want.tensors)
        assert {k: v for k, v in file.metadata.items() if k[:6] != "split."} == want.metadata
        for name in want.tensors:
            np.testing.assert_array_equal(file.data(name), want.data(name))


@pytest.mark.parametrize("i", [1, 2])
def test_a_later_part_names_the_first(parts: list[Path], i: int) -> None:
    match = rf"part {i + 1} of 3: open m-00001-of-00003\.gguf"
    with pytest.raises(ModelFileError, match=match):
        GGUFFile.open(parts[i])


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf does not exist: part 2 of 3"):
        GGUFFile.open(parts[0])


def test_a_renamed_part_is_refused(parts: list[Path]) -> None:
    parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ModelFileError, match="not named NAME-00001-of-00003.gguf"):
        GGUFFile.open(parts[0].with_name("model.gguf"))
    parts[1].rename(parts[0])
    with pytest.raises(ModelFileError, match="named part 1 of 3, but says that it is part 2 of 3"):
        GGUFFile.open(parts[0])


def test_the_wrong_part_in_anothers_place_is_refused(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFileError, match="says that it is part 3 of 3, expected part 2 of 3"):
        GGUFFile.open(parts[0])


def test_a_truncated_part_is_named(parts: list[Path]) -> None:
    os.truncate(parts[2], parts[2].stat().st_size - 4096)
    with pytest.raises(ModelFileError, match=r"00003-of-00003\.gguf is truncated"):
        GGUFFile.open(parts[0])


def split_part(path: Path, number: int, count: int, total: int, width: str, name: str) -> None:
    kind = {"H": 2, "I": 4, "i": 5, "Q": 10}[width]
    meta = {"split.no": number, "split.count": count, "split.tensors.count": total}
    values = [key_value(k, kind, struct.pack("<" + width, v)) for k, v in meta.items()]
    entries = [tensor_entry(name, [8], F32, 0)]
    file = path / f"s-{number + 1:05d}-of-{count:05d}.gguf"
    RawGGUF(values=values, entries=entries, data=bytes(32)).write(file)


@pytest.mark.parametrize("width", "HIiQ")
def test_split_counts_of_any_width_are_read(tmp_path: Path, width: str) -> None:
    for i in range(2):
        split_part(tmp_path, i, 2, 2, width, f"t{i}")
    with GGUFFile.open(tmp_path / "s-00001-of-00002.gguf") as file:
        assert [t.part for t in file.tensors.values()] == [0, 1]


def test_parts_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    for i in range(2):
        split_part(tmp_path, i, 2, 3, "H", f"t{i}")
    with pytest.raises(ModelFileError, match="2 parts hold 2 tensors, split.tensors.count is 3"):
        GGUFFile.open(tmp_path / "s-00001-of-00002.gguf")


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    for i in range(2):
        split_part(tmp_path, i, 2, 2, "H", "t")
    with pytest.raises(ModelFileError, match="tensor t is in two parts"):
        GGUFFile.open(tmp_path / "s-00001-of-00002.gguf")


def test_a_split_count_that_is_no_count_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", layers=1, metadata={"split.count": (V.STRING, "2")})
    with pytest.raises(ModelFileError, match="split.count is '2', not a count"):
        GGUFFile.open(tmp_path / "x.gguf")


# --- any damage at all ---


def check_layout(file: GGUFFile) -> None:
    """What an accepted file promises: its tensors lie inside it, aligned and apart."""
    alignment = file.metadata.get("general.alignment", 32)
    end = 0
    for info in sorted(file.tensors.values(), key=lambda t: t.offset):
        assert info.offset >= end and info.offset % alignment == 0
        end = info.offset + info.nbytes
    assert end <= file.size_bytes


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 299),
            st.sampled_from([0, 1, 2, 4, 8, 9, 12, 31, 32, 127, 128, 255]) | st.integers(0, 255),
        ),
        min_size=1,
        max_size=6,
    ),
    cut=st.none() | st.integers(0, 400),
)
def test_no_damage_gives_anything_but_our_errors(
    tmp_path: Path, edits: list[tuple[int, int]], cut: int | None
) -> None:
    values = [
        key_value("general.alignment", 4, struct.pack("<I", 32)),
        key_value("names", 9, array(8, 3, text("ab") + text("") + text("cde"))),
        key_value("nested", 9, array(9, 1, array(4, 2, bytes(8)))),
        key_value("flag", 7, b"\1"),
    ]
    entries = [
        tensor_entry("a", [32, 2], Q8_0, 0),
        tensor_entry("b", [8], F32, 96),
        tensor_entry("c", [4, 2, 2], F32, 128),
    ]
    raw = bytearray(RawGGUF(values=values, entries=entries, data=bytes(192)).build())
    for at, byte in edits:
        raw[at] = byte
    try:
        with opened(tmp_path, bytes(raw[:cut])) as file:
            check_layout(file)
    except MinferError:
        pass

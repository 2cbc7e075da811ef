from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minfer_cuda.errors import UsageError
from minfer_cuda.stops import StopMatcher, TextStream

FEW_LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


class Bytes:
    """A tokenizer whose ids are bytes, except 256: a control token."""

    def token_bytes(self, token):
        return b"" if token == 256 else bytes([token])


def cut(value, places):
    ends = sorted({p % (len(value) + 1) for p in places} | {len(value)})
    return [value[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def at_first_stop(text, stops):
    """Earliest start, then longest: by brute force over the whole text."""
    for start in range(len(text)):
        found = [s for s in stops if text.startswith(s, start)]
        if found:
            return text[:start], max(found, key=len)
    return text, None


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@example("👨‍👩‍👧".encode())
@example(b"a\x80b\xe6\xad")
def test_streamed_bytes_are_the_text_decoded_at_once(data):
    stream = TextStream(Bytes())
    assert "".join(map(stream.push, data)) + stream.finish() == data.decode("utf-8", "replace")


def test_a_character_is_held_until_it_is_whole_and_a_dangling_one_flushed():
    stream = TextStream(Bytes())
    assert [stream.push(b) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert [stream.push(b) for b in b"\xf0\x9f"] == ["", ""]
    assert stream.finish() == "\ufffd"


@given(FEW_LETTERS, STOPS, st.lists(st.integers(0, 30)))
@example("abcd", ["bc", "abcx"], [1, 2, 3])
def test_any_split_stops_where_the_whole_text_would(text, stops, places):
    matcher = StopMatcher(stops)
    out = ""
    for piece in cut(text, places):
        out += matcher.push(piece)
        assert at_first_stop(text, stops)[0].startswith(out)
    out += matcher.finish()
    assert (out, matcher.stopped) == at_first_stop(text, stops)
    if matcher.stopped is not None:
        assert matcher.push("more") == matcher.finish() == ""


@given(FEW_LETTERS, STOPS)
def test_only_what_may_become_a_stop_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(c) for c in text)
    if matcher.stopped is None:
        held = text[len(out) :]
        assert held == "" or any(s.startswith(held) for s in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stopped"),
    [
        (["DEFGHIJ"], ["ABC", "DEFG", "HIJ", "K"], "ABC", "DEFGHIJ"),
        (["beta gamma"], ["alpha ", "beta", " gam", "ma delta"], "alpha ", "beta gamma"),
        ([".."], ["well", "...", "x"], "well", ".."),
        (["please"], ["say pl"], "say pl", None),
        (["ab", "abc"], ["xab", "c"], "x", "abc"),
        (["ab", "abc"], ["xab"], "x", "ab"),
        (["bc", "abcd"], ["abc", "x"], "a", "bc"),
        ([], ["all"], "all", None),
    ],
)
def test_stop_strings_inside_and_across_pieces(stops, pieces, out, stopped):
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.push, pieces)) + matcher.finish() == out
    assert matcher.stopped == stopped


def test_an_empty_stop_string_is_a_usage_error():
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(["a", ""])


def test_ids_become_text_until_a_stop_string():
    stream = TextStream(Bytes(), ["é!"])
    data = "aéé!b".encode()
    assert [stream.push(b) for b in (*data[:1], 256, *data[1:])] == [
        "a", "", "", "", "", "é", "", ""
    ]  # fmt: skip
    assert stream.stopped == "é!"
    assert stream.finish() == ""


def test_the_end_releases_held_text_and_may_still_find_the_stop():
    stream = TextStream(Bytes(), ["a\ufffd", "b"])
    assert [stream.push(b) for b in b"xa\xe6"] == ["x", "", ""]
    assert stream.finish() == ""
    assert stream.stopped == "a\ufffd"
    stream = TextStream(Bytes(), ["ab"])
    assert [stream.push(b) for b in b"xa"] == ["x", ""]
    assert stream.finish() == "a"
    assert stream.stopped is None

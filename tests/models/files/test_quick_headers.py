"""The quick way through a safetensors header takes nothing that the careful way does not, and says the same."""

import json

import pytest

from ffncli.errors import FFNError
from ffncli.models.files import headers

ENTRIES = {
    "a.weight": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [6, 10]},
    "é": {"dtype": "BF16", "shape": [5], "data_offsets": [10, 20]},
}
METADATA = {"__metadata__": {"format": "pt"}}
STYLES = {"compact": (",", ":"), "spaced": (", ", ": ")}


def _header(style: str, entries: object) -> bytes:
    return json.dumps(entries, separators=STYLES[style], ensure_ascii=False).encode()


def _carefully(raw: bytes, size: int) -> headers.Columns | None:
    try:
        return headers._careful_columns(raw, size, "x")
    except FFNError:
        return None


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("metadata", [{}, METADATA, {"__metadata__": {}}], ids=["none", "some", "empty"])
def test_a_header_as_writers_write_it_goes_the_quick_way(style, metadata):
    raw = _header(style, {**metadata, **ENTRIES})
    quick = headers._quick_columns(raw + b"   ", 20)
    assert quick is not None
    assert quick == headers._careful_columns(raw + b"   ", 20, "x")
    assert (quick.starts, quick.data) == ([0, 6, 10], 8 + len(raw) + 3)
    assert quick.shapes == [(2, 3), (), (5,)]
    assert quick.bytes == [6, 4, 10]


@pytest.mark.parametrize("style", STYLES)
def test_no_other_byte_makes_the_quick_way_take_more(style):
    """Every byte left out, doubled, or replaced by one that means something in JSON."""
    raw = _header(style, {**METADATA, **ENTRIES})
    taken = 0
    for at in range(len(raw)):
        for byte in (b"", raw[at : at + 1] * 2, *(bytes([b]) for b in b'",:{}[] 0179-+.eE\\\n\t\x00\x7f\xff_')):
            changed = raw[:at] + byte + raw[at + 1 :]
            quick = headers._quick_columns(changed, 20)
            taken += quick is not None
            assert quick is None or quick == _carefully(changed, 20), changed
    assert taken > 100  # letters of names may change


@pytest.mark.parametrize(
    "entries",
    [
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]},:[1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b'{"__metadata__":{"x":1},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{}"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{}}',
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}',
        b"{}",
    ],
)
def test_what_is_wrong_goes_the_careful_way(entries):
    assert headers._quick_columns(entries, 2) is None

"""safetensors headers that are broken or odd, and how the safetensors library itself reads a file."""

import json

import safetensors
import torch
from hypothesis import strategies as st

from tests.oracles.checkpoints import entry, raw_safetensors

A, B = entry(), entry("BF16", (4,), (8, 16))
DEEP = b"[" * 200 + b"]" * 200
BROKEN: dict[str, bytes] = {
    "an empty file": b"",
    "less than a length": b"\x02\0\0",
    "a length alone": (2).to_bytes(8, "little"),
    "a length of zero": bytes(8),
    "a header past the end": raw_safetensors(b"{}", 0, 3),
    "a header of 2^64 - 1 bytes": raw_safetensors(b"{}", 0, 2**64 - 1),
    "text": b"not a safetensors file at all",
    "a pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtins",
    "a header that is no JSON": raw_safetensors(b"xx"),
    "a header that is a list": raw_safetensors([], 0),
    "a header of NULs": raw_safetensors(bytes(16), 0),
    "a header with NULs behind": raw_safetensors(b"{}\0\0", 0),
    "a byte order mark": raw_safetensors(b"\xef\xbb\xbf{}", 0),
    "UTF-16": raw_safetensors("{}".encode("utf-16-le"), 0),
    "not UTF-8": raw_safetensors(b'{"\xff": 1}', 0),
    "an encoded surrogate": raw_safetensors(b'{"\xed\xa0\x80": %s}' % json.dumps(A).encode()),
    "half a surrogate pair": raw_safetensors({"\ud800": A}),
    "NaN": raw_safetensors(b'{"a": NaN}'),
    "5000 digits": raw_safetensors(b'{"a": %s}' % (b"1" * 5000)),
    "100,000 levels": raw_safetensors(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "200 levels in an unknown field": raw_safetensors(
        json.dumps({"a": {**A, "x": 0}}).encode().replace(b"0}}", DEEP + b"}}")
    ),
    "1e999 in an unknown field": raw_safetensors(json.dumps({"a": {**A, "x": "@"}}).encode().replace(b'"@"', b"1e999")),
    "400 digits in an unknown field": raw_safetensors({"a": {**A, "x": 10**400}}),
    "a tensor twice": raw_safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(A).encode(),) * 2)),
    "a field twice": raw_safetensors(b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
    "metadata that is a list": raw_safetensors({"__metadata__": [], "a": A}),
    "metadata with a number": raw_safetensors({"__metadata__": {"n": 1}, "a": A}),
    "metadata with an object": raw_safetensors({"__metadata__": {"n": {}}, "a": A}),
    "a tensor that is null": raw_safetensors({"a": None}, 0),
    "a tensor that is a string": raw_safetensors({"a": "F32"}, 0),
    "no dtype": raw_safetensors({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "no shape": raw_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "no offsets": raw_safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "an unknown dtype": raw_safetensors({"a": entry("F128", (1,))}),
    "a dtype in small letters": raw_safetensors({"a": entry("f32")}),
    "a dtype that is a number": raw_safetensors({"a": entry(32)}),
    "a negative size": raw_safetensors({"a": entry(shape=(-2,))}),
    "two negative sizes": raw_safetensors({"a": entry(shape=(-2, -1))}),
    "a size of minus zero": raw_safetensors(b'{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}', 0),
    "a size that is a float": raw_safetensors({"a": entry(shape=(2.0,))}),
    "a size that is true": raw_safetensors({"a": entry(shape=(True, 2))}),
    "a size of 10^30": raw_safetensors({"a": entry(shape=(10**30,))}),
    "sizes that overflow": raw_safetensors({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}, 0),
    "sizes that overflow before a zero": raw_safetensors({"a": entry(shape=(2**62, 4, 0), offsets=(0, 0))}, 0),
    "a shape that is a number": raw_safetensors({"a": entry(shape=2)}),
    "a shape that is null": raw_safetensors({"a": entry(shape=None)}),
    "a shape that does not fit": raw_safetensors({"a": entry(shape=(3,))}),
    "half a byte": raw_safetensors({"a": entry("F4", (3,), (0, 1))}, 1),
    "offsets the wrong way round": raw_safetensors({"a": entry(offsets=(8, 0))}),
    "one offset": raw_safetensors({"a": entry(offsets=(8,))}),
    "three offsets": raw_safetensors({"a": entry(offsets=(0, 8, 8))}),
    "negative offsets": raw_safetensors({"a": entry(offsets=(-8, 0))}),
    "offsets past the end": raw_safetensors({"a": entry(offsets=(2**40, 2**40 + 8))}),
    "two tensors on one place": raw_safetensors({"a": A, "b": A}),
    "an overlap": raw_safetensors({"a": A, "b": entry(offsets=(4, 12))}, 12),
    "a hole": raw_safetensors({"a": A, "b": entry(offsets=(12, 20))}, 20),
    "a hole in front": raw_safetensors({"a": entry(offsets=(4, 12))}, 12),
    "bytes behind": raw_safetensors({"a": A}, 9),
    "data cut short": raw_safetensors({"a": A}, 7),
    "data and no tensors": raw_safetensors({}, 1),
}


def theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Return a mapping from names to (dtype, shape) as the library reads the file; None if it refuses the file."""
    try:
        return {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(raw)}
    except safetensors.SafetensorError:
        return None


NAMES = [
    '"a"',
    '"b"',
    '"c"',
    '"\\u0061"',
    '""',
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"\\u001b[31m"',
    '"__metadata__"',
    "5",
]
TOKENS = [
    '"F32"', '"BF16"', '"U8"', '"F4"', '"F6_E2M3"', '"F8_E8M0"', '"C64"', '"F128"', '"\\ud800"', "[2]", "[0]", "[]",
    "[3]", "[2,2]", "[-0]", "[-1]", "[2.0]", "[2e0]", "[true]", "[[0]]", "[4611686018427387904,4,0]",
    "[0,4611686018427387904,4]", "[9223372036854775808,0]", "[18446744073709551616]", "[0,8]", "[8,16]", "[0,0]",
    "[8,8]", "[4,12]", "[8,0]", "[0,8,8]", "[-0,8]", "null", "true", "0", "1e999", "NaN", "{}", '{"a":"b"}', '{"a":1}',
    '{"a":"\\ud800"}', "[" * 126 + "]" * 126, "[" * 200 + "]" * 200, "1" * 400,
]  # fmt: skip
FIELDS = ['"dtype"', '"shape"', '"data_offsets"', '"extra"']


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draw a good file of up to three tensors, in which some JSON tokens, white space or bytes are then changed."""
    items, at = [], 0
    for name in draw(st.lists(st.sampled_from(NAMES[:3]), unique=True, max_size=3)):
        dtype, bytes_each = draw(st.sampled_from([('"F32"', 4), ('"BF16"', 2), ('"U8"', 1), ('"F64"', 8)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        end = at + bytes_each * torch.Size(shape).numel()
        items.append([name, {'"dtype"': dtype, '"shape"': json.dumps(shape), '"data_offsets"': f"[{at},{end}]"}])
        at = end
    items = draw(st.permutations(items))
    for kind in draw(st.lists(st.sampled_from(["name", "token", "token", "drop", "metadata", "size"]), max_size=2)):
        item = draw(st.sampled_from(items)) if items else None
        if kind == "size":
            at += draw(st.integers(-1, 1))
        elif kind == "metadata":
            items.append(['"__metadata__"', draw(st.sampled_from(TOKENS))])
        elif item and isinstance(item[1], dict):
            if kind == "name":
                item[0] = draw(st.sampled_from(NAMES))
            elif kind == "drop":
                item[1].pop(draw(st.sampled_from(FIELDS)), None)
            else:
                item[1][draw(st.sampled_from(FIELDS))] = draw(st.sampled_from(TOKENS))
    header = "{" + ",".join(f"{name}:{_joined(what)}" for name, what in items) + "}"
    before, after = (draw(st.sampled_from(["", "", "", " ", "\n", "\ufeff", "\0", ","])) for _ in range(2))
    raw = bytearray(raw_safetensors((before + header + after).encode(), max(at, 0)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        where = draw(st.integers(0, len(raw)))
        raw[where : where + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(raw)


def _joined(what: str | dict[str, str]) -> str:
    return what if isinstance(what, str) else "{" + ",".join(f"{k}:{v}" for k, v in what.items()) + "}"

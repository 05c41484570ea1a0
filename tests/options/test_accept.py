"""Every converter takes shell text and Python values alike, and refuses what it does not say that it takes."""

from pathlib import Path

import numpy as np
import pytest

from ffncli.options import accept
from ffncli.options.accept import Accepts

TAKEN = [
    (accept.COUNT, "4", 4), (accept.COUNT, 4, 4), (accept.COUNT, np.int64(4), 4), (accept.COUNT, " 7 ", 7),
    (accept.NATURAL, "0", 0), (accept.THREADS, 4096, 4096), (accept.RANKS, "65536", 65536),
    (accept.PROBABILITY, "0.1", 0.1), (accept.PROBABILITY, 0, 0.0), (accept.SHARE, 1, 1.0),
    (accept.FROM_ZERO, "0", 0.0),
    (accept.ABOVE_ZERO, "1e-9", 1e-9),
    (accept.percentage(), "3%", 0.03), (accept.percentage(), "0.03", 0.03), (accept.percentage(zero=True), "0%", 0.0),
    (accept.percentage(0.5), 0.5, 0.5),
    (accept.SECONDS, "500ms", 0.5), (accept.SECONDS, "2m", 120.0), (accept.SECONDS, 20, 20.0),
    (accept.SECONDS, "1.5h", 5400.0),
    (accept.BYTES, "512MB", 512_000_000), (accept.BYTES, "4GiB", 4 << 30), (accept.BYTES, 1000, 1000),
    (accept.BYTES, "4G", 4 * 10**9), (accept.BYTES, "2.5GiB", 5 << 29), (accept.BYTES, "1ki", 1024),
    (accept.BYTES, "0.5 kb", 500), (accept.BYTES, "7", 7), (accept.BYTES, "8B", 8),
    (accept.TEXT, "a", "a"), (accept.PATH, Path("a/b"), "a/b"), (accept.FLAG, False, False),
    (accept.number_or_text("N"), 3, "3"), (accept.number_or_text("N"), "decoder.3", "decoder.3"),
    (accept.COUNTS, "1,32", (1, 32)), (accept.COUNTS, ["1,2", "3"], (1, 2, 3)), (accept.COUNTS, [1, 2], (1, 2)),
    (accept.COUNTS, np.array([1, 2]), (1, 2)), (accept.COUNTS, np.array(5), (5,)), (accept.COUNTS, 5, (5,)),
    (accept.TEXTS, "a,b", ("a,b",)), (accept.TEXTS, ["a", "b"], ("a", "b")), (accept.TEXTS, (), ()),
    (accept.joined("N"), [0, 3], "0,3"), (accept.joined("N"), "2:5", "2:5"), (accept.joined("N"), ["0", "3"], "0,3"),
    (accept.optional(accept.COUNT, "N or all", "all"), "all", None),
    (accept.optional(accept.COUNT, "N or all", "all"), None, None),
    (accept.optional(accept.COUNT, "N or all", "all"), "8", 8),
]  # fmt: skip

REFUSED = [
    (accept.COUNT, 0), (accept.COUNT, "0"), (accept.COUNT, True), (accept.COUNT, 1.0), (accept.COUNT, "1.0"),
    (accept.COUNT, accept.MAX_SIZE + 1), (accept.COUNT, "٣"), (accept.COUNT, None), (accept.COUNT, "9" * 5000),
    (accept.THREADS, 4097), (accept.PROBABILITY, 1), (accept.PROBABILITY, "nan"), (accept.SHARE, 0),
    (accept.SHARE, True),
    (accept.ABOVE_ZERO, "inf"), (accept.FROM_ZERO, -1e-9),
    (accept.percentage(), 3), (accept.percentage(), "0"), (accept.percentage(0.5), "51%"), (accept.percentage(), "x"),
    (accept.SECONDS, "0s"), (accept.SECONDS, 86_401), (accept.SECONDS, "1d"), (accept.SECONDS, True),
    (accept.BYTES, "0"), (accept.BYTES, "4XB"),
    *((accept.BYTES, size) for size in ("", "0.1", "-1", "GB", "4 PB", "1e9", "nan", "4GBs", "9" * 19, "9" * 11 + "T")),
    (accept.TEXT, 3), (accept.TEXT, None), (accept.FLAG, 1),
    (accept.FLAG, "yes"),
    (accept.COUNTS, []), (accept.COUNTS, "1,,2"), (accept.COUNTS, "1,0"), (accept.TEXTS, [1]),
    (accept.number_or_text("N"), 1.5), (accept.joined("N"), [1.5]),
]  # fmt: skip


@pytest.mark.parametrize(("accepts", "value", "meant"), TAKEN)
def test_what_is_taken(accepts: Accepts, value: object, meant: object):
    converted = accepts.convert(value)
    assert (converted, type(converted)) == (meant, type(meant))


@pytest.mark.parametrize(("accepts", "value"), REFUSED)
def test_what_is_refused(accepts: Accepts, value: object):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        accepts.convert(value)


def test_a_bare_number_that_is_likely_a_percentage_gets_a_hint():
    assert accept.percentage().hint("3") == "that would be 300%: write 3%"
    assert accept.percentage().hint("3%") == accept.percentage().hint("x") == ""


def test_words_say_the_limits():
    assert [accept.COUNT.words, accept.THREADS.words] == ["a whole number from 1", "a whole number from 1 to 4096"]

"""`--at`: lists, ranges, and what is neither."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.run.activations.question import MOST, FunctionsQuestion, points


def test_lists_and_ranges():
    assert points("0.12,-0.08,0.25") == (0.12, -0.08, 0.25)
    assert points("-3:3:0.5") == tuple(i / 2 for i in range(-6, 7))
    assert points("0:3") == (0.0, 1.0, 2.0, 3.0)
    assert points("1:1:5") == (1.0,)
    assert points("5,0:1:0.5, 7") == (5.0, 0.0, 0.5, 1.0, 7.0)
    assert points("1e1") == (10.0,)
    assert points("-0.0") == (0.0,)


def test_a_range_is_counted_in_decimal():
    assert points("0:1:0.1") == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert points("-0.3:0.3:0.1") == (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a finite number"), ("a", "'a' is not a finite number"), ("nan", "not a finite number"),
        ("-inf", "not a finite number"), ("1e999", "not a finite number"), ("1,,2", "'' is not a finite number"),
        ("2e9", "too far out"), ("1:0", "empty"), ("0:1:0", "step"), ("0:1:-1", "step"), ("0:1:nan", "finite"),
        ("0:1:1:1", "A:B:STEP"), (":", "finite"), ("0:1:1e-9", "more than 10,000 points"),
        ("0:1e9:1e-300", "more than"), (",".join("1" * (MOST + 1)), "more than 10,000 points"), ("1/2", "finite"),
        ("0:5000,0:5000", "more than"), ("0x10", "finite"), ("1e-999999999:1:0.5", ""),
    ],
)  # fmt: skip
def test_what_is_no_list_of_points_is_refused(text, said):
    if not said:
        assert points(text) == (0.0, 0.5, 1.0)
        return
    with pytest.raises(FFNError, match=r"^at: ") as error:
        FunctionsQuestion(at=text)
    assert said in str(error.value)


@given(st.one_of(st.text(), st.from_regex(r"[-+]?[0-9e._:,]{0,20}", fullmatch=True)))
def test_any_text_gives_points_or_an_error(text):
    with suppress(FFNError):
        found = points(text)
        assert 0 < len(found) <= MOST
        assert all(abs(x) <= 1e9 for x in found)

"""A stored certificate is read with every field hostile, and believed only if it follows from its rows."""

import copy
from typing import Any

import pytest

from ffncli.errors import FFNError
from ffncli.run.verify.certificate import Certificate, certificate_of
from tests.run.verify.stored import certificate

JSON: tuple[Any, ...] = (None, True, False, 0, -1, 2.5, 10**400, "", "x\x1b[31m", [], ["silu"], [{}], {}, {"a": 1})


def read(stored: dict[str, Any]) -> Certificate | None:
    """The certificate, or None where it is refused."""
    try:
        return certificate_of(stored, "c.json")
    except FFNError:
        return None


def test_a_certificate_is_read():
    found = certificate_of(certificate(), "c.json")
    assert (found.verdict, found.error_class, found.batch_invariant) == ("certified", "fp32-true", True)
    more = certificate()
    more["certificate"]["later"] = 1
    more["rows"][0]["later"] = 1
    with pytest.raises(FFNError, match=r"c\.json: rows: \[0\] has the unknown field 'later'"):
        certificate_of(more, "c.json")
    del more["rows"][0]["later"]
    assert certificate_of(more, "c.json") == found


@pytest.mark.parametrize("name", certificate()["certificate"])
def test_every_field_of_every_type(name: str):
    right = certificate_of(certificate(), "c.json")
    for value in JSON:
        found = read(certificate(**{name: value}))
        assert found is None or found.__dict__ == right.__dict__ | {name: value}


@pytest.mark.parametrize("name", certificate()["rows"][6])
def test_every_field_of_a_row_of_every_type(name: str):
    for value in JSON:
        stored = certificate()
        stored["rows"][6][name] = value
        assert read(stored) in (None, certificate_of(certificate(), "c.json"))


@pytest.mark.parametrize(
    ("row", "change", "said", "words"),
    [
        (3, {"passed": False}, {}, "says certified, but its rows say special, all: "),
        (3, {"passed": False}, {"reason": "special"}, "says certified, but its rows say special, all: "),
        (3, {}, {"verdict": "refused", "reason": "special"}, "says refused, but its rows say that no check failed"),
        (3, {"passed": False}, {"verdict": "refused"}, "says refused, but its rows say special, all: "),
        (3, {"check": "shapes"}, {}, "has no row of the check special"),
        (6, {"subject": "fp16-like"}, {}, "says error_class 'fp32-true', but its rows say 'fp16-like'"),
        (6, {"relative_error": 0.5}, {}, "says error_rel 1.5e-07, but its rows say 0.5"),
        (5, {"max_error": 0.5}, {}, "says batch_invariant True, but its rows say False"),
        (7, {"passed": True}, {}, "says passes 'forward', but its rows say 'forward+backward'"),
        (3, {}, {"gradients": {"x": "fp32-true"}}, "says gradients {'x': 'fp32-true'}, but its rows say None"),
    ],
)
def test_what_does_not_follow_from_its_rows(row: int, change: dict[str, Any], said: dict[str, Any], words: str):
    stored = certificate(**said)
    stored["rows"][row] |= change
    with pytest.raises(FFNError) as error:
        certificate_of(stored, "c.json")
    assert words in str(error.value)


@pytest.mark.parametrize("key", ["certificate", "rows"])
def test_an_answer_of_every_type(key: str):
    for value in JSON:
        stored = copy.deepcopy(certificate()) | {key: value}
        with pytest.raises(FFNError, match=r"c\.json"):
            certificate_of(stored, "c.json")

"""The referee's certificate for a kernel: how it follows from the rows of the checks, and reading one that is stored.
Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ffncli.errors import FFNError, shown
from ffncli.models.files.json_records import known_fields, record_of
from ffncli.options.shared import Pass
from ffncli.run.verify.question import REFEREE_STATEMENTS

CERTIFY_AGAIN = "certify it again: ffn verify --referee -o FILE.json"


@dataclass(frozen=True)
class CheckRow:
    """One result of a check. `passed` is None if the check does not apply, or if the row only shows a figure.

    `subject` names what was checked; CONVENTIONS defines the errors; `note` gives the reason or explains the figure.
    """

    check: str
    subject: str
    max_error: float | None = None
    relative_error: float | None = None
    ulps: float | None = None
    tolerance: float | None = None
    passed: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Certificate:
    """The referee's certificate for a kernel. `kernel` is its label, `attribute` its name in its file; `file` and
    `sha256` are None for a built-in kernel.

    `reason` names the first failed check; it is empty for a certified kernel. `error_class` (such as `fp32-true`) and
    `batch_invariant` are None if they could not be measured. `passes` is what was judged, `gradients` the class of
    every gradient, by name (`x` or a weight). `files` has the sha256 of every other file that the kernel's process has
    read, `variables` the first digits of that of every environment variable. `memory_protected` is whether its process
    could not read the referee's memory; None if that is unknown. `isolated` is what took rights from that process
    (`user nobody`, `landlock`), None if nothing did. `environment` contains versions and the machine, under
    the column names of `ffn bench`.
    """

    verdict: Literal["certified", "refused"]
    reason: str
    kernel: str
    attribute: str | None
    file: str | None
    sha256: str | None
    error_class: str | None
    error_rel: float | None
    passes: Pass
    gradients: Mapping[str, str] | None
    files: Mapping[str, str | None]
    variables: Mapping[str, str | None]
    memory_protected: bool | None
    batch_invariant: bool | None
    batch_invariance_demanded: bool
    dtype: str
    device: str
    threads: int
    seed: int
    tolerance: float | None
    started_utc: str
    environment: Mapping[str, str]
    isolated: str | None = None


def first_reason(rows: Sequence[CheckRow]) -> str:
    """Describe the first failed check: `state, other numbers in the same buffer: error 0.7 (limit 2.2e-05)`."""
    row = next((row for row in rows if row.passed is False), None)
    if row is None:
        return ""
    figures = [] if row.relative_error is None else [f"error {row.relative_error:.2g}"]
    if figures and row.tolerance:
        figures = [f"{figures[0]} (limit {row.tolerance:.2g})"]
    note = [row.note] if row.note and row.check not in ("precision", "gradient-class") else []
    return f"{row.check}, {row.subject}: " + "; ".join([*figures, *note])


def findings(rows: Sequence[CheckRow]) -> dict[str, Any]:
    """Return the fields of a certificate that follow from the rows of the checks."""
    reason = first_reason(rows)
    measured = next((row for row in rows if row.check == "precision" and row.relative_error is not None), None)
    classes = [row.subject for row in rows if row.check == "gradient-class" and row.relative_error is not None]
    batches = [row for row in rows if row.check == "batch" and row.max_error is not None]
    backward = any(row.passed is not None for row in rows if row.check == "gradients")
    return {
        "verdict": "refused" if reason else "certified",
        "reason": reason,
        "error_class": measured.subject if measured else None,
        "error_rel": measured.relative_error if measured else None,
        "passes": "forward+backward" if backward else "forward",
        "gradients": dict(subject.split(": ", 1) for subject in classes if ": " in subject) or None,
        "batch_invariant": all(row.max_error == 0 and row.passed for row in batches) if batches else None,
    }


def certificate_of(values: Mapping[str, Any], where: str) -> Certificate:
    """Build the certificate that a JSON answer of `ffn verify --referee` contains.

    Raises FFNError for an answer without one, for a field of the wrong type, and for a certificate that does not follow
    from the answer's rows: each check has a row, none failed if it is certified, and the figures are those of the rows.
    """
    if not isinstance(values.get("certificate"), dict):
        raise FFNError(f"{where} is not a certificate", "ffn verify -k mine.py:mlp --referee -o FILE.json")
    certificate: Certificate = known_fields(Certificate, values["certificate"], f"{where}: certificate", CERTIFY_AGAIN)
    rows: tuple[CheckRow, ...] = record_of(tuple[CheckRow, ...], values.get("rows"), f"{where}: rows", CERTIFY_AGAIN)
    judged = {row.check for row in rows}
    if certificate.passes == "forward":
        judged |= {"gradient-class", "gradient-batch"}  # have no row without a backward pass
    if missing := next((check for check in REFEREE_STATEMENTS if check not in judged), None):
        raise FFNError(f"{where} has no row of the check {missing}", CERTIFY_AGAIN)
    right = findings(rows)
    if right["verdict"] != certificate.verdict or bool(right["reason"]) != bool(certificate.reason):
        what = right["reason"] or "that no check failed"
        raise FFNError(f"{where} says {certificate.verdict}, but its rows say {what}", CERTIFY_AGAIN)
    for name, value in right.items() if certificate.verdict == "certified" else ():
        if getattr(certificate, name) != value:
            what = f"{name} {shown(getattr(certificate, name))}, but its rows say {shown(value)}"
            raise FFNError(f"{where} says {what}", CERTIFY_AGAIN)
    return certificate

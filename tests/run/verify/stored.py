"""A certificate as `ffn verify --referee` writes it, made up: a row per check, all of which passed."""

from typing import Any

from ffncli.run.verify.question import REFEREE_STATEMENTS
from ffncli.version import __version__

FIGURES: dict[str, dict[str, Any]] = {
    "precision": {"subject": "fp32-true", "relative_error": 1.5e-07},
    "gradients": {"passed": None, "note": "the kernel computes forward only"},
    "gradient-class": {"passed": None},
    "gradient-batch": {"passed": None},
    "batch": {"max_error": 0.0, "relative_error": 0.0},
}


def certificate(**changes: Any) -> dict[str, Any]:
    """The JSON answer; `changes` are fields of the certificate or, if it has no such field, of the block."""
    rows = [
        {"check": check, "subject": "all", "max_error": None, "relative_error": None, "ulps": None, "tolerance": None,
         "passed": True, "note": "", **FIGURES.get(check, {})}
        for check in REFEREE_STATEMENTS
    ]  # fmt: skip
    said = {
        "verdict": "certified", "reason": "", "kernel": "mine.py:mlp", "attribute": "mlp", "file": "here/mine.py",
        "sha256": "0" * 64, "error_class": "fp32-true", "error_rel": 1.5e-07, "passes": "forward", "gradients": None,
        "files": {}, "variables": {}, "memory_protected": True,
        "batch_invariant": True, "batch_invariance_demanded": False, "dtype": "fp32", "device": "cpu", "threads": 2,
        "seed": 1, "tolerance": None, "started_utc": "2026-01-01T00:00:00Z", "environment": {"ffncli": __version__},
    }  # fmt: skip
    block = {"activation": "silu", "gated": True, "experts": 0, "name": "512x2048:swiglu"}
    block |= {name: value for name, value in changes.items() if name not in said}
    said |= {name: value for name, value in changes.items() if name in said}
    return {"schema_version": 1, "command": "verify", "block": block, "certificate": said, "rows": rows}

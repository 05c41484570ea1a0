"""Cases of encoders: how each is built tiny, and which parameters are its FFN's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

CASES: Mapping[str, Architecture] = {}

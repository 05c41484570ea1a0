"""Hybrids: stacks in which only some layers have an FFN, or layers differ in width (Mamba beside attention, ...)."""

from __future__ import annotations

from collections.abc import Mapping

from ffncli.models.family import Family

ROWS: Mapping[str, Family] = {}

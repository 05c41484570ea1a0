"""Shell completions for option values. Each imports its list only when a shell asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args


def models() -> Iterable[str]:
    """Names of the catalog."""
    from ffncli.models import catalog

    return catalog.names()


def devices() -> Iterable[str]:
    """Accelerators, as they are typed."""
    from ffncli.system.hardware import typed_names

    return typed_names()


def links() -> Iterable[str]:
    """Interconnects, as they are typed."""
    from ffncli.system.hardware import links

    return [link.name for link in links()]


def activations() -> Iterable[str]:
    """Activations and gated units, each by its usual name."""
    from ffncli.block.activations import GATED, TABLE
    from ffncli.block.limits import UNITS_WITH_LIMITS

    return [*TABLE, *GATED, *UNITS_WITH_LIMITS]


def kernels() -> Iterable[str]:
    """The package's kernels, and the choice among them."""
    from ffncli.kernels import AUTO, BUILT_IN

    return [*BUILT_IN, AUTO]


def forms() -> Iterable[str]:
    """Forms of `ffn export`."""
    from ffncli.run.export.call import FORMS

    return FORMS


def parts() -> Iterable[str]:
    """Parts of a block that `ffn export` writes."""
    from ffncli.run.export.problem import Part

    return get_args(Part)


def examples() -> Iterable[str]:
    """Blocks of --example."""
    from ffncli.models.examples import EXAMPLES

    return EXAMPLES


def checks() -> Iterable[str]:
    """Checks of `ffn verify`."""
    from ffncli.run.verify.names import CHECK_STATEMENTS

    return CHECK_STATEMENTS


def targets() -> Iterable[str]:
    """Functions that `ffn approximate` fits."""
    from ffncli.run.approximate.targets import TARGETS

    return TARGETS


def dtypes() -> Iterable[str]:
    """Formats to compute in."""
    from ffncli.block.dtypes import TABLE

    return [row.name for row in TABLE]


def storage_formats() -> Iterable[str]:
    """Formats that weights may be stored in."""
    from ffncli.block.dtypes import STORED, TABLE

    return [row.name for row in (*TABLE, *STORED)]


def rounding_formats() -> Iterable[str]:
    """Formats that `ffn activations` rounds to."""
    from ffncli.block.analysis.formats import FORMATS

    return FORMATS


def norms() -> Iterable[str]:
    """Kinds of norm."""
    from ffncli.block.recipe import NormKind

    return get_args(NormKind)


def norm_positions() -> Iterable[str]:
    """Positions of a norm."""
    from ffncli.block.recipe import NormPosition

    return get_args(NormPosition)


def launchers() -> Iterable[str]:
    """Who starts the cases on other machines."""
    from ffncli.bench.request.cluster import LauncherName

    return get_args(LauncherName)


def formats() -> Iterable[str]:
    """Output formats."""
    from ffncli.show.output import Format

    return get_args(Format)


def colors() -> Iterable[str]:
    """Values of --color."""
    from ffncli.show.color import COLORS

    return COLORS

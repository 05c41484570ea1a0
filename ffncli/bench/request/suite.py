"""The public suites in the package. They define every dimension of their cases and are never edited; a change needs a
new suite.

A suite's file is its definition: its SHA-256 is in every result, and a run does not use the catalog of models.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ffncli.bench.records import Above, Cache, Case, Method, Time
from ffncli.bench.request.grid import BenchRequest, Grid, build_request
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.kernels import AUTO
from ffncli.models.files.json_records import Count, Positive, record_of
from ffncli.models.files.strict_json import parse_object
from ffncli.options.shared import Pass

SUITES = ("ffn-1",)
CPU, CUDA = "cpu", "cuda"  # the tracks (the groups of cases), named after their device


@dataclass(frozen=True)
class SuiteCase:
    """One case of a track; `block` is a key of the suite's blocks, and `cache` is the requested cache mode."""

    block: str
    tokens: Positive
    dtype: str
    passes: Pass
    cache: Cache
    routing: str


@dataclass(frozen=True)
class SuiteTrack:
    """The cases for one kind of device. `max_time` is the time limit of a case in seconds, over all processes."""

    max_time: Time
    cases: tuple[SuiteCase, ...]


@dataclass(frozen=True)
class PublicSuite:
    """A public suite. `seed` is used for the weights and the order of timing; timed inputs use random numbers from the
    system.

    `processes` is the minimum that a result must have; `digest` is the SHA-256 of the suite's file.
    """

    name: str
    baseline: str
    seed: Count
    threads: Positive
    processes: Positive
    precision: Above
    tracks: Mapping[str, SuiteTrack]
    blocks: Mapping[str, FFNSpec]
    digest: str = ""

    @property
    def tag(self) -> str:
        """The value of the column `suite` in results: `ffn-1@` and the digest."""
        return f"{self.name}@{self.digest}"

    def cases(self, track: str) -> tuple[Case, ...]:
        """Return the cases of a track, as `ffn bench` runs them."""
        return tuple(
            Case(
                one.block, one.block, self.blocks[one.block], one.tokens, one.dtype, one.passes, one.cache, track,
                self.threads, one.routing,
            )
            for one in self.tracks[track].cases
        )  # fmt: skip

    def method(self, track: str) -> Method:
        """Return the method of a track; options may override it."""
        return Method(self.processes, self.precision, self.tracks[track].max_time, seed=self.seed)


@cache
def public_suite(name: str) -> PublicSuite:
    """Return the suite called `name`. Raises FFNError, listing the suites, for any other name."""
    if name not in SUITES:
        known = f"the public suites are: {', '.join(SUITES)}"
        raise FFNError(f"{option('suite')}: there is no suite {shown(name)}", did_you_mean(name, [*SUITES], known))
    raw = files("ffncli.bench.public").joinpath(f"{name}.json").read_bytes()
    suite: PublicSuite = record_of(PublicSuite, parse_object(raw, name), name)
    return replace(suite, digest=hashlib.sha256(raw).hexdigest())


def track_of(devices: Sequence[str]) -> str:
    """Return a device's track; without a device, the CPU's. Raises FFNError for other devices."""
    if not devices:
        return CPU
    if len(devices) == 1 and devices[0] in (CPU, CUDA):
        return devices[0]
    text = ",".join(devices)
    hint = "choose a GPU with CUDA_VISIBLE_DEVICES" if text.startswith("cuda:") else "each track is a result of its own"
    raise FFNError(f"{option('device', text)}: a suite has the tracks {CPU} and {CUDA}", hint)


def suite_request(
    suite: PublicSuite, track: str, kernels: Sequence[str] | None, method: Method, **more: Any
) -> tuple[BenchRequest, tuple[str, ...]]:
    """Return a pair: the request for a track, and notes about the request. Kernels are compared with the suite's
    baseline; `more` is passed to `build_request`. Raises the errors of `build_request`."""
    grid = Grid(device=track, threads=suite.threads)
    request, notes = build_request(grid, kernels, suite.baseline, method, frozen=suite.cases(track), **more)
    if fleeting := next((k for k in request.kernels if k.kernel == AUTO or k.factor is not None), None):
        why = f"{option('suite', suite.name)}: {shown(fleeting.label)} cannot enter: its results do not name a kernel"
        raise FFNError(why, "name the kernel itself")
    if method.processes < suite.processes:
        few = f"{suite.processes} processes or more, and this run has {method.processes}"
        notes = (*notes, f"only a trial: results of {suite.name} need {few}")
    return replace(request, suite=suite.tag), notes

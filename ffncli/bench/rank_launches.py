"""A benchmark over ranks: rank 0's `ffn bench` directs the run, and the `ffn bench` of every other rank follows it.

Every rank starts a worker for each launch, from the description that rank 0 puts into the ranks' common store. The
workers find each other in that store, under a name that is unique to the launch. Nothing that is read from the store is
unpickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ffncli.bench.launch import WORKER, worker
from ffncli.bench.records import Job, Outcome
from ffncli.bench.request.grid import BenchRequest, from_json, to_json
from ffncli.errors import ExitCode, FFNError, clean
from ffncli.models.files.json_records import Count, record_of
from ffncli.run.ranks.environment import Place
from ffncli.system.child import ending

if TYPE_CHECKING:
    from ffncli.run.ranks.store import RankStore

_LOOK = 0.2  # s between two reads of the store
_LEAVING = 5.0  # s that a worker has to end by itself once rank 0's worker has ended
_REPORTING = 2.5  # s that the other ranks have to report how their workers ended
_MEETING = 60.0  # s to reach the common store
_LONGEST_WORD = 300  # characters


@dataclass(frozen=True)
class _Gone:
    """A kernel that ended a worker while it was measured on this case."""

    case: str
    outcome: Outcome


@dataclass(frozen=True)
class _Launch:
    """The job of every rank's worker in one launch. `request` is checked by `from_json`."""

    process: Count
    threads: Count
    cases: tuple[str, ...]
    gone: tuple[_Gone, ...]
    plain: Mapping[str, str]
    request: Any

    def job(self) -> Job:
        request = from_json(self.request)
        cases = tuple(case for case in request.cases if case.key in self.cases)
        gone = tuple((one.case, one.outcome) for one in self.gone)
        return Job(
            self.process, cases, request.kernels, request.baseline, request.method, gone, tuple(self.plain.items())
        )


@dataclass
class RankLaunches:
    """The launches of a run, directed by rank 0: `begin` and `end_launch` for each launch, `end_run` after the last."""

    place: Place
    request: BenchRequest
    store: RankStore
    number: int = field(default=-1)

    def begin(self, job: Job, threads: int) -> dict[str, str]:
        """Have the other ranks start their workers; return the environment variables of this rank's worker."""
        self.number += 1
        gone = tuple(_Gone(case, outcome) for case, outcome in job.gone)
        cases = tuple(case.key for case in job.cases)
        launch = _Launch(job.process, threads, cases, gone, dict(job.plain), to_json(self.request))
        self.store.shared.set(f"launch/{self.number}", json.dumps({"launch": asdict(launch)}))
        return variables(self.place, self.number, job, threads)

    def end_launch(self) -> None:
        """Announce that this rank's worker has ended, so that the others end too."""
        self.store.shared.set(f"over/{self.number}", "1")

    def endings(self, wait: bool = False) -> dict[int, tuple[str, str]]:
        """Return how the other ranks' workers ended, for the ranks that have reported, as a dict from rank to
        (kernel, words). With `wait`, wait a moment for missing reports."""
        endings: dict[int, tuple[str, str]] = {}
        until, left = time.monotonic() + _REPORTING, [*range(1, self.place.world_size)]
        while True:
            for rank in [rank for rank in left if self.store.shared.check([f"word/{self.number}/{rank}"])]:
                kernel, words = json.loads(self.store.shared.get(f"word/{self.number}/{rank}"))
                endings[rank] = str(kernel), clean(str(words))[:_LONGEST_WORD]
                left.remove(rank)
            if not (wait and left and time.monotonic() < until):
                return endings
            time.sleep(_LOOK / 4)

    def end_run(self, code: int) -> None:
        """Announce that no launch follows, so that the other ranks end with this exit code. If no agent keeps the
        store, wait until the ranks have read the announcement."""
        self.store.shared.set(f"launch/{self.number + 1}", json.dumps({"end": code}))
        until, left = time.monotonic() + 2 * _LEAVING, [f"left/{rank}" for rank in range(1, self.place.world_size)]
        while not (self.place.has_agent or self.store.shared.check(left)) and time.monotonic() < until:
            time.sleep(_LOOK / 4)


@contextmanager
def lead_ranks(request: BenchRequest, place: Place | None) -> Iterator[RankLaunches | None]:
    """Yield a run's launches, or None if there is only one rank. When the context exits, the other ranks end with the
    same exit code."""
    if place is None or request.ranks.world_size == 1:
        yield None
        return
    from ffncli.run.ranks.store import open_store

    launches, code = RankLaunches(place, request, open_store(place, _MEETING)), int(ExitCode.ENVIRONMENT)
    try:
        yield launches
        code = 0
    except FFNError as error:
        code = int(error.code)
        raise
    finally:
        launches.end_run(code)


def follow_ranks(place: Place, command: Sequence[str] = WORKER) -> int:
    """Follow rank 0, as every other rank does: start a worker for each launch. Return rank 0's exit code.

    Raises FFNError (exit 3) if the store is lost because rank 0 or its agent has ended.
    """
    from ffncli.run.ranks.store import STORE_ERRORS, absent, open_store

    store, number = open_store(place, _MEETING), 0
    try:
        while "end" not in (message := _message(store, number)):
            launch: _Launch = record_of(_Launch, message.get("launch"), "a launch of rank 0")
            ended = _ending(launch, place, store, number, command)
            store.shared.set(f"word/{number}/{place.rank}", json.dumps(ended))
            number += 1
        store.shared.set(f"left/{place.rank}", "1")
        return record_of(int, message["end"], "the end of the run")  # type: ignore[no-any-return]
    except STORE_ERRORS as error:
        raise absent([0], "ended before the others") from error


def _message(store: RankStore, number: int) -> dict[str, Any]:
    while not store.shared.check([f"launch/{number}"]):
        time.sleep(_LOOK)
    message = json.loads(store.shared.get(f"launch/{number}"))
    return message if isinstance(message, dict) else {}


def _ending(launch: _Launch, place: Place, store: RankStore, number: int, command: Sequence[str]) -> tuple[str, str]:
    """Run this rank's worker for one launch. Return (the kernel that raised, or ""; how the worker failed, in words);
    both are empty if all went well."""
    job = launch.job()
    directory = from_json(launch.request).directory
    with worker(job, launch.threads, command, directory, more=variables(place, number, job, launch.threads)) as busy:
        until = None
        while until is None or time.monotonic() < until:
            try:
                message = busy.receive(_LOOK)
            except (EOFError, OSError):
                code = busy.ended()
                return "", "" if code == 0 else f"its worker {ending(code)}"
            match message:
                case ("broke", str(kernel), str(words)):
                    return kernel, words
                case ("refused", str(words), _, _):
                    return "", words
                case ("finished",):
                    return "", ""
            if until is None and store.shared.check([f"over/{number}"]):
                until = time.monotonic() + _LEAVING
    return "", "its worker did not end with the others"


def variables(
    place: Place, launch: int, job: Job, threads: int, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a rank's worker: the launch's name in the store, and the worker's cores or GPU."""
    named = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store stays in the process that opened it
        "TORCHELASTIC_RESTART_COUNT": f"{place.attempt}-launch-{launch}",
    }
    if job.cases[0].device == "cpu":
        return named | _binding(place, threads, given)
    gpus = [name.strip() for name in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    gpu = gpus[place.local_rank] if place.local_rank < len(gpus) else str(place.local_rank)
    return named | {"CUDA_VISIBLE_DEVICES": gpu, "LOCAL_RANK": "0"}  # the first of the GPUs that the worker sees


def _binding(place: Place, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return variables that bind OpenMP's threads to cores of this rank only, if the machine has enough cores."""
    from ffncli.system.host import affinity, one_cpu_per_core

    cores = one_cpu_per_core(affinity())
    mine = cores[place.local_rank * threads : (place.local_rank + 1) * threads]
    if given.get("OMP_PLACES") or given.get("OMP_PROC_BIND"):
        return {}
    if len(mine) < threads:
        return {"OMP_PROC_BIND": "false"}
    return {"OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in mine)}

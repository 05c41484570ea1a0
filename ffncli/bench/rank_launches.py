"""A benchmark over ranks: rank 0's `ffn bench` is the parent of the run, those of the other ranks follow it.

Each of them starts a worker for every launch, with what rank 0 leaves in the common store of the ranks; these workers
join each other there, under a name of that launch. Nothing that is read from the store is unpickled.
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

_LOOK = 0.2  # s between two looks at the store
_LEAVING = 5.0  # s in which a worker ends by itself once rank 0's has ended
_REPORTING = 2.5  # s in which the other ranks say how their workers ended
_MEETING = 60.0  # s to reach the common store
_LONGEST_WORD = 300  # characters


@dataclass(frozen=True)
class _Gone:
    """A kernel that ended a worker in that case."""

    case: str
    outcome: Outcome


@dataclass(frozen=True)
class _Launch:
    """What a worker of every rank is to do. `request` is checked by `from_json`."""

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
    """The launches of a run, as rank 0 leads them: `begin` and `over` for each, `end` once after the last."""

    place: Place
    request: BenchRequest
    store: RankStore
    number: int = field(default=-1)

    def begin(self, job: Job, threads: int) -> dict[str, str]:
        """Have the other ranks start their workers; returns the variables of this rank's."""
        self.number += 1
        gone = tuple(_Gone(case, outcome) for case, outcome in job.gone)
        cases = tuple(case.key for case in job.cases)
        launch = _Launch(job.process, threads, cases, gone, dict(job.plain), to_json(self.request))
        self.store.shared.set(f"launch/{self.number}", json.dumps({"launch": asdict(launch)}))
        return variables(self.place, self.number, job, threads)

    def over(self) -> None:
        """This rank's worker has ended: so do the others."""
        self.store.shared.set(f"over/{self.number}", "1")

    def endings(self, wait: bool = False) -> dict[int, tuple[str, str]]:
        """Return how the other ranks' workers ended, by rank, as (kernel, words), of those that have said so; `wait` a
        moment for the rest."""
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

    def end(self, code: int) -> None:
        """There are no more launches: the other ranks end with that exit code. A store that no agent keeps stays open
        until they have read it."""
        self.store.shared.set(f"launch/{self.number + 1}", json.dumps({"end": code}))
        until, left = time.monotonic() + 2 * _LEAVING, [f"left/{rank}" for rank in range(1, self.place.world_size)]
        while not (self.place.has_agent or self.store.shared.check(left)) and time.monotonic() < until:
            time.sleep(_LOOK / 4)


@contextmanager
def led(request: BenchRequest, place: Place | None) -> Iterator[RankLaunches | None]:
    """The launches of a run, None on one rank; on any exit from the block the other ranks end, with the exit code of
    the error."""
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
        launches.end(code)


def followed(place: Place, command: Sequence[str] = WORKER) -> int:
    """What every rank but the first does: start a worker for each of rank 0's launches. Returns rank 0's exit code.

    Raises FFNError (exit 3) if the store is lost, with rank 0 or its agent.
    """
    from ffncli.run.ranks.store import STORE_ERRORS, absent, open_store

    store, number = open_store(place, _MEETING), 0
    try:
        while "end" not in (message := _message(store, number)):
            launch: _Launch = record_of(_Launch, message.get("launch"), "a launch of rank 0")
            ended = _followed(launch, place, store, number, command)
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


def _followed(launch: _Launch, place: Place, store: RankStore, number: int, command: Sequence[str]) -> tuple[str, str]:
    """How this rank's worker ended: the kernel that raised, if one did, and in words; empty if all went well."""
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
    """The environment of a rank's worker: a name of that launch in the common store, and its cores or its GPU."""
    named = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # who has opened the store keeps it
        "TORCHELASTIC_RESTART_COUNT": f"{place.attempt}-launch-{launch}",
    }
    if job.cases[0].device == "cpu":
        return named | _binding(place, threads, given)
    gpus = [name.strip() for name in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    gpu = gpus[place.local_rank] if place.local_rank < len(gpus) else str(place.local_rank)
    return named | {"CUDA_VISIBLE_DEVICES": gpu, "LOCAL_RANK": "0"}  # the first of those that it sees


def _binding(place: Place, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """OpenMP's places: cores of its own for every rank of a machine; none where they do not suffice."""
    from ffncli.system.host import affinity, one_cpu_per_core

    cores = one_cpu_per_core(affinity())
    mine = cores[place.local_rank * threads : (place.local_rank + 1) * threads]
    if given.get("OMP_PLACES") or given.get("OMP_PROC_BIND"):
        return {}
    if len(mine) < threads:
        return {"OMP_PROC_BIND": "false"}
    return {"OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in mine)}

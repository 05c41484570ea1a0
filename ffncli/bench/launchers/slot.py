"""The work of a slot: it measures one case, with all its kernels and processes, as `ffn bench` does, on its own
machine.

Task and answer are JSON strings, so any launcher can transport them; the parent checks an answer as strictly as a file.
Slots are places on other machines that each measure one case at a time.
"""

import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ffncli.bench.launch import WORKER
from ffncli.bench.machine.devices import require_gpu
from ffncli.bench.records import Case, TimedUnit
from ffncli.bench.request.grid import BenchRequest, from_json, to_json
from ffncli.bench.results.journal import sha256
from ffncli.bench.suite import new_run, run
from ffncli.errors import ExitCode, FFNError, clean, shown, shown_path
from ffncli.models.files.json_records import record_of
from ffncli.models.files.strict_json import parse_object
from ffncli.system.host import locked_cores
from ffncli.system.packages import require_installed
from ffncli.version import __version__


@dataclass(frozen=True)
class _MeasuredUnit:
    """A finished unit, with its blocks. If `died` is true, its case ended a worker, and no other unit follows."""

    unit: TimedUnit
    died: bool


@dataclass(frozen=True)
class _SlotAnswer:
    """The units of a case, or the reason why the machine cannot measure the case, with a hint and the exit code."""

    host: str
    units: tuple[_MeasuredUnit, ...] = ()
    refusal: str = ""
    hint: str = ""
    code: int = 0


def task_of(request: BenchRequest, case: Case) -> str:
    """Return the task of a slot: the request with only this case."""
    alone = replace(request, cases=(case,), cluster=None, certificates={})  # the parent adds these to the rows
    return json.dumps({"ffncli": __version__, "request": to_json(alone)}, allow_nan=False)


def measured(task: str, command: Sequence[str] = WORKER) -> str:
    """Measure a task on this machine and return the answer, which may report an error on this machine."""
    try:
        units = _measured(task, command)
        answer = _SlotAnswer(platform.node(), units)
    except FFNError as error:
        answer = _SlotAnswer(platform.node(), (), error.message, error.hint, int(error.code))
    return json.dumps(asdict(answer), allow_nan=False)


def units_of(answer: str, place: str) -> tuple[tuple[TimedUnit, bool], ...]:
    """Return (unit, True if its case ended a worker) for each unit of an answer. Raises FFNError, naming the place, for
    a refusal and for anything that is not an answer."""
    where = f"the answer of {clean(place)}"
    read: _SlotAnswer = record_of(_SlotAnswer, parse_object(answer.encode(), where), where)
    if read.refusal or not read.units:
        code = ExitCode(read.code) if read.code in set(ExitCode) else ExitCode.ENVIRONMENT
        raise FFNError(f"{clean(place)}: {clean(read.refusal) or 'nothing was measured'}", clean(read.hint), code)
    return tuple((one.unit, one.died) for one in read.units)


def _measured(task: str, command: Sequence[str]) -> tuple[_MeasuredUnit, ...]:
    read = record_of(Mapping[str, Any], json.loads(task), "the task")
    if read.get("ffncli") != __version__:
        why = f"ffn {__version__} is installed here, but the run uses {shown(read.get('ffncli'))}"
        raise FFNError(why, "install the same version on every machine", ExitCode.ENVIRONMENT)
    request = from_json(read.get("request"), "the task")
    (case,) = request.cases
    if command is WORKER:
        require_installed("torch", "numpy")
    _require_files(request)
    require_gpu((case.device,), request.method.sustained)
    cores = locked_cores(case.threads) if case.device == "cpu" else nullcontext()
    with cores, tempfile.TemporaryDirectory(prefix="ffn-slot-") as folder:
        if not request.files:  # the user's folder need not exist on this machine
            request = replace(request, directory=folder)
        with new_run(Path(folder, "case.csv"), request) as journal:
            run(journal, command=command)
            return tuple(_MeasuredUnit(unit, died) for unit, died in journal.units_of(case.key))


def _require_files(request: BenchRequest) -> None:
    """Raise FFNError if a user's file is missing on this machine, or has different content."""
    share = "put it where every machine sees it under the same path"
    for name, digest in request.files.items():
        here = sha256(Path(name))
        if here != digest:
            state = "differs from the file that the run began with" if here else "is missing"
            raise FFNError(f"{shown_path(Path(name))} {state}", share, ExitCode.ENVIRONMENT)
    if request.files and request.directory and not Path(request.directory).is_dir():
        raise FFNError(f"the folder {shown_path(Path(request.directory))} is missing", share, ExitCode.ENVIRONMENT)


# --- slots: places on other machines, and the events that come back from them -----------------------------------------


@dataclass(frozen=True)
class SlotEvent:
    """An event of a case in a slot. `place` is the machine with its slot or job, as in `node7, slot 2`.

    `started`: the slot is measuring the case now. `answered`: `text` is the answer, which `units_of` reads. `lost`: the
    machine failed or the job was killed, as `text` says. `refused`: the slot could not start, for the reason in `text`,
    so that another attempt would not help.
    """

    kind: Literal["started", "answered", "lost", "refused"]
    case: str
    place: str
    text: str = ""


class Slots(Protocol):
    """The slots of a launcher. Work that still runs in the slots at the end is stopped."""

    @property
    def free(self) -> int:
        """The number of cases that can be submitted now."""

    def submit(self, case: str, task: str) -> None:
        """Start to measure this case; `slot.task_of` builds the `task`."""

    def events(self, patience: float) -> Sequence[SlotEvent]:
        """Return the events since the last call; wait up to `patience` seconds for the first."""

"""Slots of SLURM: one job per case, through submitit, which can also run jobs on this machine (cluster=local)."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ffncli.bench.launchers.slot import SlotEvent, measured
from ffncli.bench.request.machines import LauncherChoice, SlotSize
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.system.packages import require_extra

_JOBS = 16  # maximum number of jobs, waiting or running, unless --slots is given
_CLUSTERS = ("slurm", "local")


@contextmanager
def slurm_slots(cluster: LauncherChoice, size: SlotSize, seconds: float, logs: Path) -> "Iterator[SlurmSlots]":
    """Yield the jobs of a run; end remaining jobs afterwards. `logs` is their folder, which every machine must see.

    Raises FFNError for an option that sbatch does not have, and (exit 3) if there is no SLURM.
    """
    require_extra("submitit", "slurm")
    import submitit  # type: ignore[import-not-found,import-untyped,unused-ignore]

    where = cluster.options.get("cluster", "slurm")
    if where not in _CLUSTERS:
        why = f"--launcher-option cluster: unknown value {shown(where)}"
        raise FFNError(why, f"use one of {', '.join(_CLUSTERS)}")
    try:
        executor = submitit.AutoExecutor(folder=logs.absolute(), cluster=where)
    except RuntimeError:
        hint = "run it where sbatch works, or try it on this machine: --launcher-option cluster=local"
        raise FFNError("SLURM is not available: srun was not found", hint, ExitCode.ENVIRONMENT) from None
    except OSError as error:
        raise FFNError(f"cannot create {logs}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    known = set(submitit.SlurmExecutor._valid_parameters())
    executor.update_parameters(**parameters(cluster.options, size, seconds, known))
    slots = SlurmSlots(executor, cluster.slots or _JOBS)
    try:
        yield slots
    finally:
        slots.cancel()


def parameters(options: Mapping[str, str], size: SlotSize, seconds: float, known: set[str]) -> dict[str, Any]:
    """Return submitit's parameters of a job. `known` are the sbatch options that are parameters of submitit; other
    options are passed on unchanged. Raises FFNError for a time that is not in minutes."""
    minutes = options.get("time", str(max(10, math.ceil(seconds / 60))))
    if not minutes.isdecimal() or not int(minutes):
        raise FFNError(f"--launcher-option time: {shown(minutes)} is not a number of minutes", "as in time=60")
    given = {key: _value(value) for key, value in options.items() if key not in ("cluster", "time")}
    if "setup" in options:
        given["setup"] = [options["setup"]]  # shell commands that run before the job
    more = {key: value for key, value in given.items() if key not in known}
    settings = {f"slurm_{key}": value for key, value in given.items() if key in known}
    if more:
        settings["slurm_additional_parameters"] = more
    gpus = size.gpus if size.gpus and not {"gpus", "gres", "gpus_per_node", "gpus_per_task"} & given.keys() else None
    return {
        "name": "ffn", "timeout_min": int(minutes), "cpus_per_task": size.cores, "gpus_per_node": gpus, **settings,
    }  # fmt: skip


def _value(text: str) -> Any:
    """Convert a number or a flag to the type that submitit expects; return other values unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


@dataclass
class SlurmSlots:
    """Up to `count` jobs at once."""

    executor: Any
    count: int
    _jobs: dict[str, Any] = field(default_factory=dict)  # case → its job
    _started: set[str] = field(default_factory=set)

    @property
    def free(self) -> int:
        """The number of jobs that can be submitted now."""
        return self.count - len(self._jobs)

    def submit(self, case: str, task: str) -> None:
        """Submit the case's job. Raises FFNError (exit 3) if SLURM rejects it."""
        from submitit.core.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            FailedJobError,
            FailedSubmissionError,
        )

        try:
            self._jobs[case] = self.executor.submit(measured, task)
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            text = " ".join(str(error).split())[-200:]
            raise FFNError(f"SLURM rejected the job: {text}", code=ExitCode.ENVIRONMENT) from None

    def events(self, patience: float) -> Sequence[SlotEvent]:
        """Return an event for each job that has started, and for each that is finished."""
        events = list(self._look())
        if not events:
            time.sleep(patience)
            events = list(self._look())
        return events

    def cancel(self) -> None:
        """Cancel the remaining jobs."""
        for job in self._jobs.values():
            with suppress(Exception):  # it is already finished, or SLURM does not answer
                job.cancel(check=False)
        self._jobs.clear()

    def _look(self) -> Iterator[SlotEvent]:
        for case, job in list(self._jobs.items()):
            over = job.done()
            if case not in self._started and (over or job.state.upper() == "RUNNING"):
                self._started.add(case)
                yield SlotEvent("started", case, _place(job))
            if over:
                del self._jobs[case]
                self._started.discard(case)
                yield _ended(case, job)


def _ended(case: str, job: Any) -> SlotEvent:
    """Return the event that reports how a case's job ended."""
    from submitit.core.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        FailedJobError,
        UncompletedJobError,
    )

    place = _place(job)
    try:
        return SlotEvent("answered", case, place, str(job.result()))
    except FailedJobError as error:  # the job's Python code raised; the error is a traceback and the folder of the logs
        trace = str(error).split("-" * 22)
        lines = (trace[1] if len(trace) > 2 else trace[0]).strip().splitlines()
        why = f"{lines[-1] if lines else 'failed'} (logs: {job.paths.folder})"
        return SlotEvent("refused", case, place, why)
    except UncompletedJobError:
        return SlotEvent("lost", case, place, f"its job ended ({job.state}); logs: {job.paths.folder}")


def _place(job: Any) -> str:
    """Return the job's machine and id, as in `node7, job 4711`."""
    info = job.get_info()
    return f"{info.get('NodeList') or 'this machine'}, job {job.job_id}"

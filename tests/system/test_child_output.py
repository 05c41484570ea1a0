"""What a child prints: passed on, cut where it is a flood, and nobody waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ffncli.system.child_output import MOST_OUTPUT, PrintedBytes, passed_on


def printed(code: str, most: PrintedBytes | None = None) -> None:
    with passed_on(most or PrintedBytes()) as output:
        subprocess.run([sys.executable, "-S", "-c", code], stdout=output, stderr=output, check=True)


def test_prints_appear_on_stderr(capfd):
    printed("import sys; print('one ü'); print('two', file=sys.stderr)")
    out, err = capfd.readouterr()
    assert (out, sorted(err.splitlines())) == ("", ["one ü", "two"])


def test_a_flood_is_cut_and_does_not_wait(capfd):
    printed("for n in range(2000): print('x' * 999)")
    _, err = capfd.readouterr()
    assert (
        err
        == ("x" * 999 + "\n") * 65
        + "x" * 536
        + f"\nnote: the output of the worker was cut after {MOST_OUTPUT >> 10} KiB\n"
    )


def test_every_source_has_its_share_and_is_cut_once(capfd):
    most = PrintedBytes("mine", most=2048)
    for source in ("mine", "mine", "yours"):
        most.source = source
        printed("print('y' * 3000)", most)
    _, err = capfd.readouterr()
    note = "\nnote: the output of {} was cut after 2 KiB\n"
    assert err == "y" * 2048 + note.format("mine") + "y" * 2048 + note.format("yours")


def test_a_process_that_keeps_the_pipe_is_not_waited_for(capfd):
    start = time.monotonic()
    with passed_on(PrintedBytes()) as output:
        holder = subprocess.Popen(["sleep", "60"], stdout=output)
        os.write(output, b"the last words\n")
    assert time.monotonic() - start < 30
    holder.kill()
    holder.wait()
    assert capfd.readouterr().err == "the last words\n"


def test_no_stderr_is_no_reason_to_stop(monkeypatch):
    """More than a pipe holds is read all the same, so the child ends by itself."""
    monkeypatch.setattr(sys, "stderr", None)
    most = PrintedBytes()
    printed("for n in range(200): print('x' * 999)", most)
    assert most.counts == {"the worker": 200 * 1000}

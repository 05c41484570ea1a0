"""A command whose ranks meet and do nothing else, run by ffn's own main: `python -m tests.ranks.meets MODE LINE`.

Rank 1 then `dies`, `waits` for a signal, or `fails`; `launch-MODE` starts two such ranks first. The ranks write their
process ids to the file LINE when they have met.
"""

import os
import signal
import sys

from ffncli.block.shard import Ranks
from ffncli.cli import main


def command(mode: str, line: str) -> int:
    """Under ffn's name `verify`, which every rank runs."""
    name, _, then = mode.partition("-")
    if name == "launch":
        from ffncli.run.ranks.process import run_ranks

        return run_ranks(2, (sys.executable, "-m", "tests.ranks.meets", then, line))
    from torch import distributed

    from ffncli.run.ranks.join import joined

    with joined(Ranks(2), "cpu", 15.0) as group:
        with open(line, "w") as file:
            file.write(f"{os.getpid()}\n")
        if group.rank == 1:
            match mode:
                case "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "waits":
                    signal.pause()
                case "fails":
                    raise ValueError("on one rank")
        distributed.barrier()
    return 0


if __name__ == "__main__":
    main.COMMANDS["verify"] = ("tests.ranks.meets", "")
    main.main(["verify", *sys.argv[1:]])

"""`python -m tests.fuzz [--cases 5000] [--seed 0] [--only FORMAT[/NUMBER]]`: a line per format.

Exit 1 for a wrong answer, or for more memory than any answer needs.
"""

import argparse
import sys
import warnings
from collections import Counter

import tests.conftest  # noqa: F401  the environment of all tests
from tests.fuzz.answers import SECONDS, peak_bytes
from tests.fuzz.formats import FORMATS, run_case

MOST_BYTES = 2 << 30  # of memory: torch, transformers' configs and all specimens take a quarter


def main() -> int:
    """Draw the cases, print what came of them, and one line for each wrong answer."""
    options = argparse.ArgumentParser()
    options.add_argument("--cases", type=int, default=5000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    name, _, number = asked.only.partition("/")
    if number:
        command, given = run_case(name, int(number), asked.seed)
        print(command, f"exit {given.code}, {given.seconds:.2f} s", given.wrong, given.text, sep="\n")
        return bool(given.wrong)
    names = [name] if name else list(FORMATS)
    wrong = 0
    for at, one in enumerate(names):
        count = asked.cases // len(names) + (at < asked.cases % len(names))
        wrong += _format(one, count, asked.seed)
    print(f"{asked.cases} cases, seed {asked.seed}: {wrong} wrong answers; peak memory {peak_bytes() / 2**20:.0f} MiB")
    return bool(wrong) or peak_bytes() > MOST_BYTES


def _format(name: str, count: int, seed: int) -> int:
    codes: Counter[int] = Counter()
    slowest, wrong = 0.0, 0
    for number in range(count):
        command, given = run_case(name, number, seed)
        codes[given.code] += 1
        slowest = max(slowest, given.seconds)
        if given.wrong:
            wrong += 1
            last = given.text.strip().splitlines()[-1:]
            print(f"WRONG {name}/{number}: {given.wrong}; {command!r}: {last}", flush=True)
    exits = ", ".join(f"{codes[code]} exit {code}" for code in sorted(codes))
    print(f"{name:12} {count:5} cases: {exits}; slowest {slowest:.2f} s of {SECONDS}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""Write the generated parts of the manual: the help of each command, and other tables, between markers in the pages.

    python -m docs.generated [--check]      write them; with --check, exit 1 and list the pages that are out of date

The scripts that measured the files in benchmarks/results also summarise those files as these tables.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import (
    auto_choices,
    certificates,
    conv1x1,
    formats,
    kernel_map,
    method,
    plan_fit,
    plan_measured,
    plan_published,
    precision_models,
    results_table,
    timers,
)  # fmt: skip
from benchmarks.script import put, read
from docs.blocks import in_process
from ffncli.bench.benchmark import BenchQuestion
from ffncli.bench.judge.memory_need import memory_need
from ffncli.bench.request.options import (
    CONFLICTS,
    DIMENSIONS,
    LauncherOptions,
    ParallelOptions,
    ResultOptions,
    SuiteOptions,
)
from ffncli.bench.request.suite import public_suite
from ffncli.block.recipe import FFNSpec
from ffncli.cli.main import COMMANDS
from ffncli.cli.trace import command as trace
from ffncli.kernels import kernel_list
from ffncli.options.conflicts import table
from ffncli.options.opt import options_of, speak_of
from ffncli.run.activations import question as activations
from ffncli.run.trace import question as trace_question
from ffncli.run.verify import question as verify
from ffncli.show.text import bytes_text, counted

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
RULES = {  # command → the record that says how its options are typed, and its rules
    "activations": (activations.DataQuestion, activations.CONFLICTS),
    "verify": (verify.VerifyQuestion, verify.CONFLICTS),
    "trace": (
        trace_question.Question,
        (*trace_question.RULES, *trace_question.ONE_LAYER, *trace.MANY_RULES, *trace.PAGE_RULES),
    ),
}
WRITER = "written by make docs-update"


def help_of(name: str) -> str:
    """Return the help of a command, or of `ffn` itself if `name` is empty, as printed in a pipe."""
    out, err, code = in_process([*filter(None, [name]), "--help"])
    if code:
        raise RuntimeError(f"ffn {name} --help: exit {code}: {err}")
    rules = ""
    if name in RULES:
        record, conflicts = RULES[name]
        speak_of(record)
        rules = table(conflicts, {"the dimension options": DIMENSIONS})
    rules = f"\n\nOptions that contradict or need each other:\n\n{rules}" if rules else ""
    return f"```text\n{out.strip()}\n```{rules}"


def commands() -> str:
    """Return the links to the pages of the commands, and the help of `ffn` itself."""
    return " · ".join(f"[{name}](commands/{name}.md)" for name in COMMANDS) + f"\n\n{help_of('')}"


def architectures() -> str:
    """Return a sentence that says for how many architectures three ways of counting agree."""
    rows = read(RESULTS / "architectures.csv")
    counts = Counter(row["result"] for row in rows)
    others = ", ".join(f"{count} {result}" for result, count in counts.most_common() if result != "same")
    return (
        f"{counts['same']} of the {len(rows)} text architectures in transformers (every model type that takes token "
        f"ids) have the same count by config, headers and module ({others}). "
        "[The table](../benchmarks/results/architectures.csv) gives the reasons."
    )


def peers() -> str:
    """Return a table that compares other counters with `ffn params` on the same block."""
    rows = [row for row in read(RESULTS / "peers.csv") if row["params"]]
    body = [
        (row["program"], row["version"], f"{int(row['params']):,}", f"{int(row['operations']):,} {row['unit']}",
         f"{float(row['wall_s']):.2f} s", f"{int(row['peak_bytes']) / 1e6:.0f} MB")
        for row in rows
    ]  # fmt: skip
    return _table(("program", "version", "parameters", "operations", "time", "memory"), body)


def suite_cases(name: str) -> str:
    """Return a table of the cases of a public suite."""
    suite = public_suite(name)
    body = [
        (track, case.label, _widths(case.spec), str(case.tokens), case.dtype, case.cache, case.routing,
         bytes_text(memory_need(case, 1).weights))
        for track in suite.tracks
        for case in suite.cases(track)
    ]  # fmt: skip
    head = ("device", "block", "widths", "tokens", "dtype", "cache", "routing", "weights")
    return _table(head, body)


def _widths(spec: FFNSpec) -> str:
    """Return text such as `2880x2880 quick_gelu, gated, 128 experts, top 4`."""
    moe = spec.moe
    latent = "" if moe is None or moe.latent is None else f", latent {moe.latent}"
    experts = "" if moe is None else f", {moe.experts} experts, top {moe.top_k}{latent}"
    return f"{spec.d_model}x{spec.d_ff} {spec.activation}{', gated' if spec.gated else ''}{experts}"


def conflicts() -> str:
    """Return a table of the options of `ffn bench` that contradict or need each other."""
    for record in (BenchQuestion, ParallelOptions, ResultOptions, SuiteOptions, LauncherOptions):
        options_of(record)  # so that the table spells options as they are typed
    return table(CONFLICTS, {"the dimension options": DIMENSIONS})


def kernels() -> str:
    """Return a table of the package's kernels."""
    body = []
    for one in kernel_list():
        most = [] if one.most_tokens is None else [f"up to {counted(one.most_tokens, 'token')}"]
        named = [] if one.by_default else ["only if named"]
        needs = [f"needs {', '.join(one.needs)}"] if one.needs else []
        facts = [one.blocks, ", ".join(one.dtypes), ", ".join(one.devices), one.passes, *most, *needs, *named]
        body.append((f"`{one.kernel}`", one.computes, "; ".join(facts)))
    return _table(("kernel", "how it computes the block", "which blocks, dtypes, devices and passes"), body)


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "commands.md": {"help": commands},
    **{f"commands/{name}.md": {"help": partial(help_of, name)} for name in COMMANDS},
    "benchmarking.md": {"conflicts": conflicts, "kernels": kernels},
    "method.md": {
        "architectures": architectures,
        "peers": peers,
        "bench_method": lambda: method.summary(read(RESULTS / "bench_method.csv"))[0],
        "timers": lambda: timers.summary(read(RESULTS / "timers.csv"))[0],
    },
    "plan.md": {
        "plan_constants": plan_fit.constants_table,
        "plan_fit": lambda: plan_fit.summary(read(RESULTS / "plan_fit.csv")),
        "plan_published": lambda: plan_published.summary(plan_published.all_predictions()),
        "plan_measured": lambda: plan_measured.summary(read(RESULTS / "plan_measured.csv")),
    },
    "results.md": {
        "kernel_map": lambda: kernel_map.summary(read(RESULTS / "kernel_map.csv")),
        "auto_choices": lambda: auto_choices.summary(read(RESULTS / "auto_choices.csv")),
        "ffn_1": lambda: suite_cases("ffn-1"),
        "results": results_table.standings,
    },
    "precision.md": {
        "precision_models": lambda: precision_models.summary(read(precision_models.RESULTS)),
        "formats": lambda: formats.summary(read(formats.RESULTS)),
        "rules": lambda: formats.rules(read(formats.RESULTS)),
    },
    "verify.md": {"certificates": lambda: certificates.summary(read(RESULTS / "certificates.csv"))},
    "findings.md": {"conv1x1": lambda: conv1x1.summary(read(RESULTS / "conv1x1.csv"))},
}


def written(page: str) -> str:
    """Return a page with all its generated sections up to date."""
    text = (DOCS / page).read_text("utf-8")
    for name, section in SECTIONS[page].items():
        text = put(text, f"<!-- {name}: {WRITER} -->", section())
    return text


def kernel_picture() -> str:
    """Return docs/kernels.svg, the map of kernels."""
    return kernel_map.picture(read(RESULTS / "kernel_map.csv"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def main() -> int:
    """Write or check every generated page."""
    options = argparse.ArgumentParser(description="The generated parts of the manual.")
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    new = {
        "kernels.svg": kernel_picture(),
        "plan.svg": plan_fit.picture(),
        **{page: written(page) for page in SECTIONS},
    }
    stale = [
        name for name, text in new.items() if not (DOCS / name).exists() or (DOCS / name).read_text("utf-8") != text
    ]
    for name in stale:
        print(f"docs/{name}: {'out of date, make docs-update' if check else 'written'}")
        if not check:
            (DOCS / name).write_text(new[name], "utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

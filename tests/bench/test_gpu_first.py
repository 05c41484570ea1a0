"""gpu_first: its parts stay below ten minutes, its verdicts are right on made-up figures, no probe harms another."""

from __future__ import annotations

import json
import os
import re
import sys
import time

import pytest

from benchmarks import gpu_first
from benchmarks.gpu_first import __main__ as command
from benchmarks.gpu_first import clock, device, facts, faults, method
from benchmarks.gpu_first import probe as asked
from benchmarks.gpu_first.probe import Answer, Probe
from benchmarks.gpu_first.run import (
    COLUMNS,
    LONGEST_PART_S,
    PARTS,
    Outcome,
    line,
    listing,
    outcome,
    probe_of,
    run_part,
)
from benchmarks.script import Kept, read

EVERY = [probe for probes in PARTS.values() for probe in probes]


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_over_in_ten_minutes(part):
    assert sum(probe.limit_s for probe in PARTS[part]) <= LONGEST_PART_S


def test_probes_have_names_questions_and_places_to_look():
    assert len({probe.name for probe in EVERY}) == len(EVERY)
    for probe in EVERY:
        assert probe_of(probe.name) is probe
        assert probe.question.endswith("?")
        assert re.fullmatch(r"[A-C]\d+|-", probe.finding)
        assert probe.look
        for path in re.findall(r"\bffncli/[\w/]+(?:\.py)?", probe.look):
            assert os.path.exists(os.path.join(os.path.dirname(gpu_first.__file__), "..", "..", path)), path


def test_the_hypotheses_that_a_gpu_decides_are_there():
    by_part = {"A": (1, 2, 5, 6, 8, 9, 10, 11, 12), "B": range(1, 11), "C": range(1, 8)}
    assert {f"{letter}{number}" for letter, numbers in by_part.items() for number in numbers} <= {
        probe.finding for probe in EVERY
    }


def test_the_list_needs_no_gpu(capsys):
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert out == listing() + "\n"
    assert "clock: at most " in out
    assert all(probe.name in out and probe.question in out for probe in EVERY)
    assert max(map(len, out.splitlines())) <= 120


def test_without_a_gpu_it_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(command, "device", lambda: ("", "torch 2.13.0+cpu sees none"))
    assert command.main(["clock"]) == 3
    captured = capsys.readouterr()
    assert captured.err == "error: there is no GPU to probe here: torch 2.13.0+cpu sees none\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('print(\'{"torch": "2.13", "device_name": "NVIDIA H200"}\')', ("NVIDIA H200", "torch 2.13 sees none")),
        ('print(\'{"torch": "2.13", "device_name": ""}\')', ("", "torch 2.13 sees none")),
        ("raise RuntimeError('CUDA error: out of memory')", ("", "RuntimeError: CUDA error: out of memory")),
        ("print('hello')", ("", "it printed nothing")),
        ("", ("", "it printed nothing")),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(monkeypatch, code, expected):
    monkeypatch.setattr(command, "_LOOK", code)
    assert command.device() == expected


def test_a_folder_is_named_after_the_gpu():
    assert command.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert command.slug("…") == "gpu"


# --- what becomes of a probe ------------------------------------------------------------------------------------------


def probe(limit: float = 20, expected: bool | None = True) -> Probe:
    def judge(figures):
        return Answer(figures["x"] > 1, f"x is {figures['x']}")

    return Probe("made-up", "A6", "Is x more than 1?", limit, dict, judge, expected, "here", {"FFN_MADE_UP": "7"})


def run(code: str, limit: float = 20) -> tuple[Outcome, str]:
    """A probe whose process runs this code; NAME and FILE are its arguments."""
    program = f"import json, os, sys, time\nNAME, FILE = sys.argv[1:]\n{code}"
    with open(os.memfd_create("log"), "w+b") as log:
        done = outcome(probe(limit), log, [sys.executable, "-c", program])
        log.seek(0)
        return done, log.read().decode()


def write(figures: object) -> str:
    return f"open(FILE, 'w').write({json.dumps(figures)!r})"


def test_an_answer_comes_from_the_figures():
    done, log = run(f"print('noise'); print('more', file=sys.stderr)\n{write({'x': 2})}")
    assert (done.answer, done.figure, json.loads(done.figures)) == ("yes", "x is 2", {"x": 2})
    assert "=== made-up: Is x more than 1?" in log
    assert "noise" in log
    assert "more" in log
    assert run(write({"x": 1}))[0].answer == "no"


def test_variables_reach_the_probe():
    done, _ = run("open(FILE, 'w').write(json.dumps({'x': int(os.environ['FFN_MADE_UP'])}))")
    assert done.figure == "x is 7"


@pytest.mark.parametrize(
    ("code", "answer", "figure"),
    [
        ("sys.exit(3)", "failed", "its process ended with exit code 3: nothing in the log"),
        ("os.kill(os.getpid(), 11)", "failed", "its process was ended by signal 11 (segmentation fault)"),
        (
            "raise RuntimeError('device-side assert')",
            "failed",
            "its process ended with exit code 1: RuntimeError: device-",
        ),
        ("sys.exit('\x1b[31m')", "failed", "its process ended with exit code 1: "),
        ("pass", "garbage", "no figures: FileNotFoundError"),
        ("open(FILE, 'w').write('{')", "garbage", "no figures: JSONDecodeError"),
        ("open(FILE, 'wb').write(bytes(range(256)))", "garbage", "no figures: UnicodeDecodeError"),
        ("open(FILE, 'w').write('[' * 100000)", "garbage", "no figures: RecursionError"),
        (write([1]), "garbage", "no figures: TypeError"),
        (write({}), "garbage", "no figures: KeyError: 'x'"),
        (write({"x": "\x1b[31mred"}), "garbage", "no figures: TypeError"),
    ],
)
def test_what_crashes_or_writes_garbage_costs_its_own_line(code, answer, figure):
    done, _ = run(code)
    assert done.answer == answer
    assert done.figure.startswith(figure)
    assert "\x1b" not in done.figure


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path):
    number = tmp_path / "number"
    code = f"import subprocess; one = subprocess.Popen(['sleep', '60']); open({str(number)!r}, 'w').write(str(one.pid))"
    done, _ = run(f"{code}; time.sleep(60)", limit=0.5)
    assert (done.answer, done.figure) == ("timeout", "did not end within 0.5 s")
    until = time.monotonic() + 10
    while running(number.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)


def running(number: str) -> bool:
    """Whether a process is there and has not ended; nobody need have reaped it."""
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_probe_has_a_line_and_a_row(tmp_path, capsys):
    kept = Kept(str(tmp_path / "gpu_first.csv"), COLUMNS, {"device_name": "a GPU"})
    program = f"import sys\nNAME, FILE = sys.argv[1:]\n{write({'x': 1})}"
    with open(tmp_path / "log", "w+b") as log:
        command = [sys.executable, "-c", program]
        assert run_part("clock", [probe(), probe(expected=False)], kept, log, command) == 0
        assert run_part("none", [probe()], Kept(None, COLUMNS, {}), log, [sys.executable, "-c", "0/0"]) == 1
    first, look, second, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"A6   made-up          no       x is 1  \d+\.\d s", first)
    assert look.split() == ["look", "at:", "here"]
    assert second.startswith("A6   made-up          no")
    assert "failed   its process ended with exit code 1: ZeroDivisionError: division by zero" in last
    rows = read(tmp_path / "gpu_first.csv")
    assert [(r["part"], r["answer"], r["expected"], r["device_name"]) for r in rows] == [
        ("clock", "no", "yes", "a GPU"),
        ("clock", "no", "no", "a GPU"),
    ]


def test_a_line_without_an_expected_answer_has_no_advice():
    assert "look at" not in line(probe(expected=None), Outcome("yes", "x", "", 1.0))
    assert "look at" not in line(probe(), Outcome("timeout", "x", "", 1.0))
    assert "look at" in line(probe(), Outcome("no", "x", "", 1.0))


# --- verdicts ---------------------------------------------------------------------------------------------------------


def yes(judge, **figures) -> bool | None:
    return judge(figures).yes


def test_verdicts_on_launches():
    assert yes(clock.judge_events, pair_s=1e-6, one_s=5.1e-6, each_s=4e-6)
    assert yes(clock.judge_events, pair_s=1e-6, one_s=4.9e-6, each_s=4e-6) is False
    nodes = {"nodes_500_s": 1e-6, "nodes_5_s": 1.1e-6, "nodes_1_s": 1.6e-6}
    answer = clock.judge_graph_launch(nodes)
    assert answer.yes
    # One launch of five nodes: 5 times the 0.1 µs that each of its nodes takes longer.
    assert answer.figure == "0.6 µs more for a graph of one node, 0.5 µs for one of 5; a node among 500: 1 µs"
    assert clock.judge_graph_launch(nodes | {"nodes_1_s": 1.4e-6}).yes is False
    assert yes(clock.judge_first_replay, first_s=13e-6, second_s=10e-6)
    assert yes(clock.judge_first_replay, first_s=11e-6, second_s=10e-6) is False
    assert yes(clock.judge_queue, plain=4096, graphs=2048)
    assert yes(clock.judge_queue, plain=4096, graphs=1024) is False
    assert yes(clock.judge_side_stream, events_s=10e-6, host_s=5e-3)
    assert yes(clock.judge_side_stream, events_s=5e-3, host_s=5e-3) is False


def test_verdicts_on_kernels_and_caches():
    sizes = {"a": {"plain_s": 2.0, "graph_s": 1.0, "kernels_s": 0.9}, "b": {"graph_s": 1.0, "kernels_s": 0.97}}
    answer = clock.judge_kernel_time(sizes)
    assert answer == Answer(True, "not in a kernel, at a: +10.0 %; b: +3.0 %")
    assert clock.judge_kernel_time({"b": sizes["b"]}).yes is False
    assert yes(clock.judge_flush, write_s=1.04e-5, read_s=1e-5)
    assert yes(clock.judge_flush, write_s=1.02e-5, read_s=1e-5) is False
    times = {"times_1_s": 1e-6, "times_2_s": 2e-6, "times_3_s": 2.99e-6, "times_5_s": 3e-6}
    assert yes(clock.judge_copies, **times)
    assert yes(clock.judge_copies, **times | {"times_3_s": 2.9e-6}) is False
    same = {f"{what}_{fill}_s": 1.0 for what in ("product", "copy") for fill in ("zeros", "ones", "random")}
    assert yes(clock.judge_data, **same) is False
    assert yes(clock.judge_data, **same | {"product_zeros_s": 0.9})
    assert "product of zeros -10.0 %" in clock.judge_data(same | {"product_zeros_s": 0.9}).figure


def test_verdicts_on_clocks_and_power():
    clocks = {"busy_cycles_mhz": 1700.0, "busy_nvml_mhz": 1720, "rest_cycles_mhz": 900.0, "rest_nvml_mhz": 345}
    assert yes(clock.judge_sm_clock, **clocks, reading_s=2e-3)
    assert yes(clock.judge_sm_clock, **clocks | {"busy_nvml_mhz": 1980}, reading_s=2e-3) is False
    power = {"busy_read_w": 400.0, "rest_read_w": 380.0, "busy_energy_w": 600.0, "rest_energy_w": 120.0}
    assert clock.judge_power(power) == Answer(True, "busy less rest: 20 W by readings, 480 W by energy")
    assert yes(clock.judge_power, **power | {"busy_read_w": 590.0, "rest_read_w": 130.0}) is False


def row(kernel: str, status: str = "ok", **more: str) -> dict[str, str]:
    return dict.fromkeys(asked._COLUMNS, "") | {"kernel": kernel, "status": status, "case": "c"} | more


def answered(*rows: dict[str, str], code: int = 0, wall_s: float = 10.0) -> dict[str, object]:
    return {"code": code, "wall_s": wall_s, "rows": list(rows), "spent": {}}


def test_a_fault_costs_its_own_row_only():
    good = [row("eager"), row("packed")]
    bad = row("bad", "failed", note="CUDA error: device-side assert")
    answer = faults.judge_own_row(answered(*good, bad, code=1))
    assert answer == Answer(True, "exit 1: eager ok, packed ok, bad failed (CUDA error: device-side assert)")
    assert faults.judge_own_row(answered(*good, row("bad"))).yes is False
    assert faults.judge_own_row(answered(row("eager"), row("packed", "failed"), bad)).yes is False
    assert faults.judge_own_row(answered(*good)).yes is False
    assert faults.judge_own_row(answered()) == Answer(False, "exit 0: no rows")


def test_verdicts_on_launches_and_memory():
    assert faults.judge_launch(answered(row("eager", launch="plain"), row("bad", launch="plain"))).yes
    assert faults.judge_launch(answered(row("eager"), row("bad"))).yes is False
    assert faults.judge_launch(answered(row("eager", "failed", launch="plain"))).yes is False
    assert faults.judge_launch(answered()).yes is False
    cases = [{"reserved": 30e9, "allocated": 1e9}, {"reserved": 2e9, "allocated": 1e9}]
    assert faults.judge_reserved({"total": 140e9, "after": cases}).yes
    assert faults.judge_reserved({"total": 140e9, "after": cases[1:]}).yes is False
    in_use = [{"reserved": 30e9, "allocated": 29e9}]
    assert faults.judge_reserved({"total": 140e9, "after": in_use}).yes is False
    # gate, up, silu(gate), their product: 4 · 2048 · 11008 · 2 bytes = 180,355,072.
    assert faults.judge_peak(answered(row("eager", peak_memory_bytes="180355072"))).yes
    without_output = 180_355_072 - 2048 * 4096 * 2
    assert faults.judge_peak(answered(row("eager", peak_memory_bytes=str(without_output)))).yes is False
    assert faults.judge_peak(answered(row("eager", "failed"))).yes is False
    assert faults.judge_compiled(answered(row("compiled"))).yes
    assert faults.judge_compiled(answered(row("compiled", "failed", note="torch compiled during timing"))).yes is False
    assert faults.judge_compiled(answered(row("eager"))).yes is False


def test_verdicts_on_the_method():
    rows = [row("eager", roof_fraction="0.9", warnings="launch-bound: 3 %"), row("packed", roof_fraction="1.01")]
    answer = method.judge_llama(answered(*rows, wall_s=120))
    assert answer == Answer(True, "exit 0; 1.5 times the requested time; at most 101 % of roof; 1 of 2 launch-bound")
    assert method.judge_llama(answered(*rows, wall_s=200)).yes is False
    assert method.judge_llama(answered(row("eager", roof_fraction="1.05"), wall_s=100)).yes is False
    assert method.judge_llama(answered(wall_s=1)).yes is False
    times = {"cold-weights": "1e-5", "flush": "1.05e-5", "warm": "4e-6"}
    rows = [row("eager", cache=name, time_s=seconds) for name, seconds in times.items()]
    assert method.judge_caches(answered(*rows)) == Answer(True, "cold-weights 10 µs, flush 10.5 µs, warm 4 µs")
    assert method.judge_caches(answered(*rows[:2])).yes is False
    rows[1] |= {"time_s": "2e-5"}
    assert method.judge_caches(answered(*rows)).yes is False
    assert method.judge_selftest(answered(code=1)).yes is False
    assert method.judge_reach(answered(row("eager"), row("packed", "skipped"))).yes
    assert method.judge_reach(answered(row("eager", "failed"))).yes is False


def test_verdicts_on_repeats():
    def runs(verdict: str, low: str, high: str) -> dict[str, object]:
        first = row("packed", verdict="faster", ratio_low="0.9", ratio_high="0.95")
        return {"runs": [[first], [row("packed", verdict=verdict, ratio_low=low, ratio_high=high)]]}

    assert method.judge_again(runs("faster", "0.94", "0.97")).yes
    assert method.judge_again(runs("slower", "1.03", "1.05")) == Answer(
        False, "1 of 1 turned round; 0 of 1 intervals overlap"
    )
    assert method.judge_again(runs("faster", "0.96", "0.97")).yes is False
    assert method.judge_again({"runs": [[], []]}).yes is False
    assert method.judge_same_code({"rows": [row("again", verdict="same"), row("again", verdict="inconclusive")]}).yes
    assert method.judge_same_code({"rows": [row("again", verdict="faster")]}).yes is False
    assert method.judge_same_code({"rows": []}).yes is False


def test_facts_are_read():
    output = "FAILED tests/x.py::test_20_passed\n2 failed, 31 passed, 1 skipped, 2 errors in 60.1s (0:01:00)\n"
    counts = facts.counted(output)
    assert counts == {"passed": 31, "failed": 2, "skipped": 1, "error": 2}
    assert facts.judge_tests(counts | {"code": 1}) == Answer(False, "31 passed, 2 failed, 1 skipped, 2 error")
    assert facts.judge_tests(facts.counted("40 passed in 3s") | {"code": 0}).yes
    assert facts.judge_tests(facts.counted("40 skipped in 3s") | {"code": 0}).yes is False  # none ran
    nodes = {"nodes": ["/dev/nvidia3", "/dev/nvidiactl"], "proc": False, "torch": 1, "trace_code": 3}
    assert facts.judge_nodes(nodes) == Answer(False, "ffn trace: exit 3; nvidia3, nvidiactl; no /proc/driver/nvidia")
    assert facts.judge_nodes(nodes | {"trace_code": 0, "proc": True}).figure == "ffn trace: exit 0; nvidia3, nvidiactl"
    machine = {"smi": "NVIDIA H200, 580.1,  700.00 W\n", "cuda": "13.0", "cudnn": 91000, "triton": "3.7.1"}
    answer = facts.judge_machine(machine | {"nvidia-ml-py": "missing"})
    assert answer.figure == "NVIDIA H200, 580.1, 700.00 W; cuda 13.0; cudnn 91000; triton 3.7.1; nvidia-ml-py missing"
    assert facts.judge_doctor({"code": 0}).yes


def test_verdicts_on_what_is_seen():
    text = "1 other process uses this GPU (139.2 GB, 0 % busy)"
    assert device.judge_neighbours({"text": text}) == Answer(True, text)
    assert device.judge_neighbours({"text": ""}) == Answer(False, "no other process is seen")
    clocks = {"why": "", "mhz": 1710, "rated_mhz": 1980, "mig": False, "why_low": ["power cap"], "flags": ["sm=1710"]}
    assert device.judge_clocks(clocks) == Answer(True, "1710 of 1980 MHz (power cap); flags ['sm=1710']")
    assert device.judge_clocks(clocks | {"flags": ["sm=1300", "clock=0.66"]}).yes is False
    assert device.judge_clocks(clocks | {"flags": ["gpu-throttled"], "mig": True}).figure.endswith(
        "(power cap), a part of a card; flags ['gpu-throttled']"
    )
    assert device.judge_clocks(clocks | {"mhz": None}) == Answer(False, "this GPU gives no clock")
    assert device.judge_clocks({"why": "not installed"}) == Answer(False, "not installed")
    known = {"name": "NVIDIA H200", "l2": 60 << 20, "memory": 150e9, "table": {"l2": 60 << 20, "memory": 141e9}}
    assert device.judge_table(known) == Answer(True, "torch reports 60 MiB of L2, the table 60")
    assert device.judge_table(known | {"table": {"l2": 50 << 20, "memory": 141e9}}).yes is False
    unknown = device.judge_table(known | {"table": None})
    assert unknown == Answer(False, "NVIDIA H200 is not in the table; torch reports 60 MiB of L2")
    assert device.judge_current({"last": 1, "current": 1}) == Answer(True, "current is cuda:1 for cuda:1")
    assert yes(device.judge_current, last=1, current=0) is False


def test_verdicts_on_what_cannot_be_used():
    line = "error: --device cuda: no memory is left on the GPU; nvidia-smi shows who uses it"
    hidden = "error: --device cuda: CUDA_VISIBLE_DEVICES= leaves no GPU; unset it"
    ended = {"full: trace": {"code": 3, "lines": [line]}, "hidden: trace": {"code": 3, "lines": [hidden]}}
    assert device.judge_unusable({"ended": ended}) == Answer(True, f"{line} | {hidden}")
    for bad in (
        {"code": 1, "lines": [line]},
        {"code": 3, "lines": ["a warning of torch", line]},
        {"code": 3, "lines": []},
        {"code": 3, "lines": ["error: a bug in ffn, please report: CUDA error"]},
    ):
        assert device.judge_unusable({"ended": ended | {"full: bench": bad}}).yes is False
    answer = device.judge_unusable({"ended": {"full: bench": {"code": 1, "lines": ["a", "b"]}}})
    assert answer.figure == "full: bench: exit 1, 2 lines, b"
    note = "the machine's roof could not be measured: CUDA out of memory"
    assert device.judge_roof({"flops": None, "bytes": None, "note": note}) == Answer(True, note)
    assert device.judge_roof({"flops": 7.9e14, "bytes": 4.2e12, "note": ""}) == Answer(True, "790 TFLOP/s, 4200 GB/s")
    assert device.judge_roof({"flops": None, "bytes": 4e12, "note": ""}).yes is False


def test_verdicts_on_what_surrounds_the_timing():
    cores = {"cores": 16, "gpu_cores": 16, "gpu_s": 4e-6, "cpu_cores": 1, "cpu_s": 4e-6}
    answer = device.judge_cores(cores)
    assert answer == Answer(True, "16 cores, 4 µs a launch for a GPU; bound 1 cores, 4 µs a launch; 16 here")
    assert device.judge_cores(cores | {"gpu_cores": 1}).yes is False
    assert device.judge_cores(cores | {"gpu_s": 4.5e-6}).yes is False
    assert device.judge_cudnn({"code": 0, "calls": 12}) == Answer(True, "exit 0; 12 calls of cuDNN")
    assert yes(device.judge_cudnn, code=0, calls=0) is False
    assert yes(device.judge_cudnn, code=1, calls=12) is False
    counters = {"threads": 130, "launching_s": 1.2e-5, "all_s": 4e-4}
    assert device.judge_counters(counters) == Answer(True, "12 µs for the launching threads, 400 µs for all 130")
    assert device.judge_counters(counters | {"launching_s": 3e-5}).yes is False
    took = {"forward": 0.2, "forward+backward": 4.0, "peak": 3e9}
    answer = device.judge_reference(took)
    assert answer == Answer(True, "forward 0.2 s, with backward 4 s, at most 3.0 GB")
    assert device.judge_reference(took | {"forward+backward": 11.0}).yes is False


# --- what is asked of ffn bench ---------------------------------------------------------------------------------------


def test_a_command_is_asked_and_its_rows_come_back(monkeypatch, capsys):
    """Whatever becomes of it: no rows, no JSON, an exit code."""
    monkeypatch.setattr(asked, "command", lambda *words: [sys.executable, "-c", "raise SystemExit(3)", *words])
    found = asked.bench("512x2048:swiglu")
    assert (found["code"], found["rows"], found["spent"]) == (3, [], {})
    program = (
        "import sys; path = sys.argv[sys.argv.index('--save') + 1]; print('{\"spent\": {\"rest\": 1}}');"
        "open(path, 'w').write('case,kernel,status,launch\\na,eager,ok,graphs\\n')"
    )
    monkeypatch.setattr(asked, "command", lambda *words: [sys.executable, "-c", program, *words])
    found = asked.bench("512x2048:swiglu")
    assert found["spent"] == {"rest": 1}
    assert (found["rows"][0]["launch"], found["rows"][0]["note"]) == ("graphs", "")
    assert "--device cuda" in capsys.readouterr().out


def test_the_commands_are_ones_that_ffn_bench_takes(monkeypatch, call):
    """Every command of the parts gets as far as the missing GPU."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the probes themselves run")
    commands = []
    monkeypatch.setattr(asked, "bench", lambda *words: commands.append(words) or answered())
    for module in (faults, method):
        monkeypatch.setattr(module, "bench", asked.bench)
    for one in (*faults.PROBES, *method.METHOD, *method.REPEAT):
        if one.name != "reserved":  # not a command
            one.measure()
    assert len(set(commands)) > 15
    for source in {words[0] for words in commands} - {"--selftest"}:
        assert call("params", source, "--json")[0] == 0
    for words in dict.fromkeys(commands):
        code, _, err = call("bench", *words, "--device", "cuda", "-q")
        assert (code, err.count("\n")) == (3, 1), (words, err)


def test_faulty_kernels_are_right_where_nothing_goes_wrong():
    """On a CPU those that need no GPU: what they compute is the block."""
    import torch

    from benchmarks.gpu_first import faulty
    from ffncli.kernels.choice import choices

    x, gate, up, down = (torch.randn(shape) for shape in ((3, 4), (8, 4), (8, 4), (4, 8)))
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T
    torch.testing.assert_close(faulty.right(x, gate, up, down), expected)
    torch.testing.assert_close(faulty.waits(x, gate, up, down), expected)
    for name in ("assert_first", "assert_later", "too_large", "waits", "spoils_a_capture", "other_stream"):
        assert callable(getattr(faulty, name))
        assert choices([f"bad={asked.KERNELS}:{name}"])[0].attribute == name
    with pytest.raises(RuntimeError, match="nonzero"):
        faulty.assert_first(x, gate, up, down)
    for _ in range(49):
        torch.testing.assert_close(faulty.assert_later(x, gate, up, down), expected)
    with pytest.raises(RuntimeError, match="nonzero"):
        faulty.assert_later(x, gate, up, down)
    with pytest.raises(RuntimeError):
        faulty.too_large(x, gate, up, down)

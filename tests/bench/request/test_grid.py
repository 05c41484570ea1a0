"""One request for the command line, its self-test and the library: defaults, contradictions, where it was asked."""

import re
from types import SimpleNamespace

import pytest
import torch

from ffncli.bench import benchmark as library
from ffncli.bench.benchmark import BenchQuestion
from ffncli.bench.machine import devices
from ffncli.bench.records import BLOCK, Method
from ffncli.bench.request.grid import BenchRequest, Grid, build_request, cases, from_json, threads_of_rank, to_json
from ffncli.bench.request.options import (
    CONFLICTS,
    LauncherOptions,
    MethodOptions,
    ParallelOptions,
    ResultOptions,
    SuiteOptions,
    certificate_files,
    require_compatible,
)
from ffncli.bench.selftest import selftest_request
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError, spelled
from ffncli.kernels.choice import choices
from ffncli.options.conflicts import check
from ffncli.options.opt import options_of
from tests.system import fake_gpu

CPU = Grid("8x16:relu", tokens=(4,), device=("cpu",), threads=(1,))


def request(grid=CPU, kernels=None, baseline=None, method=None, **more):
    return build_request(grid, kernels, baseline, method or Method(), **more)[0]


def test_kernels_and_cases_are_those_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked, notes = build_request(CPU, ["packed"], None, Method(), strict=True, asked={"--tokens": "4"})
    assert asked.kernels == choices(["eager,packed"])
    assert (asked.names, asked.baseline, asked.units) == (("eager", "packed"), "eager", 5)
    assert [(case.source, case.tokens, case.device, case.threads) for case in asked.cases] == [
        ("8x16:relu", 4, "cpu", 1)
    ]
    assert (asked.strict, asked.asked, asked.directory) == (True, {"--tokens": "4"}, str(tmp_path))
    assert [*map(spelled, notes)] == ["compared with eager; baseline='NAME' chooses another"]


def test_of_steps_the_block_is_the_baseline():
    asked = request(method=Method(by_step=True))
    assert (asked.kernels, asked.names, asked.baseline) == ((), (BLOCK,), BLOCK)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"kernels": ["eager"], "method": Method(by_step=True)}, "by_step contradicts kernel"),
        ({"baseline": "eager", "method": Method(by_step=True)}, "by_step contradicts baseline"),
        ({"method": Method(by_step=True, sustained=True)}, "by_step contradicts sustained"),
        ({"method": Method(by_step=True), "fail_if_slower": 0.03}, "by_step contradicts fail_if_slower"),
        ({"method": Method(processes=1), "fail_if_slower": 0.03}, "fail_if_slower contradicts processes=1"),
        ({"method": Method(sustained=True)}, "--sustained needs --device cuda"),
        (
            {"grid": Grid("8x16", passes=("forward+backward",)), "method": Method(by_step=True)},
            "by_step contradicts passes=",
        ),
        ({"method": Method(launch="graphs")}, "launch='graphs' contradicts device='cpu'"),
        ({"grid": Grid("8x16", device=("cuda", "cpu")), "method": Method(launch="graphs")}, "launch='graphs' contr"),
        ({"method": Method(launch="graphs", by_step=True)}, "by_step contradicts launch='graphs'"),
    ],
)
def test_what_contradicts_itself_is_refused_for_the_library_too(asked, why):
    with pytest.raises(FFNError, match=why) as caught:
        request(**asked)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("driver", "cuda", "device"), [(False, True, "cpu"), (True, False, "cpu"), (True, True, "cuda")]
)
def test_the_default_device_is_a_gpu_where_torch_has_one(monkeypatch, driver, cuda, device):
    monkeypatch.setattr(devices, "has_driver", lambda: driver)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: cuda))
    assert devices.default_device() == device
    assert {case.device for case in request(Grid("8x16", threads=(1,))).cases} == {device}


def test_a_gpu_without_a_driver_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch(fake_gpu.NO_DRIVER, 0))
    with pytest.raises(FFNError, match="--device cuda:1: there is no GPU here") as caught:
        request(Grid("8x16", device=("cuda:1",)))
    assert caught.value.code == 3
    with pytest.raises(FFNError, match="there is no GPU here"):
        library.benchmark("8x16", device="cuda")


def test_on_a_gpu_the_selftest_has_calls_that_can_be_slowed(monkeypatch):
    monkeypatch.setattr(devices, "has_driver", lambda: True)

    def case(grid):
        (found,) = selftest_request(grid, Method()).cases
        return found.label, found.tokens

    assert case(Grid(device=("cuda",))) == ("2048x8192:swiglu", 512)
    assert case(Grid(device=("cpu",))) == ("512x2048:swiglu", 32)
    assert case(Grid("8x16:relu", device=("cuda",))) == ("8x16:relu", 32)
    assert case(Grid(tokens=(4,), device=("cuda",))) == ("512x2048:swiglu", 4)


def test_where_no_file_shows_a_gpu_torch_is_asked(monkeypatch):
    """A sandbox may hide /dev and /proc/driver; and nothing is made on the GPU in the parent, which would keep it."""
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch())
    assert {case.device for case in request(Grid("8x16", device=("cuda",))).cases} == {"cuda"}
    assert there.made == []


def test_the_selftest_asks_for_equals_and_for_what_is_5_percent_slower():
    asked = selftest_request(CPU, MethodOptions().method_over(Method(processes=4, max_time=10.0)))
    assert [(kernel.label, kernel.kernel, kernel.factor) for kernel in asked.kernels] == [
        ("eager", "eager", None), ("again", "eager", "1"), ("slowed", "eager", "1.05"),
    ]  # fmt: skip
    assert (asked.baseline, asked.fail_if_slower, asked.method.processes, asked.method.max_time) == (
        "eager",
        0.02,
        4,
        10,
    )


@pytest.mark.parametrize("unit", ["situ", "swiglustep", "deepseek_v4", "swiglu_oai", "swiglu", "geglu_tanh"])
def test_a_case_has_the_name_of_its_unit(unit):
    """Several units have silu."""
    (found,) = cases(Grid(f"8x16:{unit}", tokens=(2,), device=("cpu",)))
    assert found.label == f"8x16:{unit}"


# --- options that contradict ------------------------------------------------------------------------------------------


RECORDS = (BenchQuestion, ParallelOptions, ResultOptions, SuiteOptions, LauncherOptions)
BROKEN = [  # in the order of the table
    ({"list_kernels": True, "source": "4x8"}, "list_kernels contradicts source"),
    ({"admit": "a.csv"}, "admit needs suite"),
    ({"suite": "ffn-1", "admit": "a.csv", "kernel": ("eager",)}, "admit contradicts kernel; it measures nothing"),
    ({"suite": "ffn-1", "tokens": (1,)}, "suite contradicts tokens"),
    ({"resume": "a.csv", "save": "b.csv"}, "resume contradicts save"),
    ({"resume": "a.csv", "certificate": ("c.json",)}, "resume contradicts certificate"),
    ({"slots": 2}, "slots needs launcher"),
    ({"selftest": True, "tp": 2}, "selftest contradicts tp; it tests the benchmark on one rank, on this machine"),
    ({"selftest": True, "plot_file": "a.svg"}, "selftest contradicts plot_file"),
    ({"selftest": True, "in_model": True, "source": "x"}, "selftest contradicts in_model"),
    ({"selftest": True, "passes": ("forward+backward",)}, "selftest contradicts passes='forward+backward'"),
    ({"fail_if_slower": 0.03, "processes": 1}, "fail_if_slower contradicts processes=1"),
    ({"launcher": "ray", "device": ("cpu",), "threads": (1,), "ep": 2}, "launcher contradicts ep"),
    ({"launcher": "ray", "device": ("cpu",)}, "launcher needs threads"),
    ({"launcher": "ray", "threads": (1,)}, "launcher needs device"),
    ({"by_step": True, "baseline": "eager"}, "by_step contradicts baseline; it times steps, not kernels"),
    ({"by_step": True, "sustained": True}, "by_step contradicts sustained"),
    ({"by_step": True, "launch": "graphs", "device": ("cuda",)}, "by_step contradicts launch='graphs'"),
    ({"in_model": True}, "in_model needs source"),
    ({"in_model": True, "source": "x", "d_ff": "4x"}, "in_model contradicts d_ff"),
    ({"in_model": True, "source": "x", "baseline": "eager"}, "in_model contradicts baseline='eager'"),
    ({"in_model": True, "source": "x", "plot": True}, "in_model contradicts plot"),
    ({"ep": 2, "passes": ("forward", "forward+backward")}, "ep contradicts passes='forward+backward'"),
    ({"launch": "graphs", "device": ("cuda", "cpu")}, "launch='graphs' contradicts device='cpu'"),
    ({"calibrate": "full", "kernel": ("eager",)}, "calibrate='full' needs kernel='auto'"),
]


@pytest.mark.parametrize("at", range(len(CONFLICTS)), ids=lambda at: CONFLICTS[at].option)
def test_each_rule_is_broken_by_what_it_names(at):
    rule, (options, message) = CONFLICTS[at], BROKEN[at]
    with pytest.raises(FFNError) as error:
        check(CONFLICTS, options)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith(rule.why)
    assert rule.broken_by(options)


@pytest.mark.parametrize(
    "options",
    [
        {"suite": "ffn-1", "kernel": ("eager",), "device": ("cuda",), "shard": "1/2", "resume": "a.csv"},
        {"by_step": True, "passes": ("forward",), "tokens": (1, 2)},
        {"in_model": True, "source": "x", "cache": ("warm",), "baseline": "model", "kernel": ("packed",)},
        {"resume": "a.csv", "launcher": "ray", "in_model": True},
        {"tp": 1, "by_step": True},
        {"calibrate": "full", "kernel": ("eager",)},  # which kernels there are is known later
        {"launch": "plain", "device": ("cpu",)},
    ],
)
def test_what_goes_together(options):
    require_compatible(options)


def test_the_rules_name_options():
    assert len(BROKEN) == len(CONFLICTS)
    known = {name for record in RECORDS for name in options_of(record)} | {"plot", "plot_file", "list_kernels"}
    for rule in CONFLICTS:
        named = f"{rule.option} {rule.contradicts} {rule.needs} {rule.allows} {rule.unless}".split()
        assert {re.split("!?=", pattern)[0] for pattern in named} <= known, rule


def test_a_method_is_what_was_asked_over_the_default():
    assert MethodOptions().method_over() == Method()
    assert MethodOptions(quick=True, processes=7).method_over() == Method(processes=7, precision=0.03)
    default = Method(seed=3, by_step=True, max_time=5.0)
    assert MethodOptions(seed=0, max_time="2m").method_over(default) == Method(seed=0, by_step=True, max_time=120.0)


def test_a_certificate_with_a_comma_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.json").write_text("{}")
    named = ResultOptions(certificate=["a,b.json", "c.json, d.json"]).certificate
    assert certificate_files(named) == ("a,b.json", "c.json", "d.json")
    assert certificate_files(None) == ()


# --- over ranks -------------------------------------------------------------------------------------------------------


DENSE = "8x24:swiglu"


def asked(source=DENSE, kernels=None, ranks=None, method=None, **grid) -> BenchRequest:
    whole = Grid(source, **{"device": "cpu", **grid}, ranks=ranks or Ranks(2))
    return build_request(whole, kernels, None, method or Method())[0]


MIXTURE = {"experts": 4, "top_k": 2}


def test_every_case_is_split_and_the_request_is_read_back():
    request = asked(tokens=(4, 8))
    assert [case.ranks for case in request.cases] == [Ranks(2)] * 2
    assert [choice.label for choice in request.kernels] == ["eager", "dtensor"]
    assert request.baseline == "eager"
    assert request.cases[0].key.endswith(", tp2")
    assert from_json(to_json(request)) == request


def test_experts_on_other_ranks_are_for_dtensor_alone():
    request = asked(ranks=Ranks(1, 2), tokens=(8,), **MIXTURE)
    assert [choice.label for choice in request.kernels] == ["dtensor"]
    assert request.baseline == "dtensor"
    assert request.cases[0].of_rank.tokens == 4


def test_a_case_of_one_rank_is_as_before():
    request = asked(ranks=Ranks())
    assert request.cases[0].of_rank is request.cases[0]
    assert "tp" not in request.cases[0].key


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"ranks": Ranks(5)}, "d_ff = 24 does not divide over 5 ranks"),
        ({"ranks": Ranks(1, 2)}, "no experts"),
        ({"ranks": Ranks(1, 3), "tokens": (9,), **MIXTURE}, "does not divide over 3 ranks"),
        ({"ranks": Ranks(1, 2), "tokens": (8, 9), **MIXTURE}, "9 tokens cannot be divided among 2 ranks"),
        ({"method": Method(by_step=True)}, "tp contradicts by_step"),
        ({"method": Method(sustained=True)}, "tp contradicts sustained"),
        ({"method": Method(launch="graphs")}, "tp contradicts launch='graphs'"),
        ({"passes": ("forward+backward",)}, "tp contradicts passes='forward+backward'"),
        ({"device": ("cuda:1",)}, "its own GPU"),
        ({"device": ("cpu", "cuda")}, "its own GPU"),
        ({"ranks": Ranks(), "kernels": ["dtensor"]}, "dtensor computes blocks that are split over ranks"),
    ],
)
def test_what_cannot_be_measured_over_ranks_is_refused_before_it_begins(more, says):
    with pytest.raises(FFNError, match="(?s)" + says.replace("(", r"\(").replace("+", r"\+")):
        asked(**more)


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("ffncli.system.host.default_threads", lambda: 12)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [threads_of_rank(Ranks(tp)) for tp in (1, 2, 4, 16)] == [12, 6, 3, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of 8 ranks, 2 are here
    assert threads_of_rank(Ranks(4, 2)) == 6

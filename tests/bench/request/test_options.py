"""Which options of `ffn bench` go together: the table, a line for each of its rules."""

import re

import pytest

from ffncli.bench.benchmark import BenchQuestion
from ffncli.bench.records import Method
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
from ffncli.errors import FFNError
from ffncli.options.conflicts import check
from ffncli.options.opt import options_of

RECORDS = (BenchQuestion, ParallelOptions, ResultOptions, SuiteOptions, LauncherOptions)
BROKEN = [  # in the order of the table
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
    known = {name for record in RECORDS for name in options_of(record)} | {"plot", "plot_file"}
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

"""One request for the command line, its self-test and the library: defaults, contradictions, where it was asked."""

from types import SimpleNamespace

import pytest
import torch

from ffncli.bench import benchmark as library
from ffncli.bench.machine import devices
from ffncli.bench.records import BLOCK, Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import Grid, cases
from ffncli.bench.request.options import MethodOptions
from ffncli.bench.selftest import selftest_request
from ffncli.errors import FFNError, spelled
from ffncli.kernels.choice import choices
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

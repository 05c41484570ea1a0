"""What NVML says, by a stand-in for its devices: all of it, some of it, none of it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ffncli.bench.machine import devices
from ffncli.bench.machine.devices import IDLE, POWER_CAP, SETTING, Sample, clock_flags
from ffncli.system.gpu import NEEDS
from tests.bench.fake_nvml import FakeNvml, probe_of


def test_a_reading():
    nvml = FakeNvml()
    nvml.bits = 0x40 | POWER_CAP
    probe, why = probe_of("1234", nvml)
    assert why == ""
    assert (probe.driver, probe.rated_mhz) == ("550.54.15", 1410)
    assert probe.read() == Sample(1410, 1593, 312.4, 61, 0x44, 1410)
    assert probe.fresh().why == ("power cap", "hardware thermal slowdown")


def test_the_newer_name_of_the_reasons_comes_first():
    nvml = FakeNvml()
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: POWER_CAP
    assert probe_of("GPU-1234", nvml)[0].read().reasons == POWER_CAP
    assert "reasons" not in nvml.asked


@pytest.mark.parametrize("refused", ["clock", "power", "temperature", "reasons", "rated", "driver"])
def test_what_a_card_does_not_tell_is_unknown(refused):
    nvml = FakeNvml()
    nvml.refuses.add(refused)
    probe, _ = probe_of("1234", nvml)
    sample = probe.read()
    found = {
        "clock": sample.sm_mhz or sample.memory_mhz,
        "power": sample.power_w,
        "temperature": sample.temperature_c,
        "reasons": sample.reasons or None,
        "rated": sample.rated_mhz,
        "driver": probe.driver or None,
    }
    assert found.pop(refused) is None
    found.pop("reasons", None)
    assert None not in found.values()


def test_without_the_module_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probe_of("1234") == (None, NEEDS)
    assert "in a clone of ffn: pip install -e '.[gpu]'" in NEEDS


def test_the_module_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert probe_of("1234")[0].read().sm_mhz == 1410


@pytest.fixture
def card(monkeypatch):
    """torch's first GPU is the stand-in's; what was opened before is forgotten."""
    opened = (devices.gpu_handles, devices.gpu_probe)
    monkeypatch.setitem(sys.modules, "pynvml", card := FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    for one in opened:
        one.cache_clear()
    yield card
    for one in opened:
        one.cache_clear()


def test_the_gpu_of_torchs_name_is_opened_once(card):
    probe, why = devices.gpu_probe("cuda:1")
    assert (why, probe.read().sm_mhz) == ("", 1410)
    assert devices.gpu_probe("cuda:1")[0] is probe
    assert devices.gpu_handles("cuda:1")[0].whole == "handle"
    assert card.asked.count("init") == 1


def test_an_amd_gpu_and_one_without_a_number_are_not_asked(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    unknown = "clocks and power were not read: torch has no uuid for this GPU"
    assert devices.gpu_probe("cuda:0") == devices.gpu_handles("cuda:0") == (None, unknown)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert devices.gpu_probe("cuda:1") == (None, "clocks and power of AMD GPUs are not read")
    assert card.asked == []


def test_no_driver_and_no_such_gpu_are_said():
    nvml = FakeNvml()
    nvml.refuses.add("init")
    assert probe_of("1234", nvml) == (None, "clocks and power were not read: NVML says Not Supported")
    assert probe_of("9", FakeNvml()) == (None, "clocks and power were not read: NVML says Not Found")


def test_without_reasons_the_reference_is_the_highest_clock_so_far():
    """A virtual T4 tells no reasons: under load it never reaches 1590 MHz, which is no trouble, but 60 % of 900 is."""
    nvml = FakeNvml()
    nvml.refuses.add("reasons")
    probe, _ = probe_of("1234", nvml)
    nvml.top, seen = 1590, []
    for nvml.sm in (870, 900, 540):
        sample = probe.fresh()
        seen.append(clock_flags(sample, sample)[:2])
    assert seen == [("sm=870", "power=312"), ("sm=900", "power=312"), ("sm=540", "clock=0.60")]


def test_a_mig_instance_is_found_by_torchs_uuid_and_has_its_cards_clock():
    probe, why = probe_of("1234", FakeNvml("MIG-1234"))
    assert why == ""
    sample = probe.read()
    assert (sample.sm_mhz, sample.power_w) == (1410, 312.4)


def test_a_clock_that_the_gpu_counted_is_judged_only_with_a_reading_of_its_reasons():
    unread, capped = Sample(), Sample(sm_mhz=950, rated_mhz=2040, reasons=POWER_CAP)
    assert clock_flags(unread, unread, 900e6) == ("sm=900",)
    assert clock_flags(capped, unread, 900e6) == ("power-capped", "sm=900")
    assert clock_flags(Sample(sm_mhz=950, rated_mhz=2040), unread, 900e6) == ("sm=900", "clock=0.44")


def test_the_energy_counter_is_in_joules_where_there_is_one():
    nvml = FakeNvml()
    probe, _ = probe_of("1234", nvml)
    assert probe.energy() is None
    nvml.millijoules = 1_234_567
    assert probe.energy() == 1234.567


def test_readings_take_at_most_a_twentieth_of_the_time():
    """5 answers of 1 ms; blocks of 1 ms, each between two readings."""
    wall = [0.0]
    probe, _ = probe_of("1234", nvml := FakeNvml(cost=1e-3, wall=wall), lambda: wall[0])
    del nvml.asked[:]
    wall[0] = began = 100.0
    for _ in range(2000):
        probe.read()
        wall[0] += 1e-3
    asking = len(nvml.asked) * 1e-3
    assert 0.04 < asking / (wall[0] - began) <= 0.05
    assert probe.fresh() is not probe.fresh()


OK = Sample(sm_mhz=1410, power_w=312.4, rated_mhz=1410)


def test_the_clock_that_the_gpu_counted_itself_stands_first():
    """Without a reading of NVML there is no reason for a low clock, so it is not judged."""
    assert clock_flags(OK, OK, 1000.4e6) == ("sm=1000", "clock=0.71", "power=312")
    assert clock_flags(OK, Sample(), 1000.4e6) == ("sm=1000", "clock=0.71", "power=312")
    assert clock_flags(Sample(), Sample(), 1000.4e6) == ("sm=1000",)
    assert clock_flags(Sample(), Sample(), 1980.5004e6) == ("sm=1981",)
    assert clock_flags(Sample(), OK, None) == ("sm=1410", "power=312")


@pytest.mark.parametrize(
    ("before", "after", "flags"),
    [
        (Sample(), Sample(), ()),
        (OK, OK, ("sm=1410", "power=312")),
        (OK, Sample(sm_mhz=1410), ("sm=1410",)),
        (Sample(reasons=0x40), OK, ("gpu-throttled", "sm=1410", "power=312")),
        (OK, Sample(reasons=0x8), ("gpu-throttled",)),
        (OK, Sample(reasons=0x20 | POWER_CAP), ("gpu-throttled", "power-capped")),
        (OK, Sample(reasons=POWER_CAP), ("power-capped",)),
        (Sample(reasons=IDLE), Sample(reasons=IDLE | 0x2 | 0x100), ()),
        (OK, Sample(sm_mhz=1000, rated_mhz=1410), ("sm=1000", "clock=0.71")),
        (OK, Sample(sm_mhz=1058, rated_mhz=1410), ("sm=1058",)),  # 0.7504 of the rated clock
        (OK, Sample(sm_mhz=1500, rated_mhz=2000), ("sm=1500",)),  # three quarters of it are not below that
        (OK, Sample(sm_mhz=1499, rated_mhz=2000), ("sm=1499", "clock=0.75")),
        # A T4, an L4 or a laptop's GPU under load, and a clock that was locked: no trouble.
        (OK, Sample(sm_mhz=900, rated_mhz=2040, reasons=POWER_CAP), ("power-capped", "sm=900")),
        (OK, Sample(sm_mhz=900, rated_mhz=2040, reasons=SETTING), ("sm=900",)),
        (OK, Sample(sm_mhz=900, rated_mhz=2040, reasons=0x20), ("gpu-throttled", "sm=900", "clock=0.44")),
        (OK, Sample(sm_mhz=345, rated_mhz=2040, reasons=IDLE), ("sm=345", "clock=0.17")),
    ],
)
def test_flags_of_a_block(before, after, flags):
    assert clock_flags(before, after) == flags

"""A GPU: who else uses it, the arithmetic that torch's flags leave, and a kernel's memory on a simulated one."""

import os
import random
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from ffncli.bench.machine import devices
from ffncli.bench.machine.devices import IDLE, POWER_CAP, SETTING, Sample, clock_flags
from ffncli.bench.machine.machine import MODES, KernelMemory, free_memory, math_mode, release, set_math_mode
from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.correctness import computing
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels import built_in
from ffncli.system.gpu import NEEDS, GpuState, gpu_state, open_gpu
from tests.bench.fake_cuda import FakeCuda
from tests.bench.fake_memory import FakeMemory
from tests.bench.fake_nvml import FakeNvml, probe_of
from tests.system import fake_gpu


@pytest.fixture
def card(monkeypatch):
    devices.neighbours.cache_clear()
    stand_in = FakeNvml()
    monkeypatch.setattr(devices, "gpu_handles", lambda device: open_gpu("1234", stand_in))
    yield stand_in
    devices.neighbours.cache_clear()


def test_neighbours_are_those_of_before_this_process_made_anything(card, monkeypatch):
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch(count=2))
    made = there.ones

    def ones(*shape, device):
        card.processes.append((os.getppid(), 1 << 30))  # a context of our own, under another number in a container
        return made(*shape, device=device)

    there.ones = ones
    card.processes, card.utilisation = [(7, 31 << 30)], 42
    devices.use_in_worker("cuda:1")
    assert there.current == 1
    assert devices.neighbours("cuda:1") == "1 other process uses this GPU (33.3 GB, 42 % busy)"


def test_alone_nothing_is_said(card):
    card.processes = [(os.getpid(), 1 << 30)]
    assert devices.neighbours("cuda") == ""


def test_a_gpu_that_cannot_be_asked_is_refused_for_its_own_reason(monkeypatch):
    def fails(device):
        raise RuntimeError(fake_gpu.NO_DRIVER)

    devices.neighbours.cache_clear()
    monkeypatch.setattr(devices, "gpu_handles", fails)
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch(fake_gpu.BUSY))
    with pytest.raises(FFNError, match="--device cuda: the GPU is busy"):
        devices.use_in_worker("cuda")


def test_on_a_cpu_nothing_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "neighbours", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    devices.use_in_worker("cpu")
    assert asked == []


def test_a_state_is_what_nvml_says():
    card = FakeNvml()
    card.processes, card.limit, card.mode = [(7, 1 << 30), (8, None), (os.getpid(), 5)], 500_000, 2
    state = gpu_state(open_gpu("1234", card)[0])
    assert state == GpuState(79 << 30, 80 << 30, 2, 1 << 30, 0.0, 1410, 1410, 500.0, 700.0, True, "prohibited", False)
    assert state.power_lowered
    assert gpu_state(open_gpu("1234", FakeNvml("MIG-1234"))[0]).mig


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(devices, "has_driver", lambda: False)


def test_a_gpu_that_is_certainly_missing_is_refused(no_driver, monkeypatch):
    """A sandbox may show no driver's files: torch is asked, and its reason is the answer."""
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch(fake_gpu.NO_DRIVER, count=0))
    for asked in (["cuda"], ["cpu", "cuda:0"]):
        with pytest.raises(FFNError, match=rf"^--device {asked[-1]}: there is no GPU here") as caught:
            devices.require_gpu(asked, sustained=False)
        assert caught.value.code == 3
    devices.require_gpu(["cpu"], sustained=False)
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch())  # one that torch sees all the same
    devices.require_gpu(["cuda"], sustained=True)


def test_what_may_be_there_is_left_to_the_workers(monkeypatch):
    """The parent makes nothing on a GPU: it would keep its memory from them."""
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch(fake_gpu.BUSY))
    devices.require_gpu(["cuda"], sustained=True)
    assert there.made == []


def test_long_turns_need_a_gpu(no_driver):
    with pytest.raises(FFNError, match=r"^--sustained needs --device cuda") as caught:
        devices.require_gpu(["cpu"], sustained=True)
    assert caught.value.code == 2


CUDA = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _as_before():
    yield
    set_math_mode("highest")
    torch.backends.cudnn.allow_tf32 = True  # as torch ships it


@pytest.mark.parametrize("mode", MODES)
def test_products_and_convolutions_use_the_same_arithmetic(mode):
    torch.backends.cudnn.allow_tf32 = mode == "highest"  # torch's default is on: must not survive
    text = set_math_mode(mode, "cuda")
    assert torch.get_float32_matmul_precision() == mode
    assert CUDA.allow_tf32 is torch.backends.cudnn.allow_tf32 is (mode != "highest")
    assert torch.backends.mkldnn.conv.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision
    assert f"fp32={mode} " in text
    tf32 = "off" if mode == "highest" else "on"
    assert f" tf32={tf32} conv_tf32={tf32} " in text


def test_on_a_cpu_the_flags_of_a_gpu_are_not_named():
    assert set_math_mode("highest") == "fp32=highest subnormals=kept"
    assert set_math_mode("high", "cuda:1").startswith("fp32=high tf32=on conv_tf32=on bf16_reduction=rounded")


def test_on_a_gpu_what_changes_products_behind_torchs_back_is_recorded(monkeypatch):
    for name in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert "override" not in math_mode("cuda")
    assert "cublas_workspace" not in math_mode("cuda")
    assert " blas=cublas " in math_mode("cuda")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert " tf32_override=0 cublas_workspace=:4096:8 " in math_mode("cuda:1")
    assert "override" not in math_mode("cpu")


def test_what_a_user_file_changed_is_recorded():
    set_math_mode("highest")
    CUDA.allow_bf16_reduced_precision_reduction = False
    assert "bf16_reduction=fp32" in math_mode("cuda")
    set_math_mode("highest")
    assert "bf16_reduction=rounded" in math_mode("cuda")


def test_flushed_subnormals_are_seen_and_put_back():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    assert math_mode().endswith("subnormals=flushed")
    assert set_math_mode("highest").endswith("subnormals=kept")


def test_an_unknown_mode_is_refused():
    with pytest.raises(FFNError, match="use highest, high, medium"):
        set_math_mode("fast")


TOKENS, D_MODEL, D_FF = 6, 8, 64
FLOAT = 4  # bytes
WIDE, OUT = FLOAT * TOKENS * D_FF, FLOAT * TOKENS * D_MODEL
WEIGHTS = 3 * FLOAT * D_MODEL * D_FF  # gate, up and down; x's gradient is as large as the output


def peak_of(kernel: str, passes: str = "forward", tokens: int = TOKENS) -> int | None:
    """What `measure_case` measures of a kernel, on a device that counts the bytes of tensors."""
    case = Case("s", "s", FFNSpec(D_MODEL, D_FF, "swiglu"), tokens, passes=passes)  # type: ignore[arg-type]
    problem = Problem.of(case, 5)
    _ = problem.first
    with FakeMemory() as cuda:
        memory = KernelMemory("cuda", cuda)
        placed = PlacedKernel(kernel, build_kernel(built_in(kernel), problem, memory), problem, random.Random(0), 1.0)
        placed.place(1)
        with computing(problem.backward):
            with memory.keeping():
                placed.call()
                placed.forget()
            placed.call()  # its output is still there
            return memory.peak(placed.call, placed.forget)


def test_forward_is_counted_with_its_output():
    """silu(gate), up and their product: gate is freed before up is computed."""
    assert peak_of("eager") == 3 * WIDE
    assert peak_of("module") == 3 * WIDE


def test_what_a_kernel_keeps_counts():
    """inplace has gate, up and the output in buffers of its own, and makes nothing in a call."""
    assert peak_of("inplace") == 2 * WIDE + OUT


def test_backward_is_counted_with_all_gradients():
    """Of one token they are nearly all; beside them some of gate, up, silu(gate), the product and their gradients."""
    beside = peak_of("eager", "forward+backward", tokens=1) - WEIGHTS - 2 * OUT // TOKENS  # the output, x's gradient
    assert 0 <= beside <= 8 * WIDE // TOKENS < WEIGHTS / 2


def test_the_peak_is_beyond_what_was_there():
    cuda = FakeCuda()
    cuda.take(1000)  # weights
    cuda.peak = 50_000  # and a peak of the past
    first = []

    def call():
        if not first:
            first.append(cuda.take(300))  # a workspace, kept
        cuda.take(70)
        cuda.take(20)
        cuda.allocated -= 90

    assert KernelMemory("cuda", cuda).peak(call, lambda: None) == 90


def test_the_last_output_is_not_taken_for_weights():
    cuda, held = FakeCuda(), []

    def call():
        forget()  # as every call does: the last output is freed first
        cuda.take(1000)
        held.append(1000)

    def forget():
        cuda.allocated -= sum(held)
        held.clear()

    assert KernelMemory("cuda", cuda).peak(call, forget) == 1000


def test_nothing_is_measured_on_a_cpu():
    memory = KernelMemory("cpu", SimpleNamespace())
    with memory.keeping():
        pass
    assert memory.peak(lambda: 1 / 0, lambda: None) is None
    release("cpu", SimpleNamespace())


def test_what_torch_has_cached_is_free_to_the_next_case():
    with FakeMemory(total=1000, others=100) as cuda:
        kept = torch.empty(200, dtype=torch.uint8)
        freed = torch.empty(500, dtype=torch.uint8)
        del freed
        assert cuda.mem_get_info() == (200, 1000)
        assert free_memory("cuda", cuda) == 700
        release("cuda:0", cuda)
        assert cuda.mem_get_info()[0] == free_memory("cuda", cuda) == 700
        assert len(kept) == 200


def test_what_only_refers_to_itself_is_freed():
    class Cycle:
        def __init__(self):
            self.itself, self.tensor = self, torch.empty(1000)

    gone = weakref.ref(Cycle().tensor)
    release("cpu", SimpleNamespace())
    assert gone() is None


def test_a_broken_device_is_not_asked_twice():
    asked = []

    def broken():
        asked.append("empty_cache")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    release("cuda", SimpleNamespace(empty_cache=broken))
    assert asked == ["empty_cache"]


@pytest.mark.parametrize("cached", [0, 500])
def test_the_cache_mode_does_not_depend_on_what_ran_before(monkeypatch, cached):
    from ffncli.bench.machine import machine

    with FakeMemory(total=1000) as cuda:
        torch.empty(cached, dtype=torch.uint8)
        monkeypatch.setattr(machine, "free_memory", lambda device: free_memory(device, cuda))
        assert machine.room("cuda") == 600


# --- a GPU's state between blocks -------------------------------------------------------------------------------------


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
def opened_card(monkeypatch):
    """torch's first GPU is the stand-in's; what was opened before is forgotten."""
    opened = (devices.gpu_handles, devices.gpu_probe)
    monkeypatch.setitem(sys.modules, "pynvml", opened_card := FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    for one in opened:
        one.cache_clear()
    yield opened_card
    for one in opened:
        one.cache_clear()


def test_the_gpu_of_torchs_name_is_opened_once(opened_card):
    probe, why = devices.gpu_probe("cuda:1")
    assert (why, probe.read().sm_mhz) == ("", 1410)
    assert devices.gpu_probe("cuda:1")[0] is probe
    assert devices.gpu_handles("cuda:1")[0].whole == "handle"
    assert opened_card.asked.count("init") == 1


def test_an_amd_gpu_and_one_without_a_number_are_not_asked(opened_card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    unknown = "clocks and power were not read: torch has no uuid for this GPU"
    assert devices.gpu_probe("cuda:0") == devices.gpu_handles("cuda:0") == (None, unknown)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert devices.gpu_probe("cuda:1") == (None, "clocks and power of AMD GPUs are not read")
    assert opened_card.asked == []


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

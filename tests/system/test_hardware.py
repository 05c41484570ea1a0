"""The table of accelerators: rates as their chips' widths and clocks give them, dense, found by their names only."""

from math import isclose

import pytest

from ffncli.errors import FFNError
from ffncli.system import hardware

ROWS = {row["name"]: row for row in hardware.table()["devices"]}
GPUS = [name for name, row in ROWS.items() if row.get("kind", "gpu") == "gpu" and not name.startswith("Apple")]

# What the architecture makes of a class, against fp16: independent of any table of rates; sparse is twice that.
OVER_FP16 = {"bf16": 1, "tf32": 1 / 2, "fp8": 2, "fp4": 4, "int8": 2}
FP4 = {"B300": 6, "GeForce RTX 50": 8}  # Blackwell Ultra's; not halved on GeForce cards, whose fp16 is
INT8 = {"V100": 1 / 2, "GeForce": 4, "MI250X": 1, "TPU v4": 1}  # dp4a on CUDA cores; at full rate; CDNA 2; as bf16


def faults(row: dict) -> list[str]:
    """What is wrong with the rates of a row."""
    rates, approx = row["tflops"], row.get("approx", ())
    half = rates.get("fp16", rates.get("bf16"))
    wrong = []

    def hold(cell: str, expected: float, within: float = 0.03) -> None:
        if not isclose(rates[cell], expected, rel_tol=0.12 if cell in approx else within):
            wrong.append(f"{row['name']} {cell}: {rates[cell]}, expected {expected:.1f}")

    for cell, ratio in OVER_FP16.items():
        if cell in rates and not (cell == "bf16" and "fp16" not in rates):
            names = f"{row['name']} {row['names']}"
            others = {"int8": INT8, "fp4": FP4}.get(cell, {})
            own = next((r for name, r in others.items() if name in names), ratio)
            hold(cell, half * own)
    if chip := row.get("derive"):
        per_clock = chip.get("flops") or chip["tensor_cores"] * chip["fma"] * 2
        hold("fp16", chip["units"] * per_clock * chip["ghz"] / 1000)
        hold("fp32", chip["units"] * chip["lanes"] * 2 * chip.get("lanes_ghz", chip["ghz"]) / 1000)
    elif "like" in row:
        for cell in ("fp16", "fp32"):
            hold(cell, ROWS[row["like"]]["tflops"][cell], within=0.15)
    return wrong


@pytest.mark.parametrize("name", ROWS)
def test_rates_are_what_the_chip_gives(name):
    assert faults(ROWS[name]) == []


@pytest.mark.parametrize("name", GPUS)
def test_a_sparse_number_in_any_cell_or_in_all_would_be_seen(name):
    row = ROWS[name]
    assert "derive" in row or "like" in row
    for cell, rate in row["tflops"].items():
        assert faults({**row, "tflops": {**row["tflops"], cell: 2 * rate}}), cell
        assert faults({**row, "tflops": {**row["tflops"], cell: rate / 2}}), cell
    assert faults({**row, "tflops": {cell: 2 * rate for cell, rate in row["tflops"].items()}})


@pytest.mark.parametrize(
    ("name", "units", "per_clock", "ghz", "printed"),
    [  # SMs x tensor cores x FMA x 2 x GHz, as worked out beside the table's sources
        ("V100 SXM2", 80, 8 * 64 * 2, 1.53, 125.3), ("T4", 40, 8 * 64 * 2, 1.59, 65.1),
        ("A100 80GB SXM", 108, 4 * 256 * 2, 1.41, 311.9), ("A10", 72, 4 * 128 * 2, 1.695, 125.0),
        ("A10G", 80, 4 * 64 * 2, 1.71, 70.0), ("RTX 3090", 82, 4 * 64 * 2, 1.695, 71.2),
        ("L4", 58, 4 * 128 * 2, 2.04, 121.1), ("L40S", 142, 4 * 128 * 2, 2.52, 366.4),
        ("RTX 4090", 128, 4 * 64 * 2, 2.52, 165.2), ("RTX 5090", 170, 4 * 64 * 2, 2.407, 209.5),
        ("H100 PCIe", 114, 4 * 512 * 2, 1.62, 756.4), ("H100 SXM5", 132, 4 * 512 * 2, 1.83, 989.4),
        ("H200 SXM", 132, 4 * 512 * 2, 1.83, 989.4), ("B200", 148, 4 * 1024 * 2, 1.85, 2243),
        # half of what NVIDIA prints with sparsity, or a quarter (fp8), an eighth (RTX 40), a sixteenth (RTX 50) of it
        ("A30", 56, 4 * 256 * 2, 1.44, 330 / 2), ("A40", 84, 4 * 128 * 2, 1.74, 299.4 / 2),
        ("RTX A6000", 84, 4 * 128 * 2, 1.80, 309.7 / 2), ("L40", 142, 4 * 64 * 2, 2.49, 362.1 / 2),
        ("RTX 6000 Ada", 142, 4 * 128 * 2, 2.505, 1457 / 4), ("H100 NVL", 132, 4 * 512 * 2, 1.545, 1671 / 2),
        ("H200 NVL", 132, 4 * 512 * 2, 1.545, 1671 / 2), ("RTX 4070", 46, 4 * 64 * 2, 2.475, 466 / 8),
        ("RTX 4080", 76, 4 * 64 * 2, 2.505, 780 / 8), ("RTX 5070", 48, 4 * 64 * 2, 2.512, 988 / 16),
        ("RTX 5080", 84, 4 * 64 * 2, 2.617, 1801 / 16), ("MI250X (both dies)", 220, 1024, 1.70, 383),
        ("MI300X", 304, 2048, 2.10, 1307.4), ("MI325X", 304, 2048, 2.10, 1307.4), ("MI355X", 256, 4096, 2.40, 2516),
    ],
)  # fmt: skip
def test_the_derivation_itself(name, units, per_clock, ghz, printed):
    chip = ROWS[name]["derive"]
    assert (chip["units"], chip["ghz"]) == (units, ghz)
    assert (chip.get("flops") or chip["tensor_cores"] * chip["fma"] * 2) == per_clock
    assert units * per_clock * ghz / 1000 == pytest.approx(printed, rel=2e-3)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"), ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("A100-PCIE-40GB", "A100 40GB"), ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"), ("Tesla V100-PCIE-32GB", "V100 PCIe"), ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"), ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"), ("NVIDIA B300 SXM6 AC", "B300"), ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"), ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"), ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"), ("AMD Instinct MI300X OAM", "MI300X"), ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"), ("TPU v5 lite", "TPU v5e"), ("Apple M3 Max", "Apple M3 Max"),
        ("  nvidia   h200 ", "H200 SXM"), ("NVIDIA H100 NVL", "H100 NVL"), ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A30", "A30"), ("NVIDIA A40", "A40"), ("NVIDIA L40", "L40"), ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA GeForce RTX 4070", "RTX 4070"),
        ("NVIDIA GeForce RTX 4080", "RTX 4080"), ("NVIDIA GeForce RTX 5070", "RTX 5070"),
        ("NVIDIA GeForce RTX 5080", "RTX 5080"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"), ("GB300", "GB300"),
        ("AMD Instinct MI350X", "MI350X"),
    ],
)  # fmt: skip
def test_names_as_torch_and_the_drivers_give_them(said, meant):
    found = hardware.find(said)
    assert found is not None
    assert found.name == meant


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA H100", "NVIDIA H800", "NVIDIA H20", "NVIDIA A100", "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA GB10",
        "NVIDIA A100-SXM-64GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A800-SXM4-80GB", "NVIDIA L40G",
        "NVIDIA GeForce RTX 4070 Ti", "NVIDIA GeForce RTX 5070 Ti", "NVIDIA RTX PRO 6000 Blackwell Max-Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 D", "NVIDIA RTX PRO 6000 Blackwell", "NVIDIA A10M", "AMD Instinct MI250",
        "AMD Instinct MI250X / MI250", "AMD Instinct MI300A", "Tesla V100-SXM3-32GB", "Intel(R) Xeon(R)", "", "NVIDIA",
    ],
)  # fmt: skip
def test_another_chip_is_not_taken_for_one(other):
    assert hardware.find(other) is None


def test_no_name_means_two_devices_and_every_mark_has_its_source():
    every = [hardware._key(name) for row in ROWS.values() for name in row["names"]]
    assert len(every) == len(set(every))
    for row in (*hardware.table()["devices"], *hardware.table()["cpus"], *hardware.table()["links"]):
        assert row["source"] in hardware.table()["sources"]
    for row in ROWS.values():
        assert set(row.get("approx", ())) <= {*row["tflops"], "memory", "llc"}


@pytest.mark.parametrize(
    ("name", "dtype", "ridge"),
    [  # FLOPs per byte where compute = memory, published beside the sources
        ("V100 SXM2", "fp16", 139), ("T4", "fp16", 203), ("A10G", "bf16", 117), ("L4", "bf16", 403),
        ("L40S", "bf16", 419), ("A100 40GB", "bf16", 201), ("A100 80GB SXM", "bf16", 153), ("RTX 3090", "bf16", 76),
        ("RTX 4090", "bf16", 164), ("RTX 5090", "bf16", 117), ("H100 SXM5", "bf16", 295), ("H100 PCIe", "bf16", 378),
        ("H200 SXM", "bf16", 206), ("B200", "bf16", 281), ("MI250X", "bf16", 117), ("MI300X", "bf16", 247),
        ("MI325X", "bf16", 218), ("MI355X", "bf16", 312), ("TPU v4", "bf16", 229), ("TPU v5e", "bf16", 241),
        ("TPU v5p", "bf16", 166), ("TPU v6e", "bf16", 560),
    ],
)  # fmt: skip
def test_ridge_points(name, dtype, ridge):
    device = next(device for device in hardware.devices() if device.name == name)
    assert device.flops_per_s(dtype) / device.bytes_per_s == pytest.approx(ridge, abs=1)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h100", "H100 SXM5"), ("H100-PCIe", "H100 PCIe"), ("a100", "A100 80GB SXM"), ("a100-40gb", "A100 40GB"),
        ("rtx4090", "RTX 4090"), ("mi250x", "MI250X"), ("mi250x-both", "MI250X (both dies)"), ("gb200", "GB200"),
        ("tpu-v5p", "TPU v5p"), ("Apple M3 Max", "Apple M3 Max"), ("l4", "L4"), ("l40", "L40"), ("b3", "B300"),
        ("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation"), ("h100-nvl", "H100 NVL"), ("l40s", "L40S"),
    ],
)  # fmt: skip
def test_names_as_they_are_typed(typed, meant):
    assert hardware.named(typed, "--ridge").name == meant


def test_every_device_has_a_name_to_type():
    completed = hardware.typed_names()
    assert {device.name for device in completed.values()} == set(ROWS)
    assert all(hardware.named(name, "--ridge") == device for name, device in completed.items())
    assert all(" " not in name and "," not in name for name in completed)


@pytest.mark.parametrize(
    ("name", "module", "gbytes_per_s", "half", "fp8", "fp4", "memory"),
    [  # as the vendor's sheet for this module prints it; dense TFLOP/s (half of a sparse figure), GB
        ("V100 SXM2", "SXM2", 900, 125, None, None, 32),
        ("V100 PCIe", "PCIe", 900, 112, None, None, 32),
        ("T4", "PCIe", 320, 65, None, None, 16),
        ("A10", "PCIe", 600, 125, None, None, 24),
        ("A30", "PCIe", 933, 165, None, None, 24),
        ("A40", "PCIe", 696, 299.4 / 2, None, None, 48),
        ("A100 40GB", "SXM4", 1555, 312, None, None, 40),
        ("A100 80GB SXM", "SXM4", 2039, 312, None, None, 80),
        ("A100 80GB PCIe", "PCIe", 1935, 312, None, None, 80),
        ("RTX A6000", "PCIe", 768, 309.7 / 2, None, None, 48),
        ("L4", "PCIe", 300, 242 / 2, 485 / 2, None, 24),
        ("L40", "PCIe", 864, 362.1 / 2, 724 / 2, None, 48),
        ("L40S", "PCIe", 864, 362.05, 1466 / 2, None, 48),
        ("RTX 6000 Ada", "PCIe", 960, None, 1457 / 2, None, 48),
        ("H100 SXM5", "SXM5", 3350, 1979 / 2, 3958 / 2, None, 80),
        ("H100 NVL", "PCIe", 3900, 1671 / 2, 3341 / 2, None, 94),
        ("H100 PCIe", "PCIe", 2000, 1513 / 2, 3026 / 2, None, 80),
        ("H200 SXM", "SXM5", 4800, 1979 / 2, 3958 / 2, None, 141),
        ("H200 NVL", "PCIe", 4800, 1671 / 2, 3341 / 2, None, 141),
        ("GH200 96GB", "HBM3", 4000, 1979 / 2, 3958 / 2, None, 96),
        ("GH200 144GB", "HBM3e", 4900, 1979 / 2, 3958 / 2, None, 144),
        ("B200", "DGX", 64_000 / 8, 36_000 / 16, 72_000 / 16, 144_000 / 16, 180),
        ("GB200", "NVL72", 576_000 / 72, 360_000 / 144, 720_000 / 144, 1_440_000 / 144, 186),
        ("B300", "HGX", 64_000 / 8, 36_000 / 16, 72_000 / 16, 108_000 / 8, 288),
        ("GB300", "NVL72", 576_000 / 72, 360_000 / 144, 720_000 / 144, 1_080_000 / 72, 279),
        ("RTX PRO 6000 Blackwell Workstation", "600 W", 1792, None, None, 4000 / 2, 96),
        ("RTX PRO 6000 Blackwell Server", "PCIe, passive", 1597, None, None, 4000 / 2, 96),
        ("MI250X (both dies)", "OAM", 3277, 383, None, None, 128),
        ("MI300X", "OAM", 5300, 1307.4, 2614.9, None, 192),
        ("MI325X", "OAM", 6000, 1307.4, 2614.9, None, 256),
        ("MI350X", "OAM", 8000, 2300, 4600, 9200, 288),
        ("MI355X", "OAM", 8000, 2500, 5000, 10_000, 288),
    ],
)  # fmt: skip
def test_rows_are_the_sheets_of_their_modules(name, module, gbytes_per_s, half, fp8, fp4, memory):
    row = ROWS[name]
    assert module in row["module"]
    assert row["gbytes_per_s"] == pytest.approx(gbytes_per_s, rel=0.005)
    assert max(row["memory_gb"]) == memory
    for cell, printed in (("fp16", half), ("fp8", fp8), ("fp4", fp4)):
        if printed is not None:
            assert row["tflops"][cell] == pytest.approx(printed, rel=0.01), cell


def test_newer_cards_are_not_slower_in_fp4():
    """A plan in nvfp4 had put a B300 behind a B200, because its rate was missing."""
    rate = {name: hardware.named(name, "--device").flops_per_s("fp4") for name in ("b300", "b200", "rtx-5090", "gb300")}
    assert rate["b300"] > rate["b200"]
    assert rate["gb300"] > rate["b300"]
    assert rate["rtx-5090"] == pytest.approx(3352e12 / 2)


def test_tf32_and_what_a_device_cannot_do():
    h100, v100 = hardware.find("NVIDIA H100 80GB HBM3"), hardware.find("Tesla V100-SXM2-16GB")
    assert h100.flops_per_s("fp32") == 67e12
    assert h100.flops_per_s("fp32", tf32=True) == 494.5e12
    assert v100.flops_per_s("fp32", tf32=True) == 15.7e12  # it has no TF32
    assert v100.flops_per_s("bf16") is None
    assert h100.flops_per_s("fp64") is None


def test_an_h200_has_the_cache_that_torch_reports():
    """Six stacks of memory, and the L2 of six; the H100 has five and 50 MiB."""
    assert hardware.find("NVIDIA H200").llc_bytes == 60 << 20
    assert hardware.find("NVIDIA H100 80GB HBM3").llc_bytes == 50 << 20


# --- links and planning defaults --------------------------------------------------------------------------------------


LINKS = {row["name"]: row for row in hardware.table()["links"]}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_what_its_lanes_give_in_one_direction(name):
    """Both directions together, as vendors print them, would be twice that."""
    row = LINKS[name]
    if chip := row.get("derive"):
        lanes = chip["units"] * chip["gbits"] * chip.get("share", 1) / 8
        assert row["gbytes_per_s"] == pytest.approx(lanes, rel=0.02)
    else:
        assert name in {"nvlink6", "ici-v7x"}  # half of what is printed; their lanes are not


@pytest.mark.parametrize(
    ("name", "printed"),
    [  # both directions together, as the vendors print it, GB/s
        ("nvlink2", 300), ("nvlink3", 600), ("nvlink4", 900), ("nvlink5", 1800), ("nvlink6", 3600),
        ("xgmi-mi250x", 700), ("xgmi-mi300x", 896), ("xgmi-mi355x", 1071), ("ici-v5e", 400), ("ici-v6e", 800),
        ("ici-v5p", 1200), ("ici-v7x", 1200),
    ],
)  # fmt: skip
def test_a_link_is_half_of_what_is_printed(name, printed):
    assert LINKS[name]["gbytes_per_s"] == pytest.approx(printed / 2)


@pytest.mark.parametrize(("name", "node"), [("ndr", 400), ("xdr", 800), ("efa-p4d", 50), ("efa-p5", 400)])
def test_eight_ports_are_a_nodes_network(name, node):
    """DGX H100, DGX B300, EFA of P4d and P5: GB/s of a node of eight."""
    assert 8 * LINKS[name]["gbytes_per_s"] == node


def test_a_device_names_links_that_are_there():
    for device in hardware.devices():
        within = next((link for link in hardware.links() if link.name == device.link), None)
        between = next((link for link in hardware.links() if link.name == device.network), None)
        assert (within is None) == (device.link == "")
        assert (between is None) == (device.network == "")
        assert within is None or within.kind != "network"
        assert between is None or between.kind == "network"
        assert device.link_gbytes_per_s == (within.gbytes_per_s if within else None)
        assert device.per_node >= 1
    assert [(d.link, d.per_node) for d in hardware.devices() if d.name in ("H100 SXM5", "GB200")] == [
        ("nvlink4", 8),
        ("nvlink5", 72),
    ]


@pytest.mark.parametrize("device", [d for d in hardware.devices() if "bf16" in d.achieved], ids=lambda d: d.name)
def test_the_efficiency_to_plan_with_is_near_what_was_measured(device):
    """The best product that others measured, as a share of the peak: a family's default is within a tenth of each."""
    assert device.gemm_efficiency == pytest.approx(device.achieved["bf16"] / device.tflops["bf16"], rel=0.10)


def test_the_other_planning_defaults_are_their_sources_shares():
    defaults = hardware.planning_defaults()
    assert defaults.memory_efficiency == pytest.approx(3.055e12 / 3.35e12, rel=0.02)  # H100, sustained copy
    assert defaults.link_efficiency == pytest.approx(366 / 450, rel=0.02)  # the ring of 8 H200


def test_a_protocol_that_waits_more_sends_more():
    """Of few bytes over NVLink LL is the fastest, of many Simple; what NCCL calls LL128 sends 120 bytes of 128."""
    few = [one.collective_us + 14 * one.step_us["node"] for one in hardware.protocols()]
    many = [one.bandwidth for one in hardware.protocols()]
    assert few == sorted(few)
    assert many == sorted(many)
    assert many[-1] == 1
    assert many[1] == pytest.approx(120 / 128, rel=0.02)
    for one in hardware.protocols():
        waits = [one.step_us[kind] for kind in ("node", "pcie", "network") if kind in one.step_us]
        assert waits == sorted(waits)


def test_links_are_found_as_they_are_typed():
    assert hardware.link_named("NVLink 4", "--link").gbytes_per_s == 450
    with pytest.raises(FFNError, match="--link: unknown link 'nvlink44'") as caught:
        hardware.link_named("nvlink44", "--link")
    assert "nvlink4" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("h200", 150.75), ("h100", 85.52), ("a100-80gb-sxm", 85.90), ("a100-40gb", 42.94), ("l40s", 48.30), ("l4", 24.15),
     ("t4", 16.11), ("b200", 192.27), ("mi300x", 192.0)],
)  # fmt: skip
def test_memory_is_what_the_driver_reports(name, gigabytes):
    """The published table has these GB beside its MiB; a device that is not in it has the GB that are sold."""
    assert hardware.named(name, "device").memory_bytes == pytest.approx(gigabytes * 1e9, rel=3e-4)


def test_a_driver_reports_about_what_is_sold():
    for device in hardware.devices():
        if device.memory_mib is not None:
            assert 0.99 < device.memory_bytes / (max(device.memory_gb) * 1e9) < 1.075, device.name

"""A headless Chromium, and pages made of real runs: a bench, two of them, traces and a certificate."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ffncli
from ffncli.cli.main import main
from tests.oracles import edited
from tests.oracles.prompted import PROMPT
from tests.oracles.prompted import made as checkpoint

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "ffn-1" / "xeon-avx512-2cpu.csv"
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,900",
)  # fmt: skip

Open = Callable[..., Any]
CHANGE = """
const field = document.querySelector(arguments[0]);
field.value = arguments[1];
field.dispatchEvent(new Event(arguments[2]));
"""


def texts(browser: Any, selector: str) -> list[str]:
    """The texts of all elements, at once."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests. Without Debian's Chromium and its driver there is nothing to test."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here; on Debian: apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options, ChromeService(driver))
    chrome.set_script_timeout(90)  # axe-core takes half a minute for a page of thousands of cells
    yield chrome
    chrome.quit()


@pytest.fixture
def opened(browser: Any) -> Callable[..., Any]:
    """Opens a page from disk, in a theme and a width; returns the browser. Nothing may be logged or requested."""

    def open_page(path: Path, dark: bool = False, width: int = 1280) -> Any:
        browser.get_log("browser")
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert browser.get_log("browser") == []
        return browser

    return open_page


def _answers(folder: Path) -> None:
    """Write a trace of a prompt, and answers in JSON."""
    base = edited.tensors("gated")
    two = [edited.write(folder / "base", "gated", base)]
    two.append(edited.write(folder / "tuned", "gated", edited.lora("gated", base, 4)))
    (folder / "history").mkdir()
    run = RESULTS.read_text("utf-8")
    for day in range(24, 31):
        text = run.replace("20261124T", f"202611{day}T").replace("2026-11-24T", f"2026-11-{day}T")
        (folder / "history" / f"{day}.csv").write_text(text, "utf-8")
    texts = folder / "texts.txt"
    texts.write_text("Hello cat\nsat Hello\nthe cat sat\n", "utf-8")
    ffncli.trace(str(checkpoint("llama").path), prompt=PROMPT, layer=1, save=folder / "prompt.safetensors")
    for name, words in (
        ("experts", ["experts", str(checkpoint("mixtral").path), "--prompts", str(texts), "--cache", "lru,best"]),
        ("history", ["compare", "--history", str(folder / "history" / "*.csv")]),
        ("checkpoints", ["compare", *map(str, two)]),
        ("steps", ["trace", str(checkpoint("llama").path), "--prompt", PROMPT, "--layer", "1", "--backward"]),
    ):
        with pytest.raises(SystemExit):
            main([*words, "-o", str(folder / f"{name}.json")])


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    for suffix in (".csv", ".rounds.csv"):
        shutil.copy(RESULTS.with_name(RESULTS.name.removesuffix(".csv") + suffix), folder / f"run{suffix}")
    lines = RESULTS.read_text("utf-8").splitlines(keepends=True)
    (folder / "after.csv").write_text("".join(lines), "utf-8")
    ffncli.trace("4x8:gelu", tokens=3, save=folder / "small.safetensors")
    ffncli.trace("64x256:swiglu", tokens=40, save=folder / "large.safetensors")
    ffncli.trace("8x16:swiglu", experts=4, tokens=6, save=folder / "mixture.npz")
    survey = ["trace", str(checkpoint("mixtral").path), "--layer", "all", "--prompt", PROMPT, "-o"]
    with pytest.raises(SystemExit):
        main([*survey, str(folder / "layers.json")])
    for name, more in (
        ("precision", ["--dtype", "fp8,int8"]),
        ("budget", ["--dtype", "fp8,bf16", "--budget", "14"]),
    ):
        with pytest.raises(SystemExit):
            main(
                [
                    "precision",
                    str(checkpoint("llama").path),
                    "--layer",
                    "all",
                    *more,
                    "-o",
                    str(folder / f"{name}.json"),
                ]
            )
    _answers(folder)
    for name, words in {
        "learner": "3x4:swiglu --experts 3 --top-k 2 --tokens 2",
        "exercise": "2x3:relu --integers --exercise 5 --seed 1",
        "rounded": "4x4:swiglu --experts 3 --top-k 2 --tokens 2 --exercise 5 --seed 1",
    }.items():
        with pytest.raises(SystemExit):
            main(["trace", *words.split(), "-q", "-o", str(folder / f"{name}.html")])
    made = {
        "bench": ["run.csv"], "two": ["run.csv", "after.csv"], "small": ["small.safetensors"],
        "traces": ["large.safetensors", "mixture.npz"], "layers": ["layers.json"],
        "precision": ["precision.json", "budget.json"],
        "prompt": ["prompt.safetensors"], "experts": ["experts.json"], "history": ["history.json"],
        "checkpoints": ["checkpoints.json"], "steps": ["steps.json"],
    }  # fmt: skip
    out = {name: folder / f"{name}.html" for name in ("learner", "exercise", "exercise.answers", "rounded")}
    for name, files in made.items():
        out[name] = folder / f"{name}.html"
        ffncli.report([folder / file for file in files], out[name])
    return out

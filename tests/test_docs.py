"""The program does what the documents say."""

import csv
import doctest
import io
import json
import re
from html import unescape
from pathlib import Path

import pytest

from docs import blocks, generated
from docs.picture import COLUMNS, picture
from docs.picture import block as drawn_block
from docs.schemas import keys_text
from ffncli.cli.main import COMMANDS
from ffncli.models import catalog
from ffncli.models.config.non_ffn import RESTS
from ffncli.run.texts import TEXTS

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = blocks.PAGES


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


JSON_DOC = "".join(map(keys_text, ("", *COMMANDS)))


# --- what the pages show ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_console_block_shows_what_is_printed(page):
    assert [str(difference) for difference in blocks.check(page)] == [], "make docs-update writes the blocks again"


def test_the_pages_have_blocks():
    """If the pattern found no blocks, nothing would be compared."""
    counts = {
        name_of(page): sum(b.language == "console" for b in blocks.blocks(page.read_text("utf-8"))) for page in PAGES
    }
    assert counts["tutorial.md"] >= 7
    assert counts["README.md"] >= 2
    assert sum(counts.values()) >= 35


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_hold(page):
    parser = doctest.DocTestParser()
    for block in blocks.blocks(page.read_text("utf-8")):
        if block.language == "python":
            test = parser.get_doctest(block.body, {}, page.name, str(page), 0)
            assert test.examples
            assert doctest.DocTestRunner().run(test).failed == 0


def test_generated_pages_are_up_to_date():
    assert (ROOT / "docs" / "kernels.svg").read_text("utf-8") == generated.kernel_picture(), "make docs-update"
    for page in generated.SECTIONS:
        assert (ROOT / "docs" / page).read_text("utf-8") == generated.written(page), "make docs-update"


def test_every_example_has_its_text():
    """docs/findings.md has the title and link of the text next to each example's name."""
    findings = (ROOT / "docs" / "findings.md").read_text("utf-8")
    for name in TEXTS:
        assert re.search(rf"^\| `{name}` \| \[.+\]\(https://.+\).* \|$", findings, re.M), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text("utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").split()
    assert [name_of(page) for page in PAGES if name_of(page) not in (*menu, "README.md")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_readme_help_and_json_doc(call, stdout_of, name):
    assert f"`ffn {name}" in README
    assert keys_text(name)
    assert COMMANDS[name][1] in call("--help")[1]
    out = stdout_of(name, "--help")
    assert COMMANDS[name][1].split(",")[0].rstrip(".") in " ".join(out.split())


def test_pages_count_what_there_is():
    with (ROOT / "benchmarks" / "results" / "architectures.csv").open(encoding="utf-8") as file:
        results = [row["result"] for row in csv.DictReader(file)]
    texts = [" ".join(page.read_text("utf-8").split()) for page in PAGES]
    architectures = re.findall(r"(\d+ of the \d+) text architectures", " ".join(texts))
    assert set(architectures) == {f"{results.count('same')} of the {len(results)}"}
    assert set(re.findall(r"from the config for (\d+) model types", " ".join(texts))) == {str(len(RESTS))}


def keys(value: object) -> set[str]:
    """Return every key anywhere in a JSON value, except under `conventions`, whose keys are other keys' names."""
    if isinstance(value, dict):
        return set(value) | {k for name, inner in value.items() if name != "conventions" for k in keys(inner)}
    return {k for inner in value for k in keys(inner)} if isinstance(value, list) else set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["params", "deepseek-v3", "--json", "--tp", "8", "--ridge", "100"],
        ["params", "gpt2", "--json", "--ridge", "h100"],
        ["models", "--json"],
        ["params", "gpt2", "--sweep", "d_ff=1x,2x", "--json"],
        ["params", "gpt2", "--iso-params", "--json"],
        ["params", "gpt2", "--assert", "layers == 12", "--json"],
        ["trace", "8x16:swiglu", "--experts", "4", "--json"],
        ["verify", "--json"],
        ["activations", "swiglu", "--iso-params", "--json"],
        ["trace", "gpt2", "--d-model", "4", "--d-ff", "8", "--layer", "all", "--json"],
        ["trace", "8x16:swiglu", "--experts", "4", "--json", "--explain", "experts[0,1],route[0,0]", "--depth", "2"],
        ["activations", "gelu", "relu", "--expect", "0=0", "--json"],
        ["export", "gpt2", "--as", "latex", "--json"],
        ["trace", "4x8:relu", "--input", "nan,0,1,2", "--top-units", "1", "--json"],
    ],
)
def test_every_json_key_is_described(call, arguments):
    found = json.loads(call(*arguments)[1])
    documented = set(re.findall(r"`(\w+)`", JSON_DOC))
    assert keys(found) <= documented
    assert found["command"] == arguments[0]
    assert found["conventions"]


def test_every_json_key_of_compare_and_of_a_saved_trace_is_described(call, tmp_path):
    for name, block in (("a", "8x16:swiglu"), ("b", "8x16:geglu")):
        assert call("trace", block, "--save", str(tmp_path / f"{name}.json"))[0] == 0
    code, out, _ = call("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json")
    found = json.loads(out)
    documented = set(re.findall(r"`(\w+)`", JSON_DOC))
    record = json.loads((tmp_path / "a.json").read_text())["ffn_trace"]
    assert keys(found) <= documented
    assert keys({**record, "steps": [{**step, "detail": {}} for step in record["steps"]]}) <= documented
    assert (code, found["command"], bool(found["conventions"])) == (1, "compare", True)
    assert {"comparable", "mismatches", "first", "rows"} <= set(found)


PARAMS = """name source citation d_model d_ff activation gated bias layers experts top_k shared_experts uniform
    ffn_params_per_layer ffn_params_active_per_layer norm_params_per_layer matmul_flops_per_token
    elementwise_flops_per_token ffn_params_total ffn_params_active dtype weight_bytes evidence""".split()
TRACE = """name op formula inputs shape dtype min max mean std zeros negatives nan inf params flops values
    values_index""".split()


def test_the_contract_of_params(call):
    for row in json.loads(call("params", *catalog.names(), "512x2048:gelu", "--json")[1])["rows"]:
        assert {*PARAMS, "groups"} <= set(row)
        for group in row["groups"]:
            assert sum(t["params"] for t in group["tensors"] if not t["norm"]) == group["ffn_params_per_layer"]
            assert (
                sum(t["params"] for t in group["tensors"] if t["norm"] and not t["shared"])
                == group["norm_params_per_layer"]
            )
        layers = sum(len(g["layers"]) * g["ffn_params_per_layer"] for g in row["groups"])
        assert layers == row["ffn_params_total"]
    assert row["layers"] is None


def test_facts_are_what_is_counted(stdout_of):
    """docs/facts.csv is committed, so that others can test their counters against it."""
    out = stdout_of("params", "--all", "--csv", notes=True)
    assert (ROOT / "docs" / "facts.csv").read_text("utf-8") == out, "make facts writes it again"
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["name"] for row in rows] == catalog.names()
    assert all(row["citation"] and int(row["matmul_flops_per_token"]) for row in rows)


def test_the_contract_of_models(call):
    rows = json.loads(call("models", "--json")[1])["rows"]
    assert all(set(PARAMS) <= set(row) and "groups" not in row for row in rows)


def test_the_contract_of_trace(call):
    found = json.loads(call("trace", "--json")[1])
    assert {"block", "ffn_input", "ffn_output", "steps"} <= set(found)
    assert all(set(TRACE) <= set(step) for step in found["steps"])
    assert found["steps"][0]["op"] == "input"


def test_changelog_names_every_command():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert all(f"`ffn {name}`" in text for name in COMMANDS)


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_picture_is_what_a_terminal_of_100_columns_shows(call):
    """The SVG contains the same lines as the output in a pipe, none is cut, and no font is loaded."""
    drawn = (ROOT / "docs" / "trace.svg").read_text("utf-8")
    assert drawn == picture()
    assert (ROOT / "docs" / "block.svg").read_bytes() == drawn_block(), "make picture"
    assert "![" in README
    assert "(docs/trace.svg)" in README
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", drawn)
    rows: dict[float, str] = {}
    for x, y, text in re.findall(r'<text class="ffn-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', drawn):
        plain = unescape(text).replace("\xa0", " ")
        rows[float(y)] = rows.get(float(y), "").ljust(round(float(x) / 12)) + plain
    lines = [line.rstrip() for _, line in sorted(rows.items())]
    assert [line for line in lines if line] == [line for line in call("trace")[1].splitlines() if line]
    assert max(map(len, lines)) <= COLUMNS

import json
import re
import tomllib
from importlib.resources import files

import pytest

from ffncli.block.cost import cost
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.cluster_plan import PlanQuestion, plan_model
from ffncli.models.counting.count import count
from ffncli.models.dimensions import Dimensions
from ffncli.models.source import load, resolve
from tests.oracles.catalog_modules import ffn_parameters
from tests.oracles.counts import BESIDE, DENSE, MOE, RECENT, STORED_BYTES, WIDTHS


def test_every_row_has_an_oracle():
    assert set(catalog.names()) == {*DENSE, *MOE, *RECENT}


def test_rows_parsed_one_by_one_are_those_of_the_whole_file():
    whole = tomllib.loads(files("ffncli.models").joinpath("catalog.toml").read_text("utf-8"))["models"]
    spelled = {alias: name for name, row in whole.items() for alias in (name, *row.get("aliases", ()))}
    assert {name: catalog.config(name) for name in catalog.names()} == {
        n: r.get("config", {}) for n, r in whole.items()
    }
    assert catalog.spellings() == list(spelled)
    assert all(catalog.find(alias).model.name == name for alias, name in spelled.items())


@pytest.mark.parametrize("name", RECENT)
def test_recent_totals(name):
    total, active, _ = RECENT[name]
    found = count(catalog.find(name))
    assert (found.ffn_params_total, found.ffn_params_active) == (total, active)


@pytest.mark.parametrize("name", [name for name, (_, _, released) in RECENT.items() if released])
def test_a_model_has_the_parameters_of_its_release(name):
    found, released = count(catalog.find(name)), RECENT[name][2]
    whole = found.model_params_total
    if whole is None:  # its family's attention is not counted
        assert found.ffn_params_total < released
    elif name in BESIDE:
        assert released - whole == BESIDE[name]
    else:
        assert whole <= released < 1.05 * whole


def test_most_releases_are_met_to_the_last_parameter():
    wholes = {name: count(catalog.find(name)).model_params_total for name in RECENT}
    assert sum(wholes[name] == released for name, (_, _, released) in RECENT.items() if released) >= 68


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-4-scout", "kimi-k2", "granite-4.0-h-small", "nemotron-3-super"])
def test_a_row_builds_a_model_of_transformers_with_these_ffns(name):
    assert ffn_parameters(catalog.config(name)) == RECENT[name][:2]


def test_a_search_knows_organisations_and_years():
    assert "nemotron-3-super" in catalog.search("nvidia")
    assert set(catalog.search("moonshot")) >= {"kimi-k2", "kimi-k2.5", "moonlight-16b-a3b"}
    assert {catalog.year(name) for name in catalog.search("2026")} == {2026}
    assert catalog.search("z.ai") == catalog.search("Z.AI") == [n for n in catalog.names() if n.startswith("glm")]
    assert {catalog.organisation(name) for name in catalog.search("alibaba")} == {"alibaba"}


@pytest.mark.parametrize("name", DENSE)
def test_dense_totals(name):
    found = count(catalog.find(name))
    assert (found.ffn_params_per_layer, found.ffn_params_total) == DENSE[name]
    assert found.ffn_params_active == found.ffn_params_total
    assert found.uniform
    assert found.experts == found.top_k == found.shared_experts == 0


@pytest.mark.parametrize("name", MOE)
def test_moe_totals(name):
    d_model, d_ff, experts, top_k, expert, total, active = MOE[name]
    model = catalog.find(name)
    found = count(model)
    assert (found.d_model, found.d_ff, found.experts, found.top_k) == (d_model, d_ff, experts, top_k)
    assert (found.ffn_params_total, found.ffn_params_active) == (total, active)
    program = next(s.op.program for s in model.model.main.steps if s.output == "experts")
    assert cost(program).params == expert


@pytest.mark.parametrize("name", catalog.names())
def test_rows_are_sourced_and_reachable(name):
    model = catalog.find(name)
    assert model.citation.startswith("[")
    assert model.evidence
    assert model.model.name == name
    assert all(catalog.find(alias) for alias in (name.upper(), name))


def test_aliases_are_unique_and_known():
    assert all(resolve(name).citation for name in catalog.spellings())  # none is taken for a path or a block
    assert catalog.find("llama-7b").model.name == "llama-2-7b"
    assert catalog.find("deepseek-r1").model.name == "deepseek-v3"
    assert catalog.find("no-such-model") is None
    assert len(catalog.spellings()) == len(set(catalog.spellings()))


def test_deepseek_has_a_dense_prefix():
    groups = count(catalog.find("deepseek-v3")).groups
    assert [(g.kind, g.layers, g.d_ff) for g in groups] == [
        ("dense", (0, 1, 2), 18432),
        ("moe", tuple(range(3, 61)), 2048),
    ]
    assert not count(catalog.find("deepseek-v3")).uniform


@pytest.mark.parametrize(
    ("name", "activation", "gated", "bias"),
    [
        ("gpt2", "gelu_tanh", False, True),
        ("bert-base", "gelu", False, True),
        ("t5-v1.1-xxl", "gelu_tanh", True, False),
        ("gemma-7b", "gelu_tanh", True, False),
        ("falcon-7b", "gelu", False, False),
        ("llama-2-7b", "silu", True, False),
        ("gpt-oss-20b", "quick_gelu", True, True),
        ("opt-175b", "relu", False, True),
        ("palm-540b", "silu", True, False),
    ],
)
def test_facts_that_tools_get_wrong(name, activation, gated, bias):
    found = count(catalog.find(name))
    assert (found.activation, found.gated, found.bias) == (activation, gated, bias)


def test_gpt_oss_says_why_it_is_not_silu():
    assert any("hidden_act is 'silu'" in line for line in catalog.find("gpt-oss-20b").evidence)


@pytest.mark.parametrize(
    ("typed", "name"),
    [("kimi_k3", "kimi-k3"), ("Qwen-3.8", "qwen3.8"), ("glm5", "glm-5"), ("GPT_2-XL", "gpt2-xl"), ("llama-27b", None)],
)
def test_hyphens_before_numbers_and_underscores_do_not_matter(typed, name):
    found = catalog.find(typed)
    assert (found.model.name if found else None) == name


@pytest.mark.parametrize(("typed", "name"), [
    ("Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("gemma-2-9b-it", "gemma-2-9b"),
    ("Llama-2-7b-chat-hf", "llama-2-7b"),
    ("Qwen3-4B-Thinking-2507", "qwen3-4b"), ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    ("Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
])  # fmt: skip
def test_a_tuned_release_is_read_as_its_model(typed, name):
    found = resolve(typed)
    assert (found.model.name, found.source) == (name, typed)
    assert bool(found.notes) == (typed.lower() != name)


@pytest.mark.parametrize("typed", ["llama-9-instruct", "instruct", "gpt2-base", "meta-"])
def test_other_endings_are_unknown(typed):
    with pytest.raises(FFNError, match="unknown model"):
        resolve(typed)


def test_a_directory_comes_before_a_tuned_release(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    (tmp_path / "gemma-2-9b-it").mkdir()
    (tmp_path / "gemma-2-9b-it" / "config.json").write_text(json.dumps(values), "utf-8")
    assert resolve("gemma-2-9b-it").model.main.spec.d_ff == 16


def test_no_two_models_share_a_spelling():
    for alias in catalog.spellings():
        assert alias in {(name := catalog.find(alias).model.name), *catalog.aliases(name)}


def test_a_gated_units_name_is_not_taken_for_another_function():
    assert not any("hidden_act is" in line for line in catalog.find("kimi-k3").evidence)


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("kimi-k3", ["gate and up: 4 · tanh(gate / 4) · sigmoid(gate) ⊙ (25 · tanh(up / 25))"]),
        ("deepseek-v4-flash", ["gate and up: silu(min(gate, 10)) ⊙ clip(up, -10, 10)"]),
        ("gpt-oss-20b", ["gate and up: quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)"]),
        ("step-3.7-flash", [
            "gate and up, decoder layer 43: min(silu(gate), 7) ⊙ clip(up, -7, 7), shared experts silu(gate) ⊙ up",
            "gate and up, decoder layer 44: min(silu(gate), 7) ⊙ clip(up, -7, 7),"
            " shared experts min(silu(gate), 16) ⊙ clip(up, -16, 16)",
        ]),
        ("kimi-k2", []),
    ],
)  # fmt: skip
def test_evidence_has_the_limits_of_gate_and_up(model, lines):
    assert [line for line in catalog.find(model).evidence if line.startswith("gate and up")] == lines


def test_qwen3_moe_says_which_width_is_unused():
    assert any("intermediate_size = 6144 is not used" in line for line in catalog.find("qwen3-30b-a3b").evidence)


def test_norm_parameters_of_the_branch():
    norms = {"bert-base": 2 * 768, "falcon-7b": 0, "phi-2": 0, "falcon-40b": 2 * 8192, "gemma-2-9b": 2 * 3584}
    assert {name: count(catalog.find(name)).norm_params_per_layer for name in norms} == norms


@pytest.mark.parametrize("name", catalog.names())
def test_the_default_dtype_is_the_released_one(name):
    width, model = WIDTHS.get(name), catalog.find(name)
    counted = count(model)
    assert counted.weight_bytes == pytest.approx(
        (width or 4) * counted.ffn_params_total, rel=2e-3
    )  # what stays unpacked
    line = next(line for line in model.evidence if line.startswith("dtype: "))
    if width is None:
        assert line == "dtype: fp32, since no released weights are known"
    elif line.endswith("]"):
        key = line.removesuffix("]").rpartition("[")[2]
        released = line.removeprefix("dtype: ").partition(",")[0]  # of fp8 in blocks: fp8
        assert line == f"dtype: {released}, as released [{key}]"
        assert released in counted.dtype
        assert f"[{key}] " in model.citation
    else:
        assert line == f"dtype: {counted.dtype}, assumed: its source does not specify the dtype"


@pytest.mark.parametrize("name", STORED_BYTES)
def test_whole_models_weigh_what_their_files_do(name):
    assert count(catalog.find(name)).model_weight_bytes == STORED_BYTES[name]


def test_attention_is_as_packed_as_the_release_says():
    """DeepSeek-V3 by hand: all matrices of attention and FFN in fp8 with a float32 for each block of 128 × 128; tables,
    norms, router and its correction in bf16. Kimi-K2-Thinking's files have 594 GB."""
    d, heads, rank = 7168, 128, 512
    attention = [(1536, d), (heads * 192, 1536), (rank + 64, d), (heads * 256, rank), (d, heads * 128)]
    dense, expert = [(18432, d)] * 2 + [(d, 18432)], [(2048, d)] * 2 + [(d, 2048)]
    packed = [*attention * 61, *dense * 3, *expert * 58 * 257]
    blocks = sum(rows * columns + 4 * -(-rows // 128) * -(-columns // 128) for rows, columns in packed)
    plain = 671_026_419_200 - sum(rows * columns for rows, columns in packed)
    found = count(catalog.find("deepseek-v3"))
    assert found.model_weight_bytes == pytest.approx(blocks + 2 * plain, rel=1e-5)
    assert round(found.model_weight_bytes / 1e9) == 673
    assert round(count(catalog.find("kimi-k2-thinking")).model_weight_bytes / 1e9) == 594


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "kimi-k2.5", "llama-2-7b"])
@pytest.mark.parametrize("dtype", [None, "fp8", "bf16"])
def test_a_plan_counts_the_bytes_that_params_counts(name, dtype):
    counted = count(catalog.find(name), dtype)
    row = plan_model(catalog.find(name), PlanQuestion(device="h200", tokens=1, dtype=dtype)).rows[0]
    assert row.model_weight_bytes == pytest.approx(counted.model_weight_bytes, rel=1e-9)  # rounded up by tensor


def test_a_packed_format_that_was_asked_for_leaves_the_rest_in_bf16():
    ffn = 32 * 3 * 4096 * 11008
    assert count(catalog.find("llama-2-7b"), "q4_0").model_weight_bytes == ffn * 4.5 / 8 + 2 * (6_738_415_616 - ffn)
    assert count(catalog.find("deepseek-v3"), "bf16").model_weight_bytes == 2 * 671_026_419_200


# --- the publishers' numbers ------------------------------------------------------------------------------------------

_UNITS = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}
_PUBLISHED = re.compile(r"([\d,]+(?:\.\d+)?)([MBT]?)( active)?, (.+)")
_SIZE = re.compile(r"(?<![\d.])(a?)(\d+(?:\.\d+)?[mbt])(?![a-z0-9])")  # a3b in qwen3-30b-a3b: active parameters
_PAGE = re.compile(r"(?:huggingface\.co/[\w.-]+|arxiv\.org/abs|github\.com/[\w.-]+|mistral\.ai/news)/[\w.-]+")


def published(name: str) -> tuple[list[str], str]:
    """The publisher's numbers of a known model, each with what it counts, and the page that has them ("": none)."""
    numbers, _, page = catalog.find(name).published_as.partition(" (")
    return numbers.split("; "), page.removesuffix(")")


def counts_of(name: str, active: bool) -> dict[str, set[int]]:
    """What each way of counting gives for a known model: the phrase, and the numbers that must all agree with it."""
    counted, config = count(catalog.find(name)), catalog.config(name)
    every = counted.model_params_active if active else counted.model_params_total
    d_model, last = counted.d_model, counted.groups[-1]
    table = config.get("vocab_size", 0) * d_model
    looked_up = counted.model_params_active - counted.model_params_active_no_embedding
    bare = every - (2 if looked_up else 1) * table  # a tied table is embedding and head
    layer = last.ffn_params_per_layer + (last.attention_params_per_layer or 0) + (last.layer_norm_params_per_layer or 0)
    predicting = layer + 2 * d_model * d_model + 3 * d_model  # it joins two inputs of d_model, and has three norms
    with_copies = every + predicting + 2 * table  # of embedding and head
    return {
        "all parameters": {every},
        "without the input embedding": {every - looked_up},
        "with or without the input embedding": {every, every - looked_up},
        "without the embedding and the head": {bare},
        "with the multi-token-prediction layer, without the embedding and the head": {bare + predicting},
        "with the multi-token-prediction layer and the scales": {with_copies + with_copies // 128**2},
    }


@pytest.mark.parametrize("name", [name for name in catalog.names() if catalog.find(name).published_as])
def test_publishers_numbers_count_what_they_are_said_to_count(name: str) -> None:
    """Each number is computed to its last digit; "all parameters" is said only if the input embedding matters."""
    for text in published(name)[0]:
        number, unit, active, phrase = _PUBLISHED.fullmatch(text).groups()
        ways = counts_of(name, bool(active))

        def shown(value: int, number: str = number, unit: str = unit) -> str:
            return f"{value / _UNITS[unit]:.{len(number.partition('.')[2])}f}"

        expected = number.replace(",", "")
        assert {shown(value) for value in ways[phrase]} == {expected}, text
        if phrase in ("all parameters", "without the input embedding"):
            both = ways["with or without the input embedding"]
            assert len(both) == 1 or {shown(value) for value in both} != {expected}, text


@pytest.mark.parametrize("name", [name for name in catalog.names() if catalog.find(name).published_as])
def test_publishers_numbers_are_in_the_name_or_on_a_page(name: str) -> None:
    """A number that the model's name lacks comes with the page that has it; no other row needs a page."""
    numbers, page = published(name)
    names = [size for spelled in [name, *catalog.aliases(name)] for size in _SIZE.findall(spelled)]
    sizes = [_PUBLISHED.fullmatch(number).groups() for number in numbers]
    in_name = all(("a" if active else "", (value + unit).lower()) in names for value, unit, active, _ in sizes)
    assert _PAGE.fullmatch(page) if not in_name else not page


def test_what_publishers_say_about_their_numbers() -> None:
    """From the papers and model cards themselves; Gemma's tables give both numbers, DeepSeek's README has 671B."""
    assert catalog.find("deepseek-v3").published_as.startswith(
        "671B, all parameters; 37B active, without the input embedding; 685B, with the multi-token-prediction layer"
    )
    assert (
        catalog.find("gpt-oss-120b").published_as
        == "116.8B, all parameters; 5.1B active, without the input embedding (arxiv.org/abs/2508.10925)"
    )
    assert published("mixtral-8x7b") == (
        ["46.7B, all parameters", "12.9B active, all parameters"],
        "mistral.ai/news/mixtral-of-experts",
    )
    assert published("gemma-7b")[0] == ["7,751,248,896, without the embedding and the head"]
    assert published("mistral-7b") == (["7B, with or without the input embedding"], "")
    assert catalog.find("bert-large").published_as is None  # 340M: 335 million by every count


def test_a_changed_block_has_no_published_number() -> None:
    assert load("gpt2").published_as == "124M, all parameters"
    assert load("gpt2", Dimensions(d_ff=64)).published_as is None

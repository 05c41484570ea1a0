"""A corpus's figures are those of hooks on modules that are named by hand, text by text."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.nn import functional

import ffncli
from ffncli.errors import FFNError
from ffncli.run.corpus.results import CorpusSurvey
from tests.oracles.prompted import DENSE, SINGLE, WORDS, built, in_double, made, through


def corpus(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 12 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[3:], k=draw.randint(1, 12))) for _ in range(count)]


TEXTS = corpus(23)


def ids_of(text: str) -> Tensor:
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


def arguments(name: str, text: str) -> dict[str, Tensor]:
    return {"input_ids": ids_of(text)} | ({"decoder_input_ids": torch.tensor([[0]])} if name.startswith("t5") else {})


def values_of(name: str, layers: Sequence[int], texts: Sequence[str]) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """(the units' values, their activations) of each layer, text by text, alone: each text is run once."""
    down, gate, act = DENSE[name]
    names = {f"{layer}/units": down.format(i=layer) for layer in layers}
    if gate is not None:
        names |= {f"{layer}/gate_output": gate.partition("/")[0].format(i=layer) for layer in layers}
    out: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    for text in texts:
        seen = through(in_double(name)[1], names, **arguments(name, text))
        for layer in layers:
            units = active = seen[f"{layer}/units"]
            if gate is not None and act is not None:
                read = seen[f"{layer}/gate_output"]
                active = act(read.chunk(2, -1)[0] if gate.endswith("/0") else read)
            out[layer].append((units, active))
    return out


def check_layer(survey: CorpusSurvey, frame: DataFrame, row: Any, per_text: Sequence[tuple[Tensor, Tensor]]) -> None:
    """A layer's records and its part of the frame against all its values."""
    values = torch.cat([units for units, _ in per_text]).double()
    active = torch.cat([act for _, act in per_text]) > 0
    scale = float(values.abs().max())
    frame = frame[(frame.layer == row.layer) & (frame["stack"] == row.stack)]
    assert row.tokens == len(values) == survey.tokens
    assert (frame.tokens == len(values)).all()
    assert frame.unit.tolist() == [*range(values.shape[1])]
    for name, expected in (("mean", values.mean(0)), ("min", values.amin(0)), ("max", values.amax(0)),
                           ("active_share", active.double().mean(0))):  # fmt: skip
        ours = torch.tensor(frame[name].to_numpy(float))
        assert float((ours - expected).abs().max()) <= 1e-6 * max(scale, 1.0), name
    for name in ("min", "max"):
        for unit in (0, 7, values.shape[1] - 1):
            one = frame.iloc[unit]
            there = per_text[one[f"{name}_text"]][0][one[f"{name}_token"], unit]
            assert float(there) == pytest.approx(one[name], abs=1e-6 * scale)
    assert row.dead_units == int((~active.any(0)).sum())
    assert row.units == values.shape[1]
    assert row.max == pytest.approx(float(values.max()), abs=1e-6 * scale)
    assert row.min == pytest.approx(float(values.min()), abs=1e-6 * scale)


@pytest.mark.parametrize("name", DENSE)
def test_figures_are_those_of_hooks(name: str) -> None:
    how: dict[str, Any] = {"batch_size": 5, "dtype": "fp64"}
    if name in SINGLE:
        how = {"batch_size": 1}
    survey = ffncli.corpus(in_double(name)[0], TEXTS, top_contexts=4, **how)
    assert (survey.texts, survey.cut) == (len(TEXTS), 0)
    values, frame = values_of(name, [row.layer for row in survey.rows], TEXTS), survey.frame()
    for row in survey.rows:
        check_layer(survey, frame, row, values[row.layer])
        check_contexts(frame, row, values[row.layer])


def check_contexts(frame: DataFrame, row: Any, per_text: Sequence[tuple[Tensor, Tensor]]) -> None:
    values = torch.cat([units for units, _ in per_text])
    scale = float(values.abs().max())
    frame = frame[(frame.layer == row.layer) & (frame["stack"] == row.stack)]
    for unit in (0, values.shape[1] // 2):
        one = frame.iloc[unit]
        expected = values[:, unit].sort(descending=True).values[:4].tolist()
        assert one.top_values == pytest.approx(expected, abs=1e-6 * scale)
        for value, text, token in zip(one.top_values, one.top_texts, one.top_tokens, strict=True):
            assert float(per_text[text][0][token, unit]) == pytest.approx(value, abs=1e-6 * scale)
        assert len({(text, token) for text, token in zip(one.top_texts, one.top_tokens, strict=True)}) == 4
    best = row.top_units[0]
    for context in best.top:
        words = TEXTS[context.at.text].split()
        assert context.at.token_text is not None
        assert f"«{context.at.token_text.strip()}»" in context.context
        assert context.at.token_text.strip() == words[context.at.token]


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "xlnet"])
def test_batches_of_any_size_say_the_same(name: str) -> None:
    path = in_double(name)[0]
    alone = ffncli.corpus(path, TEXTS, batch_size=1).frame()
    for size in (2, 32):
        among = ffncli.corpus(path, TEXTS, batch_size=size).frame()
        for column in ("mean", "min", "max", "active_share"):
            assert among[column].to_numpy(float) == pytest.approx(alone[column].to_numpy(float), rel=1e-5, abs=1e-5)


def test_a_model_that_mixes_its_batch_runs_texts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLNet puts time before the batch: rows of a padded batch are not those of its texts."""
    notes = ffncli.corpus(in_double("xlnet")[0], TEXTS).notes
    assert any("texts run one by one" in note for note in notes)
    assert not any("one by one" in note for note in ffncli.corpus(in_double("llama")[0], TEXTS).notes)


# --- mixtures ---------------------------------------------------------------------------------------------------------


def expert_values(block: nn.Module, x: Tensor, kind: str) -> Tensor:
    """The units of all experts for every token [tokens, experts, d_ff], from the block's own parameters."""
    experts: Any = block.experts
    if kind == "gpt_oss":
        both = torch.einsum("td,edf->tef", x, experts.gate_up_proj) + experts.gate_up_proj_bias
        gate, up = both[..., ::2].clamp(max=experts.limit), both[..., 1::2].clamp(-experts.limit, experts.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = torch.einsum("td,efd->tef", x, experts.gate_up_proj).chunk(2, -1)
    return functional.silu(gate) * up


def entering_and_chosen(model: Any, mlp: str, router: str, text: str) -> tuple[Tensor, Tensor]:
    """(what enters the FFN [tokens, d_model], the experts that its router chooses [tokens, top_k])."""
    caught: dict[str, Any] = {}
    hooks = [
        model.get_submodule(mlp).register_forward_pre_hook(lambda m, a: caught.update(x=a[0].flatten(0, -2))),
        model.get_submodule(router).register_forward_hook(lambda m, a, out: caught.update(route=out)),
    ]
    with torch.no_grad():
        model(input_ids=ids_of(text))
    for hook in hooks:
        hook.remove()
    return caught["x"], caught["route"][-1]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_count_the_tokens_that_are_routed_to_them(name: str) -> None:
    path, model = made(name).path, made(name).model
    survey = ffncli.corpus(path, TEXTS, batch_size=4)
    frame = survey.frame()
    for row in survey.rows:
        mlp = f"model.layers.{row.layer}.mlp"
        router = f"{mlp}.router" if name == "gpt_oss" else f"{mlp}.gate"
        pairs = [entering_and_chosen(model, mlp, router, text) for text in TEXTS]
        xs, chosen = zip(*pairs, strict=True)
        x, indices = torch.cat(xs), torch.cat(chosen)
        with torch.no_grad():
            values = expert_values(model.get_submodule(mlp), x, name)
        scale = float(values.abs().max())
        ours = frame[frame.layer == row.layer]
        assert set(ours.part) == {"experts"}
        for expert in range(values.shape[1]):
            tokens = (indices == expert).any(-1)
            own = ours[ours.expert == expert]
            assert (own.tokens == int(tokens.sum())).all()
            if tokens.any():
                part = values[tokens, expert]
                assert own["max"].to_numpy(float) == pytest.approx(part.amax(0).numpy(), rel=1e-6, abs=1e-6 * scale)
                assert own["mean"].to_numpy(float) == pytest.approx(part.mean(0).numpy(), rel=1e-6, abs=1e-6 * scale)
            else:
                assert own["max"].isna().all()
        assert row.units == values.shape[1] * values.shape[2]


def test_shared_experts_are_a_part_of_their_own() -> None:
    frame = ffncli.corpus(made("deepseek_v3").path, TEXTS).frame()
    moe = frame[frame.layer == 1]
    assert {*moe.part} == {"experts", "shared"}
    shared = moe[moe.part == "shared"]
    assert (shared.tokens == sum(len(text.split()) for text in TEXTS)).all()
    assert shared.expert.isna().all()
    model = made("deepseek_v3").model
    down = "model.layers.1.mlp.shared_experts.down_proj"
    units = torch.cat([through(model, {"x": down}, input_ids=ids_of(text))["x"] for text in TEXTS])
    assert shared["max"].to_numpy(float) == pytest.approx(units.amax(0).numpy(), abs=1e-6 * float(units.abs().max()))


# --- dimensions -------------------------------------------------------------------------------------------------------


def test_outlier_dimensions_and_massive_activations(tmp_path: Path) -> None:
    """Planted: a norm's weight makes dimension 5 large where the FFN reads, an embedding makes one token massive."""
    from safetensors.torch import load_file, save_file

    built("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        stored[f"model.layers.{layer}.post_attention_layernorm.weight"][5] = 50.0
    stored["model.embed_tokens.weight"][WORDS.index("cat"), 3] = 30_000.0
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    survey = ffncli.corpus(tmp_path, TEXTS)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for row in survey.rows:
        name = f"model.layers.{row.layer}"
        seen = [through(model, {"x": f"{name}.mlp", "output": name}, input_ids=ids_of(text)) for text in TEXTS]
        x = torch.cat([one["x"] for one in seen]).abs()
        shares = (x >= 6.0).double().mean(0)
        assert {one.dimension: one.share for one in row.outliers} == pytest.approx(
            {at: float(share) for at, share in enumerate(shares) if share >= 0.06}
        )
        for one in row.outliers:
            assert abs(one.value) == pytest.approx(float(x[:, one.dimension].max()))
            assert float(seen[one.at.text]["x"][one.at.token, one.dimension]) == pytest.approx(one.value)
        expected = set()
        for number, one in enumerate(seen):
            size = one["output"].abs()
            limit = max(100.0, 1000 * float(size.flatten().median()))
            expected |= {(number, *map(int, at)) for at in (size > limit).nonzero()}
        assert row.massive == len(expected) > 0
        assert {(one.text, one.token, one.dimension) for one in row.largest_massive} <= expected
        assert all(one.dimension == 3 and TEXTS[one.text].split()[one.token] == "cat" for one in row.largest_massive)
    assert 5 in survey.outlier_dimensions
    assert ffncli.corpus(tmp_path, TEXTS, outliers=1e9).outlier_dimensions == ()


# --- the run ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ffncli.run.corpus import run as reader_module
    from ffncli.run.corpus.listen import Listener

    path, texts, state = in_double("llama")[0], corpus(100), tmp_path / "state.safetensors"
    whole = ffncli.corpus(path, texts, batch_size=2, top_contexts=3).frame()
    monkeypatch.setattr(reader_module, "_SAVE_EVERY", 0.0)
    real, calls = Listener.run, []

    def interrupted(self: Any, batch: Any) -> None:
        calls.append(batch)
        if len(calls) == 40:
            raise KeyboardInterrupt
        real(self, batch)

    monkeypatch.setattr(Listener, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ffncli.corpus(path, texts, batch_size=2, top_contexts=3, resume=state)
    monkeypatch.setattr(Listener, "run", real)
    resumed = ffncli.corpus(path, texts, batch_size=2, top_contexts=3, resume=state)
    assert any(note == "resuming after 64 texts" for note in resumed.notes)
    assert resumed.frame().drop(columns=["top_values", "top_texts", "top_tokens"]).equals(
        whole.drop(columns=["top_values", "top_texts", "top_tokens"]))  # fmt: skip
    assert resumed.frame().top_values.tolist() == whole.top_values.tolist()
    again = ffncli.corpus(path, texts, batch_size=2, top_contexts=3, resume=state)
    assert again.rows == resumed.rows
    assert (again.texts, again.tokens) == (100, resumed.tokens)
    for other, what in (
        ({"top_contexts": 4}, "top_contexts=3"),
        ({"max_tokens": 3}, "no max_tokens"),
        ({"layer": 1}, "other layers"),
    ):
        with pytest.raises(FFNError, match=f"was made with .*{what}"):
            ffncli.corpus(path, texts, **{"batch_size": 2, "top_contexts": 3, "resume": state, **other})
    with pytest.raises(FFNError, match="was made with another corpus"):
        ffncli.corpus(path, texts[1:], batch_size=2, top_contexts=3, resume=state)
    with pytest.raises(FFNError, match="was made with another model"):
        ffncli.corpus(in_double("mistral")[0], texts, batch_size=2, top_contexts=3, resume=state)


def test_long_texts_are_cut() -> None:
    long = " ".join(["cat"] * 40)
    survey = ffncli.corpus(in_double("llama")[0], [long, "the cat"], max_tokens=7)
    assert (survey.tokens, survey.cut) == (9, 1)
    assert any("1 of 2 texts were cut to 7 tokens" in note for note in survey.notes)
    assert ffncli.corpus(in_double("bert")[0], [long]).tokens == 32  # its positions


def test_one_layer_alone() -> None:
    path = in_double("llama")[0]
    every, one = ffncli.corpus(path, TEXTS), ffncli.corpus(path, TEXTS, layer=1)
    assert one.rows == every.rows[1:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "prompts must be"),
        ({"prompts": 3}, "prompts must be"),
        ({"prompts": [" "]}, "has no text"),
        ({"layer": 9}, "layer"),
        ({"save": "units.txt"}, "ends in .csv or .parquet"),
        ({"outliers": 0}, "outliers must be"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(FFNError, match=words):
        ffncli.corpus(in_double("llama")[0], **{"prompts": TEXTS, **arguments})


def test_a_block_has_no_corpus() -> None:
    with pytest.raises(FFNError, match=r"prompts: .* is not a directory with weights"):
        ffncli.corpus("512x2048:relu", TEXTS)


def test_units_are_saved(tmp_path: Path) -> None:
    import pandas

    units, rows = tmp_path / "units.csv", tmp_path / "units.parquet"
    frame = ffncli.corpus(in_double("llama")[0], TEXTS, top_contexts=2, save=units).frame()
    table = pandas.read_csv(units)
    assert len(table) == len(frame)
    assert table["max"].tolist() == frame["max"].tolist()
    assert [float(value) for value in table.top_values[0].split(";")] == frame.top_values[0]
    with pytest.raises(FFNError, match="exists already"):
        ffncli.corpus(in_double("llama")[0], TEXTS, save=units)
    ffncli.corpus(in_double("llama")[0], TEXTS, top_contexts=2, save=rows)
    stored = pandas.read_parquet(rows)
    assert stored["max"].tolist() == frame["max"].tolist()
    assert [list(values) for values in stored.top_tokens] == frame.top_tokens.tolist()


def test_memory_is_asked_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from ffncli.run.engine import weights

    monkeypatch.setattr(weights, "available_memory", lambda root: 100_000)
    with pytest.raises(FFNError, match=r"the figures of all units would need 0.0 GB.*keep fewer contexts") as caught:
        ffncli.corpus(in_double("llama")[0], TEXTS, top_contexts=100)
    assert caught.value.code == 3


def test_a_figure_has_the_bytes_that_are_counted() -> None:
    from ffncli.run.corpus.sums import BYTES_OF_UNIT, BYTES_OF_VALUE, UnitSums

    for top in (0, 3):
        arrays = [tensor for tensor in UnitSums(1000, top=top).state().values() if tensor.numel() >= 1000]
        assert sum(tensor.nbytes for tensor in arrays) == 1000 * (BYTES_OF_UNIT + top * BYTES_OF_VALUE)


def test_parquet_without_its_library_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else real(name))
    with pytest.raises(FFNError, match="pyarrow is not installed") as caught:
        ffncli.corpus(tmp_path, TEXTS, save=tmp_path / "units.parquet")
    assert caught.value.code == 3


def test_several_processes_do_not_read_one_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1",
                        "TORCHELASTIC_RUN_ID": "x"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(FFNError, match="prompts runs in one process"):
        ffncli.corpus(in_double("llama")[0], TEXTS)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_moments_are_those_of_all_values(name: str) -> None:
    survey = ffncli.corpus(in_double(name)[0], TEXTS, dtype="fp64", batch_size=4)
    values = values_of(name, [row.layer for row in survey.rows], TEXTS)
    for row in survey.rows:
        x = torch.cat([units for units, _ in values[row.layer]]).double().flatten()
        centred = x - x.mean()
        assert row.mean == pytest.approx(float(x.mean()), rel=1e-9)
        assert row.std == pytest.approx(float(centred.square().mean().sqrt()), rel=1e-9)
        assert row.kurtosis == pytest.approx(float((centred**4).mean() / centred.square().mean() ** 2), rel=1e-9)


def test_the_first_texts_alone() -> None:
    path = made("llama").path
    assert ffncli.corpus(path, TEXTS, limit=7).frame().equals(ffncli.corpus(path, TEXTS[:7]).frame())
    assert ffncli.corpus(path, TEXTS[:3], limit=7).texts == 3


def test_special_tokens_are_left_out(tmp_path: Path) -> None:
    """A tokenizer that adds <s>: the figures are those of the other tokens, at the positions they have."""
    from tokenizers import Tokenizer, processors

    model: Any = built("llama", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(__import__("json").dumps(said), "utf-8")
    texts = [*TEXTS[:5], "unknown cat"]
    survey = ffncli.corpus(tmp_path, texts, layer=1, skip_special=True, top_units=1)
    values, places = [], []
    for number, text in enumerate(texts):
        ids = [1, *(WORDS.index(word) if word in WORDS else 0 for word in text.split())]
        given = {"input_ids": torch.tensor([ids])}
        values.append(through(model, {"units": "model.layers.1.mlp.down_proj"}, **given)["units"][1:])
        places += [(number, at) for at in range(1, len(ids))]
    x = torch.cat(values)
    frame = survey.frame()
    assert survey.rows[0].tokens == len(x)
    torch.testing.assert_close(torch.tensor(frame["mean"].to_numpy(float)), x.double().mean(0), rtol=1e-4, atol=1e-6)
    for unit in range(x.shape[1]):
        one = frame.iloc[unit]
        assert (one.max_text, one.max_token) == places[int(x[:, unit].argmax())]
    kept = ffncli.unit(tmp_path, texts, layer=1, neuron=2, skip_special=True)
    assert [tuple(at) for at in kept.places.tolist()] == places
    assert any("special tokens" in note for note in survey.notes)

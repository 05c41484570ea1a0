"""Routes that others record, written here as their documentation says, and what two files of routes differ in."""

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ffncli
from ffncli.errors import FFNError
from ffncli.run.corpus.compare_routes import compare_routes
from ffncli.run.corpus.routes import LayerRoutes, RouterRule, Routes, read_routes, save_routes
from tests.oracles.prompted import made, through
from tests.run.corpus.test_corpus import TEXTS, arguments
from tests.run.corpus.test_experts import MIXTURES, choices


def drawn(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> list[list[list[int]]]:
    """Choices [tokens][layers][top_k]; a token never chooses an expert twice."""
    draw = random.Random(seed)
    return [[draw.sample(range(experts), top_k) for _ in range(layers)] for _ in range(tokens)]


ROUTES = drawn(40, 3, 16, 4)


def ids_of(path: Path, **options: int) -> dict[int, list[list[int]]]:
    return {layer.index: layer.ids.tolist() for layer in read_routes(path, **options).layers}


def expected(skip: int = 0) -> dict[int, list[list[int]]]:
    return {layer + skip: [token[layer] for token in ROUTES] for layer in range(3)}


# --- ours -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_saved_routes_are_those_of_the_router(name: str, tmp_path: Path) -> None:
    path = tmp_path / "routes.safetensors"
    survey = ffncli.experts(made(name).path, TEXTS, ablate_texts=0, save_routes=path, cache="lru", slots=2, ep=2)
    for layer in read_routes(path).layers:
        assert layer.ids.tolist() == choices(name, layer.index)
        router = f"model.layers.{layer.index}.mlp.{MIXTURES[name]}"
        logits = [
            through(made(name).model, {"x_output": router}, **arguments(name, text))["x_output"] for text in TEXTS
        ]
        if name != "gpt_oss":  # its router returns logits of another kind last
            assert layer.logits is not None
            torch.testing.assert_close(layer.logits, torch.cat(logits), rtol=1e-4, atol=1e-5)
        again = layer.weights_of(layer.ids)
        assert again is not None
        assert layer.weights is not None
        torch.testing.assert_close(again, layer.weights)
    read = ffncli.experts(str(path), cache="lru", slots=2, ep=2)
    assert read.model is None
    assert (read.texts, read.tokens, read.worth) == (survey.texts, survey.tokens, survey.worth)
    unmeasured = {"output_change": None, "saliency": None}
    for a, b in zip(read.layers, survey.layers, strict=True):
        weights = [one.mean_weight for one in b.experts]
        assert [one.mean_weight for one in a.experts] == pytest.approx(weights)
        experts = tuple(replace(one, mean_weight=w, **unmeasured)  # type: ignore[arg-type]
                        for one, w in zip(b.experts, [x.mean_weight for x in a.experts], strict=True))  # fmt: skip
        # a file of routes need not have logits
        tenths = tuple(replace(one, losses={}) for one in b.tenths)
        assert a == replace(b, experts=experts, losses=(), tenths=tenths, trends=b.trends[:1])


def test_a_saved_trace_has_the_routes_of_its_layer(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    session = ffncli.trace("8x16:swiglu", experts=6, top_k=2, tokens=5, save=str(path))
    (layer,) = read_routes(path).layers
    assert layer.ids.shape == (5, 2)
    dense = session["route"]
    for token, ids in enumerate(layer.ids.tolist()):
        assert sorted(ids) == dense[token].nonzero().flatten().tolist()
        assert dense[token, ids[0]] >= dense[token, ids[1]]
    assert ffncli.experts(str(path)).tokens == 5


# --- vLLM -------------------------------------------------------------------------------------------------------------


def test_vllm(tmp_path: Path) -> None:
    """One request as .npy, several as .npz; a dense layer and padded tokens have zeros."""
    routes = numpy.array(ROUTES, "int32")
    dense = numpy.zeros((40, 1, 4), "int32")
    numpy.save(tmp_path / "one.npy", numpy.concatenate([dense, routes], 1))
    assert ids_of(tmp_path / "one.npy") == expected(skip=1)
    numpy.savez(tmp_path / "two.npz", a=routes[:15].astype("uint8"), b=routes[15:].astype("uint8"))
    found = read_routes(tmp_path / "two.npz", experts=32)
    assert {layer.index: layer.ids.tolist() for layer in found.layers} == expected()
    assert {layer.experts for layer in found.layers} == {32}
    assert found.text is not None
    assert found.text.tolist() == [0] * 15 + [1] * 25
    padded = routes.copy()
    padded[3:5] = 0
    numpy.save(tmp_path / "padded.npy", padded)
    found = read_routes(tmp_path / "padded.npy")
    assert any("6 rows name one expert for all choices" in note for note in found.notes)
    assert found.layers[0].ids[3:5].tolist() == [[-1] * 4] * 2
    survey = ffncli.experts(str(tmp_path / "padded.npy"))
    assert survey.layers[0].choices == 38 * 4


# --- SGLang -----------------------------------------------------------------------------------------------------------


def physical(logical: list[int], seed: int) -> list[int]:
    """A replica of each expert, where expert e has the replicas e and 16 + (e mod 8), the latter only if e < 8."""
    draw = random.Random(seed)
    return [draw.choice([e, 16 + e]) if e < 8 else e for e in logical]


def test_sglang(tmp_path: Path) -> None:
    """`per_token` and `per_pass` record physical experts, the default counts logical ones for each pass."""
    mapping = torch.tensor([[*range(16), *range(8)]] * 3, dtype=torch.int64)
    records, passes = [], []
    for start, stop in ((0, 25), (25, 40)):
        ids = torch.full((3, stop - start, 8), -1, dtype=torch.int32)
        for layer in range(3):
            for at, token in enumerate(ROUTES[start:stop]):
                ids[layer, at, :4] = torch.tensor(physical(token[layer], start + at))
        count = torch.stack([torch.bincount(one[one >= 0].long(), minlength=24) for one in ids])
        about: dict[str, Any] = {"forward_pass_id": start, "rank": 0, "gatherer_key": "primary"}
        records.append({**about, "input_ids": [1], "topk_ids_of_layer": ids, "global_physical_count": count})
        passes.append({**about, "global_physical_count": count})
    logical = torch.stack([torch.stack([torch.bincount(torch.tensor([e for t in ROUTES[a:b] for e in t[layer]]),
                           minlength=16) for layer in range(3)]) for a, b in ((0, 25), (25, 40))])  # fmt: skip
    torch.save({"records": records, "last_physical_to_logical_map": mapping}, tmp_path / "tokens.pt")
    torch.save({"records": passes, "last_physical_to_logical_map": mapping}, tmp_path / "passes.pt")
    ring = torch.cat([logical.int(), torch.zeros(3, 3, 16, dtype=torch.int32)])  # a buffer that is not yet full
    torch.save({"rank": 0, "logical_count": ring, "average_utilization_rate_over_window": None}, tmp_path / "counts.pt")
    found = ids_of(tmp_path / "tokens.pt")
    assert {layer: [token[:4] for token in ids] for layer, ids in found.items()} == expected()
    assert {tuple(token[4:]) for ids in found.values() for token in ids} == {(-1,) * 4}
    by_token = ffncli.experts(str(tmp_path / "tokens.pt"), ep=4)
    for name in ("passes.pt", "counts.pt"):
        for layer, counts in zip(read_routes(tmp_path / name).layers, logical.transpose(0, 1), strict=True):
            assert layer.counts is not None
            assert layer.counts.tolist() == counts.tolist()
        survey = ffncli.experts(str(tmp_path / name), ep=4)
        assert [one.tokens for one in survey.layers[1].experts] == [one.tokens for one in by_token.layers[1].experts]
        assert survey.worth == by_token.worth
        assert (survey.layers[0].pairs, survey.layers[0].hit_rates) == ((), ())


# --- llama.cpp --------------------------------------------------------------------------------------------------------

CSV: dict[str, Callable[[], list[str]]] = {
    "layer,expert": lambda: [f"{layer},{e}" for layer in range(3) for token in ROUTES for e in token[layer]],
    "": lambda: [f"{layer},{e}" for layer in range(3) for token in ROUTES for e in token[layer]],
    "pos,layer,e0,e1,e2,e3": lambda: [
        f"{at},{layer},{','.join(map(str, token[layer]))}" for at, token in enumerate(ROUTES) for layer in range(3)
    ],
    "phase,token,layer,rank,expert": lambda: [
        f"decode,{at},{layer},{rank},{e}" for at, token in enumerate(ROUTES) for layer in range(3)
        for rank, e in enumerate(token[layer])
    ],
    "turn,phase,step,layer,slot,expert,weight,residency": lambda: [
        f"0,p,{at},{layer},{rank},{e},{0.4 - rank / 10},hit" for at, token in enumerate(ROUTES) for layer in range(3)
        for rank, e in enumerate(token[layer])
    ],
}  # fmt: skip


@pytest.mark.parametrize("head", CSV)
def test_llama_cpp(head: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(filter(None, [head, *CSV[head]()])), "utf-8")
    assert ids_of(path) == expected()
    if "weight" in head:
        weights = read_routes(path).layers[0].weights
        assert weights is not None
        torch.testing.assert_close(weights[0], torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64))
    survey = ffncli.experts(str(path), cache="best", slots=4)
    assert survey.tokens == 40
    assert survey.layers[0].choices == 160


def test_traces_put_together_repeat_their_names(tmp_path: Path) -> None:
    path, lines = tmp_path / "merged.csv", CSV["layer,expert"]()
    path.write_text("\n".join(["layer,expert", *lines, "layer,expert", *lines]), "utf-8")
    assert ids_of(path) == {layer: tokens * 2 for layer, tokens in expected().items()}
    assert ids_of(path, top_k=2)[0][:2] == [ROUTES[0][0][:2], ROUTES[0][0][2:]]


# --- broken files -----------------------------------------------------------------------------------------------------


def _sglang(**given: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(given, path)


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "floats": ("a.npy", lambda path: numpy.save(path, numpy.zeros((2, 2, 2))), "float64"),
    "two axes": ("a.npy", lambda path: numpy.save(path, numpy.zeros((2, 2), int)), "integers"),
    "cut": ("a.npy", lambda path: (numpy.save(path, numpy.array(ROUTES)), path.write_bytes(path.read_bytes()[:-9])),
            "cut"),
    "no array": ("a.npy", lambda path: path.write_bytes(b"\x93NUMPY\x01"), "not an array"),
    "objects": ("a.npy", lambda path: numpy.save(path, numpy.array([[[None]]]), allow_pickle=True), "object"),
    "no zip": ("a.npz", lambda path: path.write_bytes(b"PK"), "not a .npz"),
    "other top_k": ("a.npz", lambda path: numpy.savez(path, a=numpy.array(drawn(3, 2, 8, 2)),
                                                      b=numpy.array(drawn(3, 2, 8, 3))), "another top_k"),
    "twice": ("a.npy", lambda path: numpy.save(path, numpy.array([[[1, 2, 1]]])), "chooses an expert twice"),
    "negative": ("a.npy", lambda path: numpy.save(path, numpy.array([[[1, -2]]])), "names expert -2"),
    "only padding": ("a.npy", lambda path: numpy.save(path, numpy.zeros((3, 2, 2), int)), "has no routes"),
    "no pickle": ("a.pt", lambda path: path.write_bytes(b"logical_count"), "cannot be read"),
    "another protocol": ("a.pt", lambda path: torch.save({"logical_count": 1}, path, pickle_protocol=3), "integers"),
    "float counts": ("a.pt", _sglang(logical_count=torch.ones(1, 2, 3)), "integers"),
    "expanded": ("a.pt", _sglang(logical_count=torch.ones(1, 1, 1, dtype=torch.int64).expand(9, 9, 9)), "contiguous"),
    "negative counts": ("a.pt", _sglang(logical_count=-torch.ones(1, 2, 3, dtype=torch.int64)), "negative"),
    "counts that overflow": ("a.pt", _sglang(logical_count=torch.full((4, 1, 3), 2**62)), "over 281,474,976,710,656"),
    "no records": ("a.pt", _sglang(records=[], last_physical_to_logical_map=torch.ones(1, 1).long()), "no records"),
    "map too small": ("a.pt", _sglang(records=[{"topk_ids_of_layer": torch.full((1, 1, 2), 5)}],
                                      last_physical_to_logical_map=torch.ones(1, 4).long()), "does not fit"),
    "map of no experts": ("a.pt", _sglang(records=[{"topk_ids_of_layer": torch.zeros(1, 1, 2).long()}],
                                          last_physical_to_logical_map=-torch.ones(1, 4).long()), "outside 0 to 4,095"),
    "map too wide": ("a.pt", _sglang(records=[{"global_physical_count": torch.ones(1, 1).long()}],
                                     last_physical_to_logical_map=torch.full((1, 1), 2**40)), "outside 0 to 4,095"),
    "logits too narrow": ("a.safetensors", lambda path: save_routes(path, "m", [LayerRoutes(
        "decoder", 0, 4, torch.tensor([[1, 2]]), logits=torch.zeros(1, 3))], torch.zeros(1)), "other shapes"),
    "half an expert": ("a.csv", lambda path: path.write_text("layer,expert\n0,1.5\n"), "not a whole number"),
    "layer of 301 digits": ("a.csv", lambda path: path.write_text("layer,expert\n1e300,1\n"), "not a whole number"),
    "layer of no stack": ("a.csv", lambda path: path.write_text("layer,expert\n-1,1\n"), "not a whole number"),
    "words": ("a.csv", lambda path: path.write_text("layer,expert\n0,one\n"), "not a table"),
    "ragged": ("a.csv", lambda path: path.write_text("layer,expert\n0,1\n0\n"), "not a table"),
    "no experts": ("a.csv", lambda path: path.write_text("layer,time\n0,1\n"), "no columns"),
    "nothing": ("a.csv", lambda path: path.write_text("layer,expert\n"), "no columns"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, write, words = BROKEN[case]
    write(tmp_path / name)
    with pytest.raises(FFNError) as caught, warnings.catch_warnings(action="error"):
        ffncli.experts(str(tmp_path / name))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_experts_and_unknown_layers_are_refused(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.array(ROUTES))
    for options, words in (({"recorded_experts": 8}, "but there are 8"),
                           ({"recorded_experts": 5000}, "at most 4,096"), ({"layer": 5}, "has no layer 5"),
                           ({"prompts": ["x"]}, "is for a model"), ({"ep": 3}, "evenly")):  # fmt: skip
        with pytest.raises(FFNError, match=words):
            ffncli.experts(str(tmp_path / "a.npy"), **options)  # type: ignore[arg-type]
    save_routes(tmp_path / "a.safetensors", "m", [LayerRoutes("decoder", 0, 4, torch.tensor([[1, 2]]))], torch.zeros(1))
    with pytest.raises(FFNError, match="has 4 experts, not 2"):
        ffncli.experts(str(tmp_path / "a.safetensors"), recorded_experts=2)
    layer = LayerRoutes("decoder", 0, 4, torch.tensor([[1, 2]]), logits=torch.tensor(0.0))
    save_routes(tmp_path / "b.safetensors", "m", [layer], torch.zeros(1))
    with pytest.raises(FFNError, match="do not have 2 axes"):
        ffncli.experts(str(tmp_path / "b.safetensors"))
    with pytest.raises(FFNError, match="is for recorded routes"):
        ffncli.experts(made("mixtral").path, TEXTS, recorded_experts=4)


# --- two files --------------------------------------------------------------------------------------------------------

SOFTMAX = RouterRule("softmax", "score_first", True, 1.0, 0.0, "fp32", replays=True)


def routed(logits: torch.Tensor, ids: torch.Tensor) -> LayerRoutes:
    values = logits.softmax(-1).gather(1, ids)
    return LayerRoutes("decoder", 0, logits.shape[1], ids, values / values.sum(-1, keepdim=True), logits, rule=SOFTMAX)


def test_every_planted_flip_is_found_with_its_margin() -> None:
    for seed in range(20):
        generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        logits = torch.randn(50, 12, generator=generator)
        base, planted = logits.topk(3).indices, dict[int, tuple[int, int]]()
        other = logits.clone()
        for token in draw.sample(range(50), draw.randint(0, 20)):
            lost = draw.choice(base[token].tolist())
            gained = draw.choice([e for e in range(12) if e not in base[token].tolist()])
            other[token, [lost, gained]] = other[token, [gained, lost]]
            planted[token] = (lost, gained)
        a, b = routed(logits, base), routed(other, other.topk(3).indices)
        both = [Routes("a", "ffn", (a,)), Routes("b", "ffn", (b,))]
        found = compare_routes(*both)
        assert {f.token: (f.base_expert, f.new_expert) for f in found.flips} == planted
        assert (found.tokens_touched, found.rows[0].flips, found.rows[0].choices) == (len(planted), len(planted), 150)
        for f in found.flips:
            lost, gained = planted[f.token]
            assert f.margin_base == pytest.approx(float(logits[f.token, lost] - logits[f.token, gained]))
            assert f.margin_new == pytest.approx(float(other[f.token, gained] - other[f.token, lost]))
        dense = [torch.zeros(50, 12).scatter(1, one.ids, one.weights) for one in (a, b)]  # type: ignore[arg-type]
        replayed = other.softmax(-1).gather(1, base)
        left = torch.zeros(50, 12).scatter(1, base, replayed / replayed.sum(-1, keepdim=True))
        size = float(dense[0].norm())
        assert found.rows[0].weights_error == pytest.approx(float((dense[1] - dense[0]).norm()) / size, rel=1e-5)
        assert found.rows[0].ids_replayed_error == pytest.approx(float((left - dense[0]).norm()) / size, rel=1e-5)


def test_an_expert_that_only_one_file_knows_has_no_margin_and_no_replay() -> None:
    base, new = routed(torch.tensor([[3.0, 2, 1, 0]]), torch.tensor([[0, 3]])), torch.tensor([[1.0, 2, 4]])
    found = compare_routes(Routes("a", "ffn", (base,)), Routes("b", "ffn", (routed(new, torch.tensor([[2, 0]])),)))
    (flip,) = found.flips
    assert (flip.base_expert, flip.new_expert, flip.margin_base, flip.margin_new) == (3, 2, -1.0, None)
    assert found.rows[0].ids_replayed_error is None


def test_orders_do_not_count_and_padding_is_left_out(tmp_path: Path) -> None:
    """A recorder that pads is told apart from one that routes to other experts."""
    routes = numpy.array(ROUTES)
    numpy.save(tmp_path / "a.npy", routes)
    turned = routes[:, :, ::-1].copy()
    turned[7] = 0
    numpy.save(tmp_path / "b.npy", turned)
    found = ffncli.compare(tmp_path / "a.npy", tmp_path / "b.npy")
    assert [(row.flips, row.padding, row.tokens) for row in found.rows] == [(0, 1, 39)] * 3  # type: ignore[union-attr]


def test_files_of_two_recorders(tmp_path: Path) -> None:
    """Ours against llama.cpp's, with a token of layer 2 sent elsewhere."""
    ours = tmp_path / "a.safetensors"
    layers = [LayerRoutes("decoder", at, 16, torch.tensor(ids)) for at, ids in expected().items()]
    save_routes(ours, "m", layers, torch.zeros(40))
    lines = CSV["pos,layer,e0,e1,e2,e3"]()
    taken = ROUTES[9][2]
    other = next(e for e in range(16) if e not in taken)
    lines[9 * 3 + 2] = f"9,2,{','.join(map(str, [other, *taken[1:]]))}"
    (tmp_path / "b.csv").write_text("\n".join(["pos,layer,e0,e1,e2,e3", *lines]), "utf-8")
    found: Any = ffncli.compare(ours, tmp_path / "b.csv")
    assert [(f.layer, f.token, f.base_expert, f.new_expert) for f in found.flips] == [(2, 9, taken[0], other)]
    assert found.frame().flips.tolist() == [0, 0, 1]
    assert found.flips[0].margin_base is None


def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.array(ROUTES))
    numpy.save(tmp_path / "b.npy", numpy.array(ROUTES[:9]))
    torch.save({"logical_count": torch.ones(1, 3, 16, dtype=torch.int64)}, tmp_path / "c.pt")
    (tmp_path / "d.csv").write_text("schema_version,run_id\n", "utf-8")
    (tmp_path / "e.csv").write_text("layer,expert\n9,1\n", "utf-8")
    for other, words in (("b.npy", "40 tokens"), ("c.pt", "counts choices"), ("d.csv", "files of the same kind"),
                         ("e.csv", "no layer in common")):  # fmt: skip
        with pytest.raises(FFNError, match=words):
            ffncli.compare(tmp_path / "a.npy", tmp_path / other)
    with pytest.raises(FFNError, match="not for routes"):
        ffncli.compare(tmp_path / "a.npy", tmp_path / "a.npy", margin="3%")

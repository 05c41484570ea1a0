"""`ffn bench --in-model`: a tiny model alone and with kernels, in this process; and one run as users start it."""

import json

import pytest
import torch

from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import ANCHOR, MODEL, TWIN, Case, Job, Method, TimedUnit
from ffncli.bench.request.grid import Grid, build_request, from_json, to_json
from ffncli.bench.results.journal import require_unit_of
from ffncli.bench.timing.modes import in_model as timed
from ffncli.bench.timing.modes.in_model import measure_model
from ffncli.block.recipe import FFNSpec
from ffncli.cli.bench.page import in_model_parts
from ffncli.errors import FFNError
from ffncli.kernels.choice import choices
from tests.oracles.checkpoints import expect_refusal
from tests.oracles.huggingface import make

METHOD = Method(processes=1, max_time=0.05, placements=2, rounds=2, block=1e-4, in_model=True)


def unit_of(path: object, *kernels: str, tokens: int = 8) -> tuple[Case, TimedUnit]:
    case = Case(str(path), "tiny", FFNSpec(16, 40, "swiglu"), tokens)
    return case, measure_model(case, Job(0, (case,), choices(kernels), MODEL, METHOD))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("model") / "llama").path


def test_every_arm_is_the_same_model_with_other_ffns(llama, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mlp(x, gate, up, down):\n    return x\ndef plain(x, up_bias):\n    return x\n"
    )
    case, unit = unit_of(llama, "packed", "inplace", f"{tmp_path}/mine.py:mlp", "numpy")
    status = {outcome.kernel: outcome.status for outcome in unit.outcomes}
    names = ["model", "model+packed", "model+inplace", "model+mine.py:mlp", "model+numpy"]
    assert [*status] == names
    assert [*status.values()] == ["ok", "ok", "ok", "wrong", "ok"]
    assert {block.kernel for block in unit.blocks} == {*names, TWIN, ANCHOR} - {"model+mine.py:mlp"}
    packed = unit.outcomes[1]
    assert 0 < packed.error_max < 2e-6
    assert packed.logits_error <= packed.logits_limit < 2e-5
    assert max(packed.logits_error, unit.outcomes[4].logits_error) > 0  # some processors make packed's bits the model's
    assert packed.note == "2 FFNs replaced; 10.24 KB of weights copied"
    assert unit.outcomes[3].note.startswith("mine.py:mlp on model.layers.0.mlp is wrong")
    _, loaded = timed._loaded(str(llama), "fp32", "cpu")
    assert not any("forward" in vars(part) for part in loaded.module.modules())  # all as before

    rows = summarise(case, [unit], METHOD, {"run_id": "r", "started_utc": "2026-01-02T03:04:05Z"})
    for row in rows:
        timed_row = row.status == "ok"
        assert (row.tokens_per_s == pytest.approx(8 / row.time_s)) if timed_row else row.tokens_per_s is None
        assert (row.flops, row.roof_fraction, row.baseline) == (None, None, "model")
    assert rows[1].logits_error == packed.logits_error
    table = in_model_parts(case, rows)[1]
    assert [line[0] for line in table.rows] == names
    assert table.rows[3][4] == "WRONG RESULT"


def test_what_has_no_figures_says_why(tmp_path):
    gpt2, mixtral = (make(name, tmp_path / name).path for name in ("gpt2", "mixtral"))
    _, unit = unit_of(gpt2, "packed")
    assert [(o.status, o.note) for o in unit.outcomes] == [
        ("ok", ""), ("skipped", "no FFN of GPT2LMHeadModel was replaced: packed: a plain block has no gate to pack"),
    ]  # fmt: skip
    _, unit = unit_of(gpt2, "inplace", tokens=99)
    assert {(o.status, o.note.partition(";")[0]) for o in unit.outcomes} == {
        ("failed", "the prompt has 99 tokens, but gpt2 has 32 positions")
    }
    assert unit.blocks == ()
    _, unit = unit_of(mixtral, "eager")
    assert unit.outcomes[1].logits_error < 1e-5
    assert unit.outcomes[1].logits_limit is None  # rounding may send a token to another expert


def test_each_placement_gives_parameters_new_memory(llama, monkeypatch):
    places: list[int] = []
    original = timed._TimedModel._placed

    def placed(self, arms, number):
        out = original(self, arms, number)
        places.append(next(self.module.parameters()).data_ptr())
        return out

    monkeypatch.setattr(timed._TimedModel, "_placed", placed)
    _, unit = unit_of(llama, "packed")
    assert len(places) >= 2
    assert len({block.placement for block in unit.blocks}) == len(places)
    assert all(outcome.status == "ok" for outcome in unit.outcomes)


def request_of(source: object, kernels: list[str] | None = None, baseline: str | None = None, **grid: object):
    grid = {"tokens": 4, "device": "cpu", "threads": 1} | grid
    return build_request(Grid(str(source) if source else None, **grid), kernels, baseline, Method(in_model=True))[0]


def test_a_request_and_its_names(llama):
    request = request_of(llama, ["packed"])
    assert (request.names, request.baseline) == (("model", "model+packed"), "model")
    assert [case.cache for case in request.cases] == ["warm"]
    assert request_of(llama).names == ("model", "model+auto")
    assert from_json(json.loads(json.dumps(to_json(request)))) == request
    _, unit = unit_of(llama, "packed", tokens=4)
    require_unit_of(
        request, request.cases[0], TimedUnit(**vars(unit) | {"case": request.cases[0].key, "blocks": ()}), "x"
    )


@pytest.mark.parametrize(("source", "options", "message"), [
    ("gpt2", {}, "in_model: 'gpt2' is"), ("8x16:swiglu", {}, "is not a directory with weights"),
    (None, {}, "in_model needs source"), ("", {"cache": "flush"}, "in_model contradicts cache='flush'"),
    ("", {"passes": ("forward+backward",)}, "in_model contradicts passes="),
    ("", {"baseline": "eager"}, "in_model contradicts baseline='eager'"),
    ("", {"kernels": ["slowed:1.05:eager"]}, "can only be timed by itself"),
])  # fmt: skip
def test_what_a_whole_model_cannot_be_asked(llama, source, options, message):
    with pytest.raises(FFNError, match=message):
        request_of(llama if source == "" else source, **options)


def test_contradictions_on_the_command_line(call):
    expect_refusal(call("bench", "8x16", "--in-model", "--plot", "--tokens", "1,2"), "--in-model")
    expect_refusal(call("bench", "8x16", "--in-model", "--selftest"), "--selftest contradicts --in-model")


@pytest.mark.runs
def test_a_run_as_users_start_it(call, llama, tmp_path, monkeypatch):
    from tests import ROOT

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ("--processes", "1", "--max-time", "0.5s", "--threads", "1", "--device", "cpu", "-k", "packed", "--json")
    code, out, _ = call("bench", str(llama), "--in-model", *options, "--tokens", "4", "--save", str(tmp_path / "a.csv"))
    model, packed = json.loads(out)["rows"]
    assert (code, model["kernel"], packed["kernel"], packed["status"]) == (0, "model", "model+packed", "ok")
    assert packed["ratio_low"] <= packed["ratio"] <= packed["ratio_high"]
    assert packed["logits_error"] <= packed["logits_limit"]
    assert packed["tokens_per_s"] == pytest.approx(4 / packed["time_s"])
    assert torch.is_grad_enabled()

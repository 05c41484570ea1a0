"""A model that is loaded once answers as one that is loaded for each question."""

from typing import Any

import pytest
import torch

import ffncli
from ffncli.run.pretrained import capture
from tests.oracles.prompted import made
from tests.run.corpus.test_corpus import TEXTS

pytestmark = pytest.mark.models


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect, for each load of a model, whether it was with its head."""
    calls: list[bool] = []
    real = capture.load

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options.get("with_head", False))
        return real(*args, **options)

    monkeypatch.setattr(capture, "load", counted)
    return calls


def test_twenty_prompts_are_one_load(loads: list[bool]) -> None:
    model = ffncli.load(str(made("llama").path))
    for number, text in enumerate(TEXTS[:20]):
        session = model.trace(prompt=text, layer=number % 2)
        torch.testing.assert_close(
            session["down"], ffncli.trace(made("llama").path, prompt=text, layer=number % 2)["down"]
        )
    assert loads.count(False) == 1 + 20  # the plain calls load each time


def test_changes_do_not_stay(loads: list[bool]) -> None:
    model = ffncli.load(str(made("mixtral").path))
    before = model.trace(prompt=TEXTS[0], layer=1)
    for how in ({"ablate": "expert:1"}, {"set": "route[:,0]=0.5"}, {"set": "experts.0.W1[0,0]=9"}):
        assert model.trace(prompt=TEXTS[0], layer=1, **how).prediction is not None
    after = model.trace(prompt=TEXTS[0], layer=1, unembed=True)
    assert torch.equal(before["experts"], after["experts"])
    assert loads == [False, True]


def test_corpora_share_the_load(loads: list[bool]) -> None:
    model = ffncli.load(str(made("mixtral").path))
    assert model.corpus(TEXTS).rows == ffncli.corpus(made("mixtral").path, TEXTS).rows
    assert model.unit(TEXTS, layer=1, neuron=2, expert=0).tokens
    assert model.experts(TEXTS, ablate_texts=0).tokens == sum(len(text.split()) for text in TEXTS)
    assert len(model.survey(prompt=TEXTS[0]).rows) == 2
    assert loads == [False, False]
    assert model == ffncli.load(str(made("mixtral").path))

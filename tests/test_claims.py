"""docs/findings.md has the figures that the program computes, and every command in it prints its figure."""

import re
import shlex

import pytest

from benchmarks.claims import PAGE, START, section
from benchmarks.script import put
from ffncli.models.examples import EXAMPLES
from ffncli.run.texts import FIRST, TEXTS, TextClaim, claims
from ffncli.run.texts.explained import WORKED

pytestmark = pytest.mark.docs

COMMANDS = [f"ffn trace --example {name}" for name in EXAMPLES]
COMMANDS += [f"ffn activations gelu --expect {x:g}={said}" for x, said in WORKED]
COMMANDS += [
    "ffn activations gelu --at 0.18",
    "ffn params bert-base",
    "ffn params qwen3-30b-a3b",
    "ffn params 4096x11008:swiglu --iso-params",
]


@pytest.fixture(scope="module")
def found() -> tuple[TextClaim, ...]:
    return claims()


def test_the_page_is_what_is_computed(found):
    text = PAGE.read_text("utf-8")
    assert text == put(text, START, section(found)), "make claims writes it again"


def test_a_reader_meets_the_known_mistakes_first(found):
    assert [c.claim.partition(":")[0] for c in found[: len(FIRST)]] == [name.partition(":")[0] for name in FIRST]
    verdicts = [c.verdict for c in found[len(FIRST) :]]
    assert verdicts == sorted(verdicts, key=("wrong", "depends", "holds").index)
    assert {c.text for c in found} == set(TEXTS.values())
    assert all(c.figure and c.command for c in found)


def test_what_is_known_to_be_wrong_is_wrong(found):
    wrong = {c.claim.partition(":")[0] for c in found if c.verdict == "wrong"}
    assert wrong == {
        "gelu(0.21)", "gelu(-0.15)", "gelu(0.28)", "Φ(0.18)", "collectives of one block", "zeros that dropout makes",
        "attention is linear", "the ranges show that the block is non-linear", "biases bring shift invariance",
        "parameters of the attention", "a bias of −1 separates the two classes",
    }  # fmt: skip


def test_the_list_of_commands_is_whole(found):
    assert {c.command for c in found} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_figures(call, found, command):
    code, out, _ = call(*shlex.split(command)[1:])
    shown = [claim for claim in found if claim.command == command]
    assert code == ("--expect" in command and shown[0].verdict == "wrong")
    for claim in shown:
        assert claim.figure in out, claim.claim


def test_commands_that_a_reason_names_run(call, found):
    named = {text for c in found for text in re.findall(": (ffn .+)$", c.why)}
    assert len(named) >= 6
    for command in named:
        quick = ("--seeds", "1", "--steps", "1") if "approximate" in command else ()
        assert call(*shlex.split(command)[1:], *quick)[0] == 0, command

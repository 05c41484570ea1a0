"""Every check of a question about a trace that does not need torch, and the model of the question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

from ffncli.block import dtypes
from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps
from ffncli.errors import FFNError, shown
from ffncli.models.counting.weight_format import storage_of
from ffncli.models.demo import demo
from ffncli.models.dimensions import Dimensions, whole
from ffncli.models.examples import Example, final_layer_alone, find
from ffncli.models.model import Group, Resolved
from ffncli.models.runnable import folder_of
from ffncli.run.corpus.question import TABLES
from ffncli.run.trace.question import CheckedQuestion, Question, StepIndex
from ffncli.run.user.load import load
from ffncli.run.what_if.changes import Change, changes_of
from ffncli.system.files import TENSOR_SUFFIXES, check_writable
from ffncli.system.packages import require_extra

_MOST_PLACES = 100  # in one question


def check(question: Question) -> CheckedQuestion:
    """The question about one layer with its model, located and read.

    Raises FFNError for a question that cannot be answered.
    """
    _check_options(question)
    example, model = _block(question)
    experts = _experts(question.expert, model, question.layer)
    _ = question.leading
    places = _places(question, example.aliases if example else {})
    _check_save(question)
    _check_model(question, model, experts)
    _check_ranks(question, model, example)
    return CheckedQuestion(question, model, example, experts, places, _changes(question, model, example))


def check_survey(question: Question) -> CheckedQuestion:
    """The question about all layers with its model. Raises FFNError for options that apply to one layer."""
    _check_options(question)
    example, model = _block(question)
    alone = {
        "--unembed": question.unembed, "--promotes": question.promotes, "--train": question.train,
        "--explain": question.explain, "--save": question.save, "--vocab": question.vocab, "--expert": question.expert,
        "--tp": question.tp, "--ep": question.ep, "--set": question.set, "--ablate": question.ablate,
    }  # fmt: skip
    if option := next((option for option, value in alone.items() if value), None):
        raise FFNError(f"{option} needs one layer", "give --layer I instead of all")
    _ = question.leading
    return CheckedQuestion(question, model, example)


# --- options that contradict each other -------------------------------------------------------------------------------


def _check_options(question: Question) -> None:
    """Raises FFNError for options that contradict each other, or that have no effect."""
    prompt, made = question.model_prompt, {
        "--input": question.input, "--tokens": question.tokens, "--batch": question.batch, "--seq-len": question.seq_len
    }  # fmt: skip
    if prompt:
        prompt.check(made)
    changes = prompt and (question.set or question.ablate)
    if question.neuron is not None and not question.unembed:
        raise FFNError("--neuron needs --unembed")
    if question.top_tokens is not None and not (question.unembed or changes):
        raise FFNError("--top-tokens needs --unembed, or a prompt with --set or --ablate")
    if not prompt:
        if question.position is not None and not question.unembed:
            raise FFNError("--position needs --prompt, --input-ids or --unembed")
        return
    if changed := [f.name for f in fields(Dimensions) if getattr(question.dimensions, f.name) is not None]:
        name = changed[0].replace("_", "-")
        raise FFNError(f"--{name} contradicts {prompt.option}", "the model runs unchanged")
    if question.train:
        raise FFNError(f"--train contradicts {prompt.option}", "the model is run in eval mode")


def _check_save(question: Question) -> None:
    """Raises FFNError for a file that cannot be saved: an unknown suffix, an existing file, a missing directory."""
    if question.save is None:
        if question.save_weights is not None:
            option = "--save-weights" if question.save_weights else "--no-save-weights"
            raise FFNError(f"{option} has no effect without --save FILE")
        return
    suffix = Path(question.save).suffix
    if suffix not in (*TENSOR_SUFFIXES, *TABLES):
        ends = ", ".join((*TENSOR_SUFFIXES, *TABLES))
        raise FFNError(f"--save {shown(question.save)}: the name must end in one of {ends}")
    if suffix in TABLES and question.save_weights:
        raise FFNError(f"--save-weights: a table of values ({suffix}) has no weights", "save as .safetensors")
    if suffix == ".parquet":
        require_extra("pyarrow", "parquet")
    check_writable(str(question.save_path), question.force, "--save")


# --- which block ------------------------------------------------------------------------------------------------------


def _block(question: Question) -> tuple[Example | None, Resolved]:
    """The example, if it is one, and the model to run. Raises FFNError for options that contradict each other."""
    source, chosen = question.source, question.dimensions
    if question.example is not None:
        example = find(question.example)
        _check_example(question, example)
        if question.vocab and not example.vocab:
            raise FFNError(f"--example {question.example} contradicts --vocab", "only conv's text has a final layer")
        _check_sets(question, question.vocab or example.vocab)
        return example, example.model
    _check_sets(question, question.vocab or 0)
    if question.vocab and source is None and chosen.d_model is not None and not _has_block(chosen):
        d_model = whole("--d-model", chosen.d_model)
        example = final_layer_alone(d_model, question.vocab, chosen.bias is not False)
        return example, example.model
    if source is None and chosen.d_model is None:
        example = demo(chosen)
        return example, example.model
    return None, load(source, chosen, question.seed or 0)


def _check_sets(question: Question, vocab: int) -> None:
    """Raises FFNError for sets without a vocabulary or larger than it. A model's own vocabulary is not known yet."""
    for option, value in (("--sample-top-k", question.sample_top_k), ("--sample-top-p", question.sample_top_p)):
        if value is not None and not vocab and not question.unembed:
            raise FFNError(f"{option} needs --vocab or --unembed", "without logits there are no probabilities")
    if vocab:
        question.check_top_k(vocab)


def _check_example(question: Question, example: Example) -> None:
    """Raises FFNError for options that an example does not allow."""

    def contradicts(what: str, why: str) -> NoReturn:
        raise FFNError(f"--example {question.example} contradicts {what}", why)

    if question.source is not None:
        given = question.source
        source = (
            given if isinstance(given, str) else given.source if isinstance(given, Resolved) else type(given).__name__
        )
        contradicts(f"SOURCE {shown(source)}", "give one or the other")
    if changed := _first_option(vars(question.dimensions)):
        contradicts(changed, "it runs the text's own block, whose facts hold for it alone")
    if question.dtype is not None and dtypes.dtype(question.dtype).name not in ("fp32", "fp64"):
        contradicts(f"--dtype {question.dtype}", "its facts are about exact numbers: use fp32 or fp64")
    if question.input is not None:
        contradicts("--input", "its facts hold for the text's own input, or a random one")
    drawn = {name: getattr(question, name) for name in ("tokens", "batch", "seq_len", "seed")}
    drawn |= {"train": question.train or None}
    if example.fixed and (again := _first_option(drawn)):
        contradicts(again, "the text gives its input and its mask")


def _first_option(values: Mapping[str, object]) -> str:
    """The first of these that was chosen, as typed; "" for none."""
    name = next((name for name, value in values.items() if value is not None), "")
    off = {"gated": "plain", "bias": "no-bias", "residual": "no-residual", "train": "eval"}
    return f"--{(off[name] if values[name] is False else name).replace('_', '-')}" if name else ""


def _has_block(chosen: Dimensions) -> bool:
    """Whether any option describes a block before the final layer."""
    return replace(chosen, d_model=None, bias=None).any_set()


# --- what its layer can answer ----------------------------------------------------------------------------------------


def _check_model(question: Question, resolved: Resolved, experts: frozenset[int] | None) -> None:
    """Raises FFNError if the model or its layer cannot answer, before anything large is loaded."""
    if prompt := question.model_prompt:
        folder_of(resolved, prompt.option)
        if question.vocab:
            raise FFNError(f"--vocab contradicts {prompt.option}", "--unembed goes through the model's own head")
    option = "--unembed" if question.unembed else "--promotes" if question.promotes is not None else None
    if option is None:
        return
    folder_of(resolved, option)
    layer = resolved.model.layer(question.layer)
    if layer.stack == "encoder" and any(group.stack == "decoder" for group in resolved.model.groups):
        raise FFNError(
            f"{option}: no head reads {resolved.model.name}'s encoder", "a decoder layer's output can be unembedded"
        )
    if question.neuron is None:
        return
    if question.neuron >= layer.spec.d_ff:
        last = layer.spec.d_ff - 1
        raise FFNError(f"--neuron {question.neuron} is out of range", f"d_ff is {layer.spec.d_ff}: 0 to {last}")
    if layer.spec.moe and not experts:
        what = f"--neuron {question.neuron}: each of {layer.spec.moe.experts} experts has one"
        raise FFNError(what, "add --expert 0")


def _check_ranks(question: Question, resolved: Resolved, example: Example | None) -> None:
    """Raises FFNError if the layer cannot be split over the ranks, with the nearest numbers that would do."""
    if question.ranks is None:
        return
    from ffncli.models.counting import expert_parallel, tensor_parallel

    option = "--tp" if question.tp else "--ep"
    if question.train:
        raise FFNError(f"--train contradicts {option}", "ranks run in eval mode")
    if example and example.dropped and question.train is None:
        raise FFNError(
            f"--example {question.example} contradicts {option}", "its dropout is on, ranks run in eval mode"
        )
    layer = resolved.model.layer(question.layer)
    alone = replace(resolved.model, groups=(Group(layer.stack, (layer.index,), layer.spec),))
    # Only files have weights in blocks; drawn ones are plain numbers.
    weights = storage_of(resolved) if resolved.checkpoint else dtypes.dtype("fp32")
    tensor_parallel.check(alone, question.ranks.tp, weights)
    expert_parallel.check(alone, question.ranks.ep)


def _experts(text: str | None, resolved: Resolved, layer: str | None) -> frozenset[int] | None:
    """The experts to look into: none, some (`0,3`), or all (None). FFNError if the model has no such expert."""
    if text is None:
        return frozenset()
    moe = resolved.model.layer(layer).spec.moe
    if moe is None:
        first = next((g.layers[0] for g in resolved.model.groups if g.spec.moe), None)
        advice = "it is dense" if first is None else f"the first MoE layer is {first}"
        raise FFNError(f"--expert {shown(text)}: this layer of {resolved.model.name} has no experts", advice)
    if text == "all":
        return None
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise FFNError(f"--expert must be a number, a comma list or all, got {shown(text)}")
    experts = frozenset(int(word) for word in text.split(","))
    if max(experts) >= moe.experts:
        raise FFNError(
            f"--expert {max(experts)} is out of range", f"{resolved.model.name} has experts 0 to {moe.experts - 1}"
        )
    return experts


# --- which changes are tried ------------------------------------------------------------------------------------------


def _changes(question: Question, resolved: Resolved, example: Example | None) -> tuple[Change, ...]:
    """The changes of the block. Raises FFNError for one that it does not have, and for a block in training mode."""
    if not (question.set or question.ablate):
        return ()
    option = "--set" if question.set else "--ablate"
    if question.train or (example and example.dropped and question.train is None):
        raise FFNError(f"--train contradicts {option}", "add --eval: dropout would change the values too")
    block = example.block if example and example.block else steps(resolved.model.layer(question.layer).spec)
    block = ffn_steps(block) if question.model_prompt else block
    return changes_of(block, question.set or (), question.ablate or ())


# --- which numbers are explained --------------------------------------------------------------------------------------


def _places(question: Question, aliases: Mapping[str, str]) -> tuple[StepIndex, ...]:
    """(name, index) of every place to explain; `aliases` maps our names to a text's names, which are accepted too.

    Raises FFNError for text that is not a place, and for options of places if there is none.
    """
    if not question.explain:
        for option, value in (("--terms", question.terms), ("--depth", question.depth)):
            if value is not None:
                raise FFNError(f"{option} needs --explain")
    ours = {theirs: name for name, theirs in aliases.items()}
    texts = [re.sub(r"\w+(?=\[|:)", lambda m: ours.get(m[0], m[0]), text) for text in question.explain or ()]
    places = tuple(_place(text) for several in texts for text in _split(several))
    if len(places) > _MOST_PLACES:
        raise FFNError(f"--explain takes at most {_MOST_PLACES} places, got {len(places)}")
    return places


def _split(text: str) -> list[str]:
    """`up[0,3],down[0,1]` → both; commas inside brackets, or in an index after a colon, do not separate."""
    return re.split(r",(?![^\[]*\])", text) if "[" in text else [text]


def _place(text: str) -> StepIndex:
    """`up[0,3]`, `up[0, -1]`, `up:0,3`, `experts[2].up[0,3]` → (name, index)."""
    plain = re.sub(r"\[([0-9]{1,9})\]\.", r".\1.", text.strip())
    match = re.fullmatch(r"([^\[\]:]+)(?:\[([^\[\]]*)\]|:(.*))", plain, re.DOTALL)
    words = (match[2] if match[2] is not None else match[3]).split(",") if match else []
    if not match or not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", word, re.ASCII) for word in words):
        raise FFNError(f"--explain {shown(text)} is not a place in a tensor", "give NAME[i,j], such as up[0,3]")
    return match[1].strip(), tuple(int(word) for word in words)

"""The layout check: how the file's tensors were read, the evidence for it, and the effect of each misreading.

The proof that the reading is right is the result of another program: transformers' module for the layer, run on the
layer's actual input, or the same layer of another checkpoint (`against`). If our result differs from the proof but a
misreading agrees with it, the row names that misreading.

The check adds tokens until every expert is reached, because an expert without tokens does not affect any output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Experts, Norm, parameters
from ffncli.errors import FFNError, shown
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import Resolved
from ffncli.models.tensors.layout import Located, Misreading, canonical, misreadings, mixed_misreadings
from ffncli.models.tensors.slices import StoredSlice
from ffncli.run.engine.execute import halves_by_turns, run, turns_as_halves
from ffncli.run.engine.prepare import prepare
from ffncli.run.engine.reference import output_and_experts, routing_steps, steady_tokens
from ffncli.run.engine.weights import located_weights, packed_formats, read_located
from ffncli.run.pretrained.capture import FAULTS, run_model
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow, Judge, errors

_IDS = tuple(range(5, 13))  # token ids that every vocabulary has; none is a special token
_WHERE = 120  # characters shown of a tensor's name


@dataclass(frozen=True)
class Proof:
    """The output (`reference`) of another program for the same layer and the input `x` [tokens, d_model]; `name` is
    that program's name.

    `weights` are the program's weights in canonical form, if they can be compared with ours, and `norms` are the
    outputs of its norms for x. `single` is True if the program computes parts in float32 whatever the dtype. `same`
    marks the tokens to compare; None for all. `fault` describes a known bug in the program. `formats` are the packed
    formats of its weights; None if the weights come from the same file as ours.
    """

    name: str
    x: Tensor
    reference: Tensor
    remark: str = ""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    single: bool = False
    same: Tensor | None = None
    fault: str = ""
    formats: tuple[str, ...] | None = None


def layout(case: CheckedBlock) -> Iterator[CheckRow]:
    """Compare the tensors as read with the proofs, and show the effect of every misreading that the shapes allow."""
    judge = case.judge("layout")
    located = _located(case)
    if located is None and case.against is None:
        yield judge.skips("file", "the weights do not come from a file, so nothing was read")
        return
    for item in located or ():
        yield judge.skips(item.parameter, _words(item, case.model))
    proofs = []
    if located is not None:
        proof, reason = transformers_module(case)
        proofs += [proof] if proof else []
        if reason:
            yield judge.skips(
                "transformers", f"not checked against its module, so the reading follows the evidence above: {reason}"
            )
    proofs += [_other(case)] if case.against is not None else []
    for proof in proofs:
        yield from _agreement(case, _judge(case, proof), located or (), proof)
        yield from _uncovered_parts(case, judge, proof)
    if located is not None:
        yield from _misread(case, judge, located, proofs[0].x if proofs else case.x)


def transformers_module(case: CheckedBlock) -> tuple[Proof | None, str]:
    """Run the layer's FFN in transformers' own model; return (proof, ""), or (None, the reason if it cannot run)."""
    passes: list[tuple[Tensor, Tensor]] = []
    try:
        run_model(
            case.model, [case.layer], Prompt(ids=_IDS), lambda _, __, *tensors: passes.append(tensors),
            dtype=str(case.dtype), device=case.device,
        )  # fmt: skip
    except FFNError as error:
        return None, error.message.removeprefix("input_ids: ")
    ((entering, leaving),) = passes
    name = f"transformers' {case.model.model.model_type or 'model'}"
    same, left_out = steady_tokens(case.ffn, case.ffn_weights, {case.entry: entering}, case.dtype)
    covered = reached(case, entering)
    some = (
        f"these tokens reach {int(covered.sum())} of {len(covered)} experts"
        if covered is not None and not covered.all()
        else ""
    )
    remarks = (f"on the layer's input for tokens {_IDS[0]} to {_IDS[-1]}", some, left_out)
    fault = FAULTS.get(case.model.model.model_type or "", "") if case.layer.spec.moe else ""
    remark = "; ".join(filter(None, remarks))
    return Proof(name, entering, leaving, remark, single=True, same=same, fault=fault), ""


def _located(case: CheckedBlock) -> tuple[Located, ...] | None:
    """Locate the FFN's parameters in the model's files; None if the model has no files."""
    located = located_weights(case.model, case.layer)
    return None if located is None else tuple(item for item in located if item.parameter in case.ffn_weights)


def _words(item: Located, resolved: Resolved) -> str:
    """Describe a reading: `model.layers.0.mlp.gate_up_proj.weight [80, 16], concatenated 1 of 2; ...`."""
    many = f" and {len(item.names) - 1} more" if len(item.names) > 1 else ""
    shape = f"[{', '.join(map(str, item.stored_shape()))}]"
    how = ", ".join(filter(None, (f"{item.names[0][:_WHERE]}{many} {shape}", item.slice.words)))
    packed = " and ".join(packed_formats((item,)))
    blocks = resolved.checkpoint is not None and resolved.checkpoint.gguf  # GGUF blocks contain their own scales
    stored = packed and f"stored as {packed}, unpacked" + ("" if blocks else " with its scales")
    return "; ".join(
        filter(None, (how, stored, item.slice.evidence, item.slice.assumed and f"assumed: {item.slice.assumed}"))
    )


def _other(case: CheckedBlock) -> Proof:
    """Run the same layer of the model `against`."""
    other, layer = case.against, case.layer
    assert other is not None
    label = f"--against {shown(other.source)}"
    if other.checkpoint is None and other.weights is None:
        raise FFNError(f"{label} has no weights of its own", "give a directory, a file or my.py:Class")
    several = len({group.stack for group in other.model.groups}) > 1
    text = None if other.model.bare else (f"{layer.stack}.{layer.index}" if several else str(layer.index))
    ready = prepare(other, text, dtype=str(case.dtype), device=case.device, input="zeros", leading=(1,))
    spec = ready.layer.spec
    if spec.d_model != layer.spec.d_model:
        raise FFNError(f"{label} has d_model {spec.d_model}, {shown(case.model.source)} has {layer.spec.d_model}")
    block = kernel_steps(ready.steps)
    names = {name for step in block for name in step.parameters()}
    weights = {name: tensor for name, tensor in ready.weights.items() if name in names}
    (entry,) = {step.inputs[0] for step in block} - {step.output for step in block}
    x = reaching(case)
    reference = run(block, weights, {entry: x})
    norms = {
        step.output: run((step,), ready.weights, {step.inputs[0]: case.x})
        for step in ready.steps
        if isinstance(step.op, Norm) and step not in block and step.op.axis.name == "d_model"
    }
    formats = packed_formats(located_weights(other, ready.layer) or ())
    return Proof(other.source, x, reference, _differences(layer.spec, spec), weights, norms, formats=formats)


def _differences(spec: FFNSpec, other: FFNSpec) -> str:
    """Return the differences between two blocks' specs, in words."""
    names = ("d_ff", "activation", "gated", "bias", "limits", "shared_limits", "gate_scale", "sub_norm", "moe")
    apart = [name for name in names if getattr(spec, name) != getattr(other, name)]
    texts = [f"{n} {getattr(spec, n)} here, {getattr(other, n)} there" for n in apart if n != "moe"]
    return "; ".join([*texts, *(["different experts or a different router"] if "moe" in apart else [])])


# --- readings against a reference -------------------------------------------------------------------------------------


def _judge(case: CheckedBlock, proof: Proof) -> Judge:
    """Return the judge for a proof; the tolerance is at least float32's if the other program computes in float32."""
    judge = case.judge("layout")
    if case.tolerance is not None or not proof.single:
        return judge
    return replace(judge, tolerance=max(judge.tolerance, case.judge("layout", torch.float32).tolerance))


def _uncovered_parts(case: CheckedBlock, judge: Judge, proof: Proof) -> Iterator[CheckRow]:
    """Check the parts that the FFN's output does not cover: experts without tokens, norms outside the FFN."""
    if proof.weights and (row := unreached(case, judge, proof.x, proof.name, proof.weights)) is not None:
        yield row
    for step in case.steps:
        if step.output in proof.norms:
            ours = run((step,), case.weights, {step.inputs[0]: case.x})
            yield judge.equal(f"{step.output} = {proof.name}", ours, proof.norms[step.output])


def _agreement(case: CheckedBlock, judge: Judge, located: Sequence[Located], proof: Proof) -> Iterator[CheckRow]:
    """Compare our reading with a proof; if they differ, find the misreading that agrees, or the nearest misreading."""
    if proof.same is not None and not proof.same.any():
        yield judge.skips(f"as read = {proof.name}", f"not checked against its module: {proof.remark}")
        return
    same = slice(None) if proof.same is None else proof.same
    ours, theirs = _computed(case, case.ffn_weights, proof.x)[same], proof.reference[same]
    row = judge.equal(f"as read = {proof.name}", ours, theirs, proof.remark)
    for name, weights in () if row.passed or proof.formats is not None else _rounded(case, located):
        again = judge.equal(row.subject, _computed(case, weights, proof.x)[same], theirs, f"{proof.remark}; {name}")
        row = again if again.passed else row
    if row.passed:
        yield row
        return
    if proof.fault:
        yield judge.skips(row.subject, f"not checked against its module: {proof.fault}")
        return
    tried: list[CheckRow] = []
    for name, weights in readings(case, located):
        tried.append(judge.equal(name, _computed(case, weights, proof.x)[same], theirs))
        if tried[-1].passed:
            break
    agreeing = next((candidate for candidate in tried if candidate.passed), None)
    nearest = min(tried, key=lambda r: r.relative_error if r.relative_error is not None else inf, default=None)
    if agreeing is not None:
        verdict = f"read with {agreeing.subject}, it agrees with {proof.name}"
    elif nearest is not None and (nearest.relative_error or inf) < (row.relative_error or 0):
        verdict = f"no other reading agrees; nearest: {nearest.subject}, off by {nearest.relative_error:.2g}"
    elif row.relative_error is not None and nearest is not None:
        verdict = f"no other reading is closer: {_weight_difference(packed_formats(located), proof.formats)}"
    elif nearest is not None:
        verdict = "no other reading agrees"
    else:
        verdict = "no other reading fits its shapes"
    notes = "; ".join(filter(None, (verdict, row.note)))
    yield CheckRow(row.check, row.subject, row.max_error, row.relative_error, row.ulps, row.tolerance, False, notes)
    if agreeing is not None:
        size = (agreeing.max_error, agreeing.relative_error, agreeing.ulps, agreeing.tolerance)
        yield CheckRow(row.check, f"with {agreeing.subject} = {proof.name}", *size, True, "the reading that agrees")
    for name, theirs in proof.weights.items():
        if name in case.ffn_weights and case.ffn_weights[name].shape == theirs.shape:
            yield judge.figure(f"{name} vs {proof.name}", case.ffn_weights[name], theirs)


def _rounded(case: CheckedBlock, located: Sequence[Located]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield weights with packed tensors rounded to their scales' dtype, as compressed-tensors unpacks them."""
    packed = [item.parameter for item in located if packed_formats((item,))]
    for dtype in (torch.bfloat16, torch.float16) if packed else ():
        weights = {name: case.ffn_weights[name].to(dtype).to(case.dtype) for name in packed}
        yield (
            f"its unpacked weights are rounded to {str(dtype).removeprefix('torch.')}",
            {**case.ffn_weights, **weights},
        )


def _weight_difference(ours: tuple[str, ...], theirs: tuple[str, ...] | None) -> str:
    """Return the reason why the same layout gives different values: `... differ by quantization (Q8_0 here, none
    there)`."""
    if theirs is None or set(ours) == set(theirs):
        return "the weights themselves differ"
    here, there = (" and ".join(formats) or "none" for formats in (ours, theirs))
    return f"the weights differ by quantization ({here} here, {there} there); --tolerance sets the accepted difference"


def _misread(case: CheckedBlock, judge: Judge, located: Sequence[Located], x: Tensor) -> Iterator[CheckRow]:
    """Show how much each misreading would change the FFN's output."""
    ours = _computed(case, case.ffn_weights, x)
    others = misreadings(located)
    if not others:
        yield judge.skips("misreadings", "no other reading fits these shapes")
    for other in others:
        theirs = _computed(case, _reread(case, located, other), x)
        _, relative, _ = errors(theirs, ours, case.dtype)
        differs = relative is None or relative > judge.tolerance
        note = (
            "read this way, the output would be off by this much"
            if differs
            else "makes no difference with these weights"
        )
        if not bool(ours.isfinite().all()):
            note = "the output has NaN or Inf, so readings cannot be compared"
        yield judge.figure(f"with {other.name}", theirs, ours, note)


def _computed(case: CheckedBlock, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return run(case.ffn, weights, {case.entry: x})


def readings(case: CheckedBlock, located: Sequence[Located]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (name, weights) of every misreading: of the file, and of a program that splits a fused tensor."""
    axes = parameters(case.ffn)
    items = located or [Located(name, axes[name], StoredSlice(name), (name,)) for name in case.ffn_weights]
    for other in mixed_misreadings(items):
        yield other.name, _reread(case, items, other)
    fused = any(item.slice.parts > 1 for item in located)
    for prefix in ("", "shared.") if not fused else ():
        yield from resplit(case.ffn_weights, prefix)


def resplit(weights: Mapping[str, Tensor], prefix: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the weights with gate and up from a different split of one fused tensor; nothing if there is no gate.

    The fused tensor [2 · d_ff, d_model] had alternating rows but was cut into halves, or it had halves but was read as
    alternating rows.
    """
    pairs = [(f"{prefix}gate.{kind}", f"{prefix}up.{kind}", axis) for kind, axis in (("weight", -2), ("bias", -1))]
    pairs = [(gate, up, axis) for gate, up, axis in pairs if gate in weights]
    where = f" in the {prefix.rstrip('.')} experts" if prefix else ""
    for name, split in (("taken by turns", halves_by_turns), ("cut into halves", turns_as_halves)) if pairs else ():
        for before, after in ((False, False), (False, True), (True, False)):
            out = dict(weights)
            for gate, up, axis in pairs:
                first, second = (weights[up], weights[gate]) if before else (weights[gate], weights[up])
                made = split(first, second, axis)
                out[gate], out[up] = made[::-1] if after else made
            words = "up and gate" if before else "gate and up"
            yield f"{words}, put together, {name}{where}" + (", and swapped" if after else ""), out


def _reread(case: CheckedBlock, located: Sequence[Located], other: Misreading) -> dict[str, Tensor]:
    """Return the weights under a misreading; only the parts that it reads differently are read again."""
    items, checkpoint = {item.parameter: item for item in located}, case.model.checkpoint
    changed = [item for item in other.located if item != items[item.parameter]]
    if checkpoint is not None:
        again = read_located(checkpoint, changed, case.dtype, case.device, case.model.quantization)
    else:
        again = {item.parameter: canonical(case.ffn_weights[item.names[0]], item).contiguous() for item in changed}
    weights = {**case.ffn_weights, **again}
    for name, axis in other.exchanged:
        weights[name] = weights[name].transpose(0, axis).contiguous()
    return weights


# --- tokens that reach every expert: an expert without tokens does not affect any output
# ------------------------------------

_ROUNDS, _AT_ONCE, _SHOWN, _FEW = 32, 256, 8, 4


def reached(case: CheckedBlock, x: Tensor) -> Tensor | None:
    """Return for each expert whether any token of `x` [tokens, d_model] reaches it; None in a dense block."""
    before = routing_steps(case.ffn)
    choices = output_and_experts(before, case.ffn_weights, {case.entry: x})[1] if before else None
    return None if choices is None else choices.any(0)


def reaching(case: CheckedBlock) -> Tensor:
    """Return the case's tokens, followed by random tokens for the experts that the case's tokens do not reach."""
    x, before = case.x, routing_steps(case.ffn)
    covered = reached(case, x)
    if covered is None:
        return x
    generator, extra = case.generator(), []
    for _ in range(_ROUNDS):
        if covered.all():
            break
        tokens = torch.randn(_AT_ONCE, x.shape[-1], generator=generator).to(x)
        choices = output_and_experts(before, case.ffn_weights, {case.entry: tokens})[1]
        assert choices is not None
        for expert in (choices.any(0) & ~covered).nonzero().flatten().tolist():
            if not covered[expert]:
                token = int(choices[:, expert].nonzero()[0])
                extra.append(tokens[token])
                covered = covered | choices[token]
    return torch.cat([x, torch.stack(extra)]) if extra else x


def unreached(case: CheckedBlock, judge: Judge, x: Tensor, label: str, theirs: Mapping[str, Tensor]) -> CheckRow | None:
    """Compare the experts that no token of `x` reaches with `theirs`; None if all are reached."""
    covered = reached(case, x)
    step = next((step for step in case.ffn if isinstance(step.op, Experts)), None)
    if covered is None or step is None or not isinstance(step.op, Experts):
        return None
    left = (~covered[: step.op.experts.size]).nonzero().flatten().tolist()
    if not left:
        return None
    weights = {name: case.ffn_weights[name] for name in step.op.parameters()}
    if any(name not in theirs or theirs[name].shape != weight.shape for name, weight in weights.items()):
        return judge.skips(f"{_experts(left)} = {label}", "no token goes there, and their shapes differ")
    width = parameters(step.op.program)["up.weight"][1].size
    inputs = {"x": torch.randn(_FEW, width, generator=case.generator()).to(x)}
    made = {e: [run(step.op.program, step.op.of_one(one, e), inputs) for one in (weights, theirs)] for e in left}
    differ = [e for e, (ours, other) in made.items() if not judge.equal("", ours, other).passed]
    ours, other = (torch.stack([made[e][n] for e in differ or left]) for n in (0, 1))
    return judge.equal(
        f"{_experts(differ or left)} = {label}", ours, other, "no token goes there, so they ran separately"
    )


def _experts(several: list[int]) -> str:
    more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
    return f"experts {', '.join(map(str, several[:_SHOWN]))}{more}"

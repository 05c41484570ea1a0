"""The blocks of every traced architecture backwards: gradients of our rules against autograd through the model's own
modules, and the bytes that a forward pass keeps against saved_tensors_hooks."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ffncli.block.kept import kept
from ffncli.block.recipe import steps
from ffncli.block.steps import Experts, ffn_span, ffn_steps, id_inputs, state_inputs, tables
from ffncli.models.model import Layer
from ffncli.run.engine.backward import backward, forward
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.engine.locate import LiveFFN, live_ffn, live_parameters
from ffncli.run.engine.prepare import prepare
from tests.architectures.test_table import TABLE, quiet  # noqa: F401  # a fixture
from tests.oracles.architectures.tiny import Tiny, statement, tiny
from tests.oracles.architectures.traced import FP32, _canonical, _ids, _limit, _run, live_weights
from tests.oracles.saved import kept_storages
from tests.run.engine.test_backward import apart, inputs_of, randomised

NAMES = [name for name, line in TABLE.items() if line["result"] == "same"]
TOKENS = 5


class Leaves:
    """The input of each FFN as a leaf of autograd's graph, its second tensor if there is one, and its outputs."""

    def __init__(self, model: nn.Module, places: Mapping[Layer, LiveFFN]) -> None:
        self.given: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        enters = {live.enters: live.enters for live in places.values()}
        for layer, live in places.items():  # gate and up read the same tensor
            if layer.spec.moe is None and live.enters in live.owners.values():
                enters |= {
                    live.owners[name]: live.enters for name in ("gate.weight", "up.weight") if name in live.owners
                }
        for live in places.values():  # shared experts outside the module of the experts (Granite)
            enters |= dict.fromkeys((name for name in live.leaves[1:] if name not in enters), live.enters)
        self.hooks = [
            model.get_submodule(n).register_forward_pre_hook(self._enter(n, first), with_kwargs=True)
            for n, first in enters.items()
        ]
        leaves = {name for live in places.values() for name in live.leaves}
        self.hooks += [model.get_submodule(n).register_forward_hook(self._leave(n)) for n in leaves]

    def _enter(self, name: str, of: str) -> Any:
        called: list[str] = []

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if called:
                return None
            called.append(name)
            everything = [*args, *kwargs.values()]
            first, second = [*(t for t in everything if isinstance(t, Tensor)), None, None][:2]
            assert first is not None
            given = first.detach().clone() if first.isfinite().all() else torch.randn_like(first)
            leaf = self.given.setdefault(of, given.requires_grad_())
            assert torch.equal(leaf, given) or not first.isfinite().all()
            if second is not None:
                self.state[name] = second.detach()
            torch.set_grad_enabled(True)  # the model around the FFN runs without gradients
            changed = [leaf if one is first else one for one in everything]
            return tuple(changed[: len(args)]), dict(zip(kwargs, changed[len(args) :], strict=True))

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.made.setdefault(name, out[0] if isinstance(out, (tuple, list)) else out)
            torch.set_grad_enabled(False)

        return hook


def gradients(one: Tiny) -> Iterator[tuple[Layer, dict[str, float]]]:
    """Yield, for a layer of each group, the relative error of each gradient."""
    model, ours = one.module, one.saved_model
    layers = [Layer(group.stack, group.layers[0], group.spec) for group in ours.model.groups]
    places = {layer: live_ffn(model, ours, layer) for layer in layers}
    double = True
    try:
        model.double()
        caught = through(one, model, places)
    except (RuntimeError, TypeError):  # the model's code requires float32
        model.float()
        double, caught = False, through(one, model, places)
    for layer, live in places.items():
        x = caught.given[live.enters]
        out = sum((caught.made[name].reshape(x.shape) for name in live.leaves), torch.zeros(()))
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
        _, located = live_parameters(model, ours, layer)
        names = list(dict.fromkeys(name for item in located for name in item.names))
        own = dict(model.named_parameters())
        trained = [name for name in names if name in own]
        found = torch.autograd.grad(out, [x, *(own[n] for n in trained)], g, allow_unused=True, retain_graph=True)
        raw = {n: torch.zeros_like(own[n]) if t is None else t for n, t in zip(trained, found[1:], strict=True)}
        theirs = {
            item.parameter: _canonical([raw[n] for n in item.names], item)
            for item in located if all(n in raw for n in item.names)
        }  # fmt: skip
        block, weights = ffn_steps(steps(layer.spec)), live_weights(model, ours, layer)
        weights = {n: t.to(x.dtype) for n, t in weights.items()}  # Switch keeps its router in float32
        g = g.to(x.dtype)
        start, _ = ffn_span(block)
        ids = _ids(torch.Generator().manual_seed(2)).reshape(-1, 1)
        given = {start: x.detach()} | {n: ids.reshape(*x.shape[:-1], 1) for n in id_inputs(block)}
        given |= {n: caught.state[live.enters] for n in state_inputs(block) if live.enters in caught.state}
        if tables(block):
            read = prepare(ours, layer=f"{layer.stack}.{layer.index}").weights
            weights |= {n: read[n] for n in tables(block)}
        ran = forward(block, weights, given)
        made = {g.name: g.tensor for g in backward(block, ran, {block[-1].output: ("g", g)})}
        assert found[0] is not None
        wanted = {start: found[0], **{n: t for n, t in theirs.items() if n in weights}}
        mine = {n: made.get(n, torch.zeros_like(t)) for n, t in wanted.items()}
        yield layer, {**apart(mine, wanted), "double": float(double)}
    model.float()


def through(one: Tiny, model: nn.Module, places: Mapping[Layer, LiveFFN]) -> Leaves:
    caught, at = Leaves(model, places), one.case.at
    whole: Any = model.config
    model.config = getattr(whole, at) if at else whole
    model.requires_grad_(True)
    try:
        _run(one.name, model, places, caught)  # type: ignore[arg-type]
    finally:
        model.config = whole
        for hook in caught.hooks:
            hook.remove()
    if not {name for live in places.values() for name in live.leaves} <= caught.made.keys():
        raise RuntimeError("the model's code does not run in this dtype")
    return caught


@pytest.mark.usefixtures("quiet")
@statement
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_models_own_modules(name: str) -> None:
    for layer, errors in gradients(tiny(name)):
        limit = _limit(name, layer) if errors.pop("double") else FP32
        assert max(errors.values()) <= limit, (layer, errors)


@statement
@pytest.mark.parametrize("name", NAMES)
def test_kept_bytes_are_those_of_the_hooks(name: str) -> None:
    for group in tiny(name).model.model.groups:
        block = steps(group.spec)
        weights, inputs = randomised(block, torch.float32), inputs_of(block, torch.float32, (TOKENS,))
        leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in weights.items()}
        given = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
        routes: dict[str, Tensor] = {}

        def compute(block: Any = block, leaves: Any = leaves, given: Any = given, routes: Any = routes) -> Tensor:
            out = torch.ones(())
            for event in execute(block, leaves, given, EVAL):
                out = event.tensor
                routes[event.name] = event.tensor.detach()
            return out

        real = sum(kept_storages(compute, leaves).values())
        loads = {
            s.output: (routes[s.inputs[1]][:, s.op.entries] != 0).sum(0).tolist()
            for s in block if isinstance(s.op, Experts)
        }  # fmt: skip
        assert sum(one.bytes for one in kept(block, TOKENS, 4, loads=loads)) == real

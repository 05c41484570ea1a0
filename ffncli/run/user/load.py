"""Loading a model from any SOURCE, including modules in the user's Python files; `ffncli.count` and `ffncli.plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from ffncli.errors import FFNError, shown_path
from ffncli.models import source as model_source
from ffncli.models.counting.cluster_plan import PlanQuestion, plan_model
from ffncli.models.counting.count import count as count_model
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.model import Resolved
from ffncli.options import shared
from ffncli.options.accept import NATURAL, instance
from ffncli.options.arguments import checked
from ffncli.options.opt import COMPUTE, Opt, call
from ffncli.run.user.options import MODEL, ModelSource, is_module

if TYPE_CHECKING:
    from ffncli.models.counting.cluster_plan import ClusterPlan
    from ffncli.models.counting.count import ModelCount
    from ffncli.run.user.options import Source


@checked(source=MODEL, dimensions=instance(Dimensions, "an ffncli.models.dimensions.Dimensions"), seed=NATURAL)
def load(source: Source | None = None, dimensions: Dimensions | None = None, seed: int = 0) -> Resolved:
    """Return the model for a SOURCE and dimension options. `my.py:Name` is executed, and `seed` seeds its weights.

    The options also change a model that is already loaded, but not a module, which has its own dimensions and weights.
    All other sources go to `models.source.load`, which needs no torch.
    """
    if isinstance(source, Resolved):
        return with_dimensions(source, dimensions or Dimensions())
    if is_module(source):
        from ffncli.run.user.module import copied, in_memory, model_of

        if (resolved := in_memory(source)) is not None:
            return with_dimensions(resolved, dimensions or Dimensions())
        with copied(source, dimensions or Dimensions()) as module:
            return model_of(module, dimensions or Dimensions())
    if not isinstance(source, str) or not model_source.is_user_module(source):
        return model_source.load(cast(str | None, source), dimensions)
    path = Path(os.path.expanduser(source.rpartition(":")[0] if ":" in source else source))
    if not os.path.exists(path):  # before torch is imported
        raise FFNError(f"{shown_path(path)} does not exist", "give my.py:ClassName")
    from ffncli.run.user.module import built, model_of

    with built(source, dimensions or Dimensions(), seed) as module:
        return model_of(module, dimensions or Dimensions())


@dataclass(frozen=True, kw_only=True)
class CountQuestion(Dimensions):
    """Return the parameters, FLOPs and bytes of a model or block, as in a row of `ffn params`.

    >>> import ffncli
    >>> ffncli.count("gpt2").ffn_params_total
    56669184

    `source` and the dimensions are the same as in `ffncli.trace`; `dtype` is the format in which bytes are counted
    (default: as released or stored); `tokens` is the number of tokens for the `..._total` FLOPs (default 1). torch is
    imported only if the source is a Python file. Raises FFNError for values that the command line also rejects, and for
    an argument of the wrong type.
    """

    source: ModelSource = field(default=None, kw_only=False)
    dtype: Annotated[str | None, Opt("--dtype", group=COMPUTE, help="Format of the weights.")] = field(
        default=None, kw_only=False
    )
    tokens: shared.Tokens = field(default=None, kw_only=False)


def counted(question: CountQuestion) -> ModelCount:
    """Return the counts of the question's model."""
    return count_model(load(question.source, question.dimensions), question.dtype, question.tokens or 1)


count = call(CountQuestion, counted, "count")


@dataclass(frozen=True, kw_only=True)
class ModelPlanQuestion(PlanQuestion, Dimensions):
    """Estimate time, memory and communication of a model's FFNs on accelerators, and find the cheapest split that fits.

    >>> import ffncli
    >>> best = ffncli.plan("llama-2-70b", device=["h100", "mi300x"], dtype="fp8").cheapest
    >>> [(row.devices, row.device, row.bound) for row in best]
    [(2, 'H100 SXM5', 'memory'), (1, 'MI300X', 'memory')]

    The arguments are the options of `ffn plan`, with the same defaults; options that accept several values accept
    lists. torch is imported only if the source is a Python file. Raises FFNError for values that the command line also
    rejects, and for an argument of the wrong type.
    """

    source: ModelSource = field(default=None, kw_only=False)


def planned_for(question: ModelPlanQuestion) -> ClusterPlan:
    """Return the plan of the question's model."""
    return plan_model(load(question.source, question.dimensions), question)


plan = call(ModelPlanQuestion, planned_for, "plan")

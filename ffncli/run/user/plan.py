"""`ffncli.plan`: what `ffn plan` predicts for one source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ffncli.models.counting.cluster_plan import PlanQuestion, plan_model
from ffncli.models.dimensions import Dimensions
from ffncli.options.opt import call
from ffncli.run.user.load import load
from ffncli.run.user.options import ModelSource

if TYPE_CHECKING:
    from ffncli.models.counting.cluster_plan import ClusterPlan


@dataclass(frozen=True, kw_only=True)
class ModelPlanQuestion(PlanQuestion, Dimensions):
    """Time, memory and communication of a model's FFNs on accelerators, and the cheapest split that fits.

    >>> import ffncli
    >>> best = ffncli.plan("llama-2-70b", device=["h100", "mi300x"], dtype="fp8").cheapest
    >>> [(row.devices, row.device, row.bound) for row in best]
    [(2, 'H100 SXM5', 'memory'), (1, 'MI300X', 'memory')]

    The arguments are the options of `ffn plan`, with its defaults; lists where it takes lists. torch is imported only
    for a source in a Python file. Raises FFNError for whatever the command line refuses, and for an argument of the
    wrong type.
    """

    source: ModelSource = field(default=None, kw_only=False)


def planned_for(question: ModelPlanQuestion) -> ClusterPlan:
    """The plan that a question is about."""
    return plan_model(load(question.source, question.dimensions), question)


plan = call(ModelPlanQuestion, planned_for, "plan")

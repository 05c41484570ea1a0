"""`ffncli.load`: a model that is loaded once and asked often."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Resolved
from ffncli.run.corpus.call import corpus, experts
from ffncli.run.trace.call import survey, trace, unit
from ffncli.run.user import load as user

if TYPE_CHECKING:
    from ffncli.run.corpus.experts import ExpertsSurvey
    from ffncli.run.corpus.results import CorpusSurvey
    from ffncli.run.trace.session import Session
    from ffncli.run.trace.survey import Survey
    from ffncli.run.trace.unit import UnitSurvey
    from ffncli.run.user.options import Source


@dataclass(frozen=True, eq=False)
class KeptModel(Resolved):
    """A model to ask about; each method is the function of ffncli with that name, with this model as its source.

    What runs on a text is loaded with the first question, whole, and kept for the next ones.
    """

    def trace(self, **options: Any) -> Session:
        """Trace one layer, as `ffncli.trace` does."""
        return trace(self, **options)

    def survey(self, **options: Any) -> Survey:
        """Return a row for each layer, as `ffncli.survey` does."""
        return survey(self, **options)

    def corpus(self, prompts: Any, **options: Any) -> CorpusSurvey:
        """Run many texts, as `ffncli.corpus` does."""
        return corpus(self, prompts, **options)

    def unit(self, prompts: Any, **options: Any) -> UnitSurvey:
        """Describe one hidden unit over many texts, as `ffncli.unit` does."""
        return unit(self, prompts, **options)

    def experts(self, prompts: Any, **options: Any) -> ExpertsSurvey:
        """Show how a mixture's experts are used over many texts, as `ffncli.experts` does."""
        return experts(self, prompts, **options)


def load(source: Source | None = None, dimensions: Dimensions | None = None, seed: int = 0) -> Resolved:
    """Return the model for a SOURCE and dimension options. `my.py:Name` is executed, and `seed` seeds its weights.

    >>> import ffncli
    >>> model = ffncli.load("4x8:relu")
    >>> model.trace(tokens=2)["down"].shape
    torch.Size([2, 4])

    The options also change a model that is already loaded, but not a module, which has its own dimensions and weights.
    """
    resolved = user.load(source, dimensions, seed)
    if isinstance(resolved, KeptModel):
        return resolved
    values = {one.name: getattr(resolved, one.name) for one in fields(Resolved)}
    return KeptModel(**{**values, "kept": {}})

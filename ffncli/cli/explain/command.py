"""`ffn explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.explain.page import list_answer, topic_answer
from ffncli.run.topics.call import explain, topics


@spread
def command(
    *,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="ffn, gate, 4x, moe, tensor-parallel, gelu, ... [default: list all]"),
    ] = None,
    show: OutputOptions,
) -> None:
    """Explain gelu, gate, 4x, neuron, moe, ... in a few sentences, with computed numbers.

    Examples:
      ffn explain              # every topic
      ffn explain ffn          # what the block is for
      ffn explain gelu         # an activation function
      ffn explain moe --json   # the same as data
    """
    output = show.output()
    output.show(list_answer(topics()) if topic is None else topic_answer(explain(topic)))

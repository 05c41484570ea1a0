"""`ffn experts`."""

from __future__ import annotations

from typing import Annotated

import typer

from ffncli.cli.common import values
from ffncli.cli.common.corpus_options import ReadingOptions, corpus_size
from ffncli.cli.common.option import COMPUTE, INPUT, OUTPUT, SOURCE, option
from ffncli.cli.common.options import Count, OutputOptions, Text
from ffncli.cli.common.parsers import natural, positive
from ffncli.cli.common.spread import spread
from ffncli.cli.experts.page import experts_answer
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.experts.call import experts_for
from ffncli.run.experts.question import ABLATE_TEXTS, ExpertsQuestion
from ffncli.show.progress import progress

Mixture = Annotated[
    str | None,
    typer.Argument(metavar="SOURCE", help="Directory or GGUF file of a mixture of experts."),
]


@dataclass(frozen=True)
class ExpertsOptions:
    """What is read and measured."""

    prompt: Annotated[
        list[str] | None,
        option(INPUT, "-p", "--prompt", metavar="TEXT", daily=True, help="Read TEXT; repeatable."),
    ] = None
    layer: Annotated[
        Text,
        option(SOURCE, "-l", "--layer", metavar="N", daily=True, help="One layer, counted from 0. [default: all]"),
    ] = None
    ablate_texts: Annotated[
        Count,
        option("What to measure", "--ablate-texts", metavar="N", parser=natural("--ablate-texts", 1_000_000),
               help=f"Texts to read once more without each expert; 0 for none. [default: {ABLATE_TEXTS}]"),
    ] = None  # fmt: skip
    save_routes: Annotated[
        Text,
        option(OUTPUT, "--save-routes", metavar="FILE",
               help="Write the routes of the --layer to FILE.safetensors, for ffn bench --routing."),
    ] = None  # fmt: skip
    dtype: Annotated[
        Text,
        option(COMPUTE, "--dtype", metavar="NAME", daily=True, values=values.dtypes,
               help="Compute in fp32, fp64, bf16 or fp16. [default: fp32]"),
    ] = None  # fmt: skip
    device: Annotated[str, option(COMPUTE, "--device", metavar="NAME", help="Device: cpu, cuda or cuda:1.")] = "cpu"
    threads: Annotated[
        Count, option(COMPUTE, "--threads", metavar="N", parser=positive("--threads", 4096), help="CPU threads.")
    ] = None


@spread
def command(*, source: Mixture = None, experts: ExpertsOptions, reading: ReadingOptions, show: OutputOptions) -> None:
    """Show how a mixture's experts are used over many texts, and what each is worth.

    Examples:
      ffn experts ./my-mixture --prompts texts.txt        # load, pairs, caches
      ffn experts ./my-mixture -p "The cat sat" -l 2      # one layer, one text
      ffn experts ./my-mixture -p "The cat" --ablate-texts 0 --csv
      ffn experts ./my-mixture --prompts texts.txt -l 2 --save-routes r.safetensors
    """
    output = show.output()
    prompts = reading.source_of(experts.prompt, 1)
    if prompts is None:
        raise FFNError("ffn experts needs texts", "give --prompts FILE, or --prompt TEXT")
    options = {name: value for name, value in vars(experts).items() if name != "prompt"}
    question = ExpertsQuestion(
        source, prompts, **options, batch_size=reading.batch_size, max_tokens=reading.max_tokens, force=show.force
    )
    with progress(corpus_size(prompts), "texts", show.quiet, show.color_choice()) as advance:
        survey = experts_for(question, output.note, advance)
    output.show(experts_answer(survey))

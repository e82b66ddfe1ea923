"""Options that several commands share, each declared once, and the values that they are collected in."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An embedded checkpoint (words or code), a folder or a Hub id: ours, SDAR or published SDAR-MRP.",
        show_default=False,
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Folder or Hub id of a trained head to put on the backbone.", show_default=False
    ),
]
FullHead = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder or Hub id of a head that was trained with mrp_residual: false on this backbone, to compare with.",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Revision of MODEL on the Hub.", show_default=False)
]
Device = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Device such as cpu or cuda:1.", show_default="cuda when there is one"),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Dtype to load the model in; auto is the checkpoint's own."),
]
RandomDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Dtype of the weights.", show_default="bfloat16 on a GPU, else float32"),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]
Record = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Also write the figures, with settings, versions and machine, to this JSON file.",
        show_default=False,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Prompt; may be given several times.", show_default=False),
]
PromptFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File with one prompt per line; - reads standard input.", show_default=False),
]
DataConfig = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Configuration of a Hub data set.", show_default=False)
]
Split = Annotated[str, typer.Option(metavar="TEXT", help="Split of the data, or parts such as train[:100].")]
PromptField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Field of the data that holds the prompt.", show_default="prompt or messages"),
]
AnswerField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Field of the data that holds the answer.", show_default="answer"),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Maximum number of new tokens per prompt.")]
BatchSize = Annotated[int, typer.Option(metavar="N", help="Number of prompts that are decoded together.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of sampling (--do-sample true).")]
Repeats = Annotated[int, typer.Option(metavar="N", help="Number of timed rounds; medians are reported.")]


@dataclass
class Checkpoint:
    """Which checkpoint `checkpoints.loading` loads, with which head, onto which device and in which dtype."""

    model: str
    revision: str | None = None
    head: str | None = None
    device: str | None = None
    dtype: str = "auto"
    full_head: str | None = None


def given(context: typer.Context, *names: str) -> list[str]:
    """Those of the parameters called `names` that the command line sets, as opposed to their defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def flag(name: str) -> str:
    """The option that sets a parameter: `--full-head` for full_head."""
    return "--" + name.replace("_", "-")


def check_at_least(least: int, **values: float | None) -> None:
    """Check that numbers are large enough; None is not checked.

    Raises:
        ValueError: naming the first option whose value is below `least`.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")

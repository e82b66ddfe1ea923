"""`--record FILE`: commands that measure also write what they measured to a result file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import typer

from .parsing import Command

WORDS = "mrp.words"  # key of a context's `meta`: the words of its command line
NOT_SETTINGS = (
    "record",
    "as_json",
    "json",
    "markdown",
    "plots",
    "output",
)  # parameters that change only what is shown or kept


@dataclass(frozen=True)
class Measurement:
    """What a measuring command returns.

    Attributes:
        figures: the figures of `evaluation.results.SCHEMAS`, with a list of "rows".
        settings: settings beside the command's own parameters.
        device: the device that was measured.
    """

    figures: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"


class MeasuringCommand(Command):
    """A command whose function has a parameter `record` and returns a `Measurement`, or None if it measured nothing.

    The function leaves `record` to this class, which writes the file once the measurement has returned.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Keep the words of the command line: the result file repeats them."""
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> int:
        """Measure, write the result file if one is asked for, and return the exit status 0.

        Raises:
            ValueError: before measuring, when the result file cannot be written.
        """
        from ..checkpoints.output_paths import check_output

        check_output("--record", ctx.params["record"])
        measurement = super().invoke(ctx)
        if measurement is not None and ctx.params["record"] is not None:
            _write(ctx, measurement)
        return 0


def _write(ctx: typer.Context, measurement: Measurement) -> None:
    from ..evaluation.results import command_line, write_result

    name = ctx.command_path.removeprefix("mrp ")
    parameters = {key: value for key, value in ctx.params.items() if key not in NOT_SETTINGS}
    write_result(
        ctx.params["record"],
        name=name,
        command=command_line(ctx.command_path, ctx.meta[WORDS]),
        settings=parameters | dict(measurement.settings),
        figures=measurement.figures,
        device=measurement.device,
    )

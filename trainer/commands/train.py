"""`mrp train`: train a head as a YAML file and the command line say."""

from typing import Any

import typer
from typer.core import TyperCommand


class TrainCommand(TyperCommand):
    """A command whose options are those of training: it passes its words on, and imports them for --help only."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:
        """List the options of training in groups, this package's own before those of transformers."""
        from ..argument_parsing import describe_options

        for heading, rows in describe_options().items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def train(context: typer.Context) -> int:
    """Train a head on a frozen backbone.

    Options come from CONFIG.yaml, a flat file of `key: value` lines, and are overridden by --key value, in kebab-case
    or snake_case. base_model and train_data are required. On several devices run
    `torchrun --nproc-per-node N -m mrp_trainer.train CONFIG.yaml`.
    """
    from ..train import main

    return main(context.args)

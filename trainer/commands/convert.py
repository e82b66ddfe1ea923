"""`mrp convert`: make a self-contained folder of a checkpoint."""

import json
from typing import Annotated, Literal

import typer

from .options import AsJson, Head, Revision


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Embedded checkpoint, folder or Hub id.", show_default=False)
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.", show_default=False)],
    num_mrp_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of layers of a fresh head; 0 for no head.",
            show_default="the source's own head, or 3",
        ),
    ] = None,
    head: Head = None,
    head_init: Annotated[
        Literal["fresh", "backbone_layers"], typer.Option(help="How the layers of a fresh head are initialised.")
    ] = "fresh",
    full_head: Annotated[
        bool,
        typer.Option(
            "--full-head",
            help="The source's head predicts the full next distribution instead of a residual. Needed for published "
            "heads of this kind, whose config does not say so.",
        ),
    ] = False,
    block_size: Annotated[
        int | None, typer.Option(metavar="N", help="Override the source's block size.", show_default=False)
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(metavar="ID", help="Override the source's mask token.", show_default=False)
    ] = None,
    revision: Revision = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the largest weight file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST when it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a self-contained folder of a checkpoint.

    The folder holds weights, code, tokenizer, generation defaults and a card, and loads with trust_remote_code=True
    where this package is not installed. SRC is an SDAR checkpoint, a published SDAR-MRP one or one of ours; code that
    it holds is never run.
    """
    from ..checkpoints.convert import convert as convert_checkpoint

    report = vars(
        convert_checkpoint(
            source,
            destination,
            num_mrp_layers=num_mrp_layers,
            head=head,
            head_init=head_init,
            mrp_residual=False if full_head else None,
            block_size=block_size,
            mask_token_id=mask_token_id,
            revision=revision,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )
    )
    print(json.dumps(report) if as_json else "\n".join(f"{name:15} {value}" for name, value in report.items()))

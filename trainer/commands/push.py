"""`mrp push`: upload a folder to the Hub."""

import json
from typing import Annotated

import typer

from .options import AsJson, Model


def push(
    model: Model,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="owner/name; created when it is missing.", show_default=False)
    ],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Branch to upload to.", show_default="main")
    ] = None,
    message: Annotated[str, typer.Option(metavar="TEXT", help="Commit message.")] = "Upload the checkpoint",
    as_json: AsJson = False,
) -> None:
    """Upload a folder to the Hub in one commit.

    MODEL is a folder that `mrp convert`, `save_pretrained` or `mrp train` has written. When the upload fails, the
    repository stays as it was.
    """
    from ..checkpoints.push import push as push_folder
    from ..checkpoints.weight_files import local_source

    url = push_folder(local_source(model), repo_id, private=private, revision=revision, message=message)
    print(json.dumps({"commit_url": url}) if as_json else url)

"""`mrp push`: upload a folder to the Hub."""

import json
from dataclasses import asdict
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

    MODEL is a folder that `mrp convert`, `save_pretrained` or `mrp train` has written. Only the files that others need
    are sent: weights, configs, code, tokenizer, the card and the images it shows. Nested folders, such as checkpoints
    of a training run, are not. When the upload fails, the repository stays as it was.
    """
    from ..checkpoints.push import check_repo_id, check_token, selected_files
    from ..checkpoints.push import push as push_folder
    from ..checkpoints.weight_files import local_source

    check_repo_id(repo_id)
    folder = local_source(model)
    selection = selected_files(folder)
    check_token()
    if not as_json:
        print(f"sending {', '.join(selection.files)}")
        if selection.left_out:
            print(f"not sending {', '.join(selection.left_out)}", flush=True)
    url = push_folder(folder, repo_id, private=private, revision=revision, message=message)
    print(json.dumps({"commit_url": url, **asdict(selection)}) if as_json else url)

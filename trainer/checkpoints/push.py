"""Uploads a folder to the Hub in one commit, after checking that others can load it."""

import json
import re
from pathlib import Path

from huggingface_hub import HfApi

from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS
from .weight_files import tensor_index, weight_files


def check_uploadable(folder: str | Path) -> None:
    """Check that a folder holds a complete checkpoint or head of this package.

    Raises:
        ValueError: if weights or code are missing or damaged, or the folder holds neither.
    """
    folder = Path(folder)
    if (folder / HEAD_CONFIG).exists():
        weights = [folder / name for name in (HEAD_WEIGHTS, ADAPTER_WEIGHTS) if (folder / name).exists()]
        if not weights:
            raise ValueError(f"{folder} is incomplete: missing {HEAD_WEIGHTS}")
        tensor_index(weights[0])
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds neither config.json nor {HEAD_CONFIG}: run `mrp convert` first")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "sdar_mrp":
        raise ValueError(f"{folder} has model_type {config.get('model_type')!r}: run `mrp convert` on it first")
    missing = sorted(name for name in _code_files(folder, config) if not (folder / name).exists())
    if missing:
        raise ValueError(f"{folder} is incomplete: missing {', '.join(missing)}")
    for path in weight_files(folder):
        tensor_index(path)


def _code_files(folder: Path, config: dict) -> set[str]:
    """Return the code files that `auto_map` names and all files that they import from the same folder."""
    if not config.get("auto_map"):
        raise ValueError(f"{folder}/config.json has no auto_map: run `mrp convert` on it first")
    files, unread = set(), {f"{target.split('.')[0]}.py" for target in config["auto_map"].values()}
    while unread:
        name = unread.pop()
        files.add(name)
        if (folder / name).exists():
            imported = re.findall(r"^from \.(\w+) import", (folder / name).read_text(encoding="utf-8"), re.MULTILINE)
            unread |= {f"{module}.py" for module in imported} - files
    return files


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload the checkpoint",
) -> str:
    """Upload a folder in one commit.

    The commit also deletes weights and code of the repository that the folder does not have. If the upload fails, the
    repository stays as it was.

    Args:
        folder: a folder written by `convert`, `save_pretrained` or `save_head`.
        repo_id: "owner/name" of the repository, created if missing.
        private: whether a repository that is created is private.
        revision: branch to commit to; None means the main branch.
        token: access token; None uses the one that is stored on this machine.
        message: commit message.

    Returns:
        The commit's URL.

    Raises:
        ValueError: if the folder is incomplete.
        OSError: if the Hub refuses the upload.
    """
    check_uploadable(folder)
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=str(folder),
        revision=revision,
        commit_message=message,
        delete_patterns=["*.safetensors", "*.safetensors.index.json", "*.py"],
        ignore_patterns=["**/__pycache__/**", "optimizer.pt", "scheduler.pt", "rng_state*", "*.tmp"],
    )
    return commit.commit_url

"""Upload of a folder to the Hub in one commit, after a check that others can load it."""

import json
import re
from pathlib import Path

from huggingface_hub import HfApi

from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS
from .weight_files import tensor_index, weight_files


def check_folder(folder) -> None:
    """Refuse a folder that others could not load: incomplete weights or code, or no checkpoint of ours at all.

    Raises:
        ValueError: naming what is wrong.
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
    """The code that `auto_map` names and all that it imports from beside it."""
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
    folder,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload the checkpoint",
) -> str:
    """Upload a folder in one commit and return the commit's URL.

    The commit replaces weights and code that the folder no longer has. When anything fails on the way the repository
    stays as it was.

    Args:
        folder: written by `convert`, `save_pretrained` or `save_head`.
        repo_id: "owner/name", made when missing.
        private: for a repository that is made.
        revision: branch, default the main one.

    Raises:
        ValueError: when the folder is incomplete.
        OSError: when the Hub refuses.
    """
    check_folder(folder)
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

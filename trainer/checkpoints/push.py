"""Uploads a folder to the Hub in one commit: known files only, after checking that others can load them."""

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from modeling_mrp.checkpoint_files import (
    CONFIG,
    GENERATION_CONFIG,
    HUB_ERRORS,
    INDEX,
    WEIGHTS,
    hub_reason,
    read_config,
    read_json,
    tensor_index,
    weight_files,
)

from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS
from .tokenizer_files import TOKENIZER_FILES

CARD = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
# files of the repository that a commit deletes if it does not replace them
REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.py")
IMAGES = re.compile(r"""!\[[^\]]*\]\(\s*<?([^)\s>]+)|<img\b[^>]*\bsrc=["']([^"']+)""")


@dataclass(frozen=True)
class Selection:
    """Which files of a folder are uploaded.

    Attributes:
        files: names of the files that are sent: weights, configs, code, tokenizer, card, and the images it shows.
        left_out: names of everything else in the folder, with a slash after those of folders.
    """

    files: list[str]
    left_out: list[str]


def selected_files(folder: str | Path) -> Selection:
    """Check that a folder holds a complete checkpoint or head of this package, and select its files.

    Raises:
        ValueError: if there is no such folder, weights or code are missing or damaged, or it holds neither.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist")
    needed = _head_files(folder) if (folder / HEAD_CONFIG).exists() else _checkpoint_files(folder)
    optional = {GENERATION_CONFIG, CARD, "LICENSE", *TOKENIZER_FILES, *_images(folder / CARD)}
    files = sorted(needed | {name for name in optional if (folder / name).is_file()})
    others = (path for path in folder.iterdir() if path.name not in files)
    return Selection(files, sorted(f"{path.name}/" if path.is_dir() else path.name for path in others))


def _head_files(folder: Path) -> set[str]:
    """Return the names of a head's files, after checking that they can be read."""
    read_json(folder / HEAD_CONFIG)
    if (folder / HEAD_WEIGHTS).exists():
        files = {HEAD_CONFIG, HEAD_WEIGHTS}
    elif (folder / ADAPTER_WEIGHTS).exists():
        files = {HEAD_CONFIG, ADAPTER_WEIGHTS, ADAPTER_CONFIG}
    else:
        raise ValueError(f"{folder} is incomplete: missing {HEAD_WEIGHTS}")
    _check_present(folder, files)
    for name in files & {HEAD_WEIGHTS, ADAPTER_WEIGHTS}:
        tensor_index(folder / name)
    return files


def _checkpoint_files(folder: Path) -> set[str]:
    """Return the names of a checkpoint's config, code and weights, after checking that they are complete."""
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds neither {CONFIG} nor {HEAD_CONFIG}: run `mrp convert` first")
    config = read_config(folder)
    if config.get("model_type") != "sdar_mrp":
        raise ValueError(f"{folder} has model_type {config.get('model_type')!r}: run `mrp convert` on it first")
    code = _code_files(folder, config)
    _check_present(folder, code)
    weights = weight_files(folder)
    for path in weights:
        tensor_index(path)
    index = set() if (folder / WEIGHTS).exists() else {INDEX}
    return {CONFIG, *code, *index, *(path.name for path in weights)}


def _check_present(folder: Path, names: set[str]):
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ValueError(f"{folder} is incomplete: missing {', '.join(missing)}")


def _code_files(folder: Path, config: dict) -> set[str]:
    """Return the code files that `auto_map` names and all files that they import from the same folder."""
    targets = config.get("auto_map")
    if not targets:
        raise ValueError(f"{folder}/config.json has no auto_map: run `mrp convert` on it first")
    if not isinstance(targets, dict) or not all(isinstance(target, str) for target in targets.values()):
        raise ValueError(
            f"{folder}/config.json: auto_map must map names to classes in files, got {targets!r:.60}: run `mrp "
            "convert` on it again"
        )
    files, unread = set(), {f"{target.split('.')[0]}.py" for target in targets.values()}
    while unread:
        name = unread.pop()
        files.add(name)
        if (folder / name).exists():
            imported = re.findall(r"^from \.(\w+) import", (folder / name).read_text(encoding="utf-8"), re.MULTILINE)
            unread |= {f"{module}.py" for module in imported} - files
    return files


def _images(card: Path) -> set[str]:
    """Return the names of the images beside a card that it shows."""
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    names = {unquote(markdown or html).removeprefix("./") for markdown, html in IMAGES.findall(text)}
    return {name for name in names if Path(name).name == name}


def check_repo_id(repo_id: str) -> None:
    """Check that the id of a repository can be one, without asking the Hub.

    Raises:
        ValueError: unless it has the form owner/name.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"REPO_ID must be owner/name, got {repo_id!r}: {error}") from error
    if repo_id.count("/") != 1:
        raise ValueError(f"REPO_ID must be owner/name, got {repo_id!r}")


def check_token(token: str | None = None) -> None:
    """Check that there is an access token.

    Raises:
        ValueError: when none is given, stored on this machine or set in the environment.
    """
    if token is None and get_token() is None:
        raise ValueError("uploading needs a token: log in with `hf auth login`, or set HF_TOKEN to one that may write")


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload the checkpoint",
    replace: bool = True,
) -> str:
    """Upload a checkpoint or a head in one commit.

    The commit holds the files of `selected_files`. If the upload fails, the repository stays as it was.

    Args:
        folder: a folder written by `convert`, `save_pretrained` or `save_head`.
        repo_id: "owner/name" of the repository, created if missing.
        private: whether a repository that is created is private.
        revision: branch to commit to; None means the main branch.
        token: access token; None uses the one that is stored on this machine.
        message: commit message.
        replace: also delete weights and code at the top of the repository that are not among the files.

    Returns:
        The commit's URL.

    Raises:
        ValueError: if the folder is incomplete, `repo_id` cannot be one, or there is no token.
        OSError: if the Hub cannot be reached or refuses the upload.
    """
    check_repo_id(repo_id)
    files = selected_files(folder).files
    check_token(token)
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        there = api.list_repo_files(repo_id, revision=revision) if replace else []
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, Path(folder) / name) for name in files),
                *(CommitOperationDelete(name) for name in there if name not in files and _is_replaced(name)),
            ],
            commit_message=message,
            revision=revision,
        )
    except HUB_ERRORS as error:
        raise OSError(f"pushing to {repo_id} failed: {hub_reason(error)}") from error
    return commit.commit_url


def _is_replaced(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in REPLACED)

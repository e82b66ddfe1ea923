"""The files of a checkpoint: finding them in a folder or on the Hub, and reading its JSON files and tensor headers."""

import json
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
HEAD_CONFIG = "mrp_head_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL_FILES = (CONFIG, GENERATION_CONFIG, INDEX, "*.safetensors")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a call of the Hub may raise. Errors of the HTTP client are no OSErrors when the client is httpx.
HUB_ERRORS = (OSError, HfHubHTTPError.__bases__[0])


def checkpoint_folder(
    source: str | PathLike, files: Sequence[str] = MODEL_FILES, subfolder: str = "", **hub: Any
) -> tuple[Path, str | None]:
    """Find the folder of a checkpoint, downloading it from the Hub where the source is not local.

    Only what can be a Hub id is looked up, and only once: a misspelt path fails at once.

    Args:
        source: a folder or a Hub id.
        files: patterns of the files to download; files in nested folders are never downloaded.
        subfolder: folder inside the source that holds the checkpoint.
        hub: arguments of `snapshot_download` (revision, token, cache_dir, ...); a folder has no revision other than
            "main", the Hub's default, and the others have no effect on it.

    Returns:
        The folder, and the commit that it was downloaded from (None for a local one).

    Raises:
        ValueError: when a revision of a folder is asked for.
        OSError: when the source is neither a folder nor can be downloaded.
    """
    if Path(source).is_dir():
        if hub.get("revision") not in (None, "main"):
            raise ValueError(f"revision {hub['revision']} is for Hub ids, but {source} is a local folder: omit it")
        return Path(source) / subfolder, None
    if Path(source).exists():
        raise OSError(f"{source} is a file: expected the folder of a checkpoint")
    if not HUB_ID.fullmatch(str(source)):
        raise OSError(f"folder {source} does not exist")
    within = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        folder = snapshot_download(
            str(source), allow_patterns=[within + name for name in files], ignore_patterns=[f"{within}*/*"], **hub
        )
    except (*HUB_ERRORS, ValueError) as error:
        raise OSError(
            f"{source} is not a local folder, and downloading it from the Hub failed: {hub_reason(error)}"
        ) from error
    return Path(folder) / subfolder, Path(folder).name


def hub_reason(error: BaseException) -> str:
    """Say in one line why a call of the Hub failed, and what to do about it.

    Args:
        error: what the call raised.
    """
    cause = error.__cause__ or error  # snapshot_download reports that nothing is cached, because of another error
    if isinstance(cause, OfflineModeIsEnabled):
        return "the Hub is switched off by HF_HUB_OFFLINE=1: unset it"
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"access is refused (status {status}): log in with `hf auth login`, or set HF_TOKEN to a token that has "
            "the right to do this"
        )
    if status == 404:
        return (
            "there is no such repository or revision, or it is private: check the name, or log in with `hf auth login`"
        )
    first_line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    if status is None and not isinstance(cause, OSError | ValueError) or isinstance(cause, ConnectionError):
        return f"no connection to {constants.ENDPOINT} ({first_line}): check the network"
    return first_line


def read_json(path: str | PathLike) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: naming the file, when it is damaged or holds anything else.
        OSError: when it cannot be read.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding or of JSON
        raise ValueError(f"{path} is not valid JSON ({error}): it is damaged; copy or download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {json.dumps(values)[:40]}")
    return values


def read_config(folder: str | PathLike) -> dict[str, Any]:
    """Read the `config.json` of a checkpoint's folder.

    Raises:
        ValueError: when it is missing or damaged.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        if (Path(folder) / HEAD_CONFIG).is_file():
            raise ValueError(
                f"{folder} holds a head, not a model: name the backbone's checkpoint, and this as its head"
            )
        raise ValueError(f"{folder} is not the folder of a checkpoint: {CONFIG} is missing")
    return read_json(path)


def weight_files(folder: str | PathLike) -> list[Path]:
    """Return the safetensors files of a checkpoint: `model.safetensors`, or the shards that its index lists.

    Raises:
        ValueError: naming the files that are missing, or what the index holds that is not a file of this folder.
        OSError: when there is neither.
    """
    folder = Path(folder)
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():  # transformers, too, reads it rather than an index beside it
        return [folder / WEIGHTS]
    if not index.is_file():
        raise OSError(f"{folder} holds no weights: {WEIGHTS} is missing (only safetensors are read)")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map from tensors to files: copy or download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ValueError(f"{index} places {tensor} in {name!r}: expected a .safetensors file of the same folder")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is incomplete: missing {', '.join(missing)}")
    return [folder / name for name in names]


def tensor_index(path: str | PathLike) -> list[tuple[str, str, list[int]]]:
    """Return (name, dtype, shape) of every tensor in a safetensors file, reading its header only.

    Raises:
        ValueError: if the file is damaged or cut short.
    """
    try:
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in sorted(tensors.keys())}
            return [(name, part.get_dtype(), part.get_shape()) for name, part in slices.items()]
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): it is damaged or cut short") from error


def tensor_names(folder: str | PathLike) -> list[str]:
    """Return the names of all tensors of a checkpoint, sharded or not; only headers are read.

    Raises:
        ValueError: when a file is damaged or missing.
        OSError: when the checkpoint has no safetensors.
    """
    return [name for path in weight_files(folder) for name, _, _ in tensor_index(path)]

"""Weight files and where they come from: folders and Hub ids, safetensors headers, the backbone's identity."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

import hub_cards

from .lora import merged_tensors

logger = logging.get_logger(__name__)

EMBEDDED = Path(hub_cards.__file__).parent
# The embedded checkpoints by the names of their tasks. Read from here so that a name is resolved without the tasks.
EMBEDDED_NAMES = {"words": "sdar-tiny-mrp", "code": "sdar-tiny-code-mrp"}
READ_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md"]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLES = 64  # values of each tensor that enter the hash of a backbone


def local_source(source: str) -> str:
    """The folder of an embedded checkpoint, by the name of the folder or of its task; any other name as it is.

    Args:
        source: where a checkpoint comes from: a folder, an embedded checkpoint's name or a Hub id.
    """
    if Path(source).is_dir():
        return str(source)
    folder = EMBEDDED / EMBEDDED_NAMES.get(str(source), source)
    return str(folder if (folder / "config.json").is_file() else source)


def fetch(source: str | Path, revision: str | None = None) -> tuple[Path, str | None]:
    """Find a checkpoint, downloading it from the Hub where it is not local.

    Args:
        source: a folder, an embedded checkpoint's name or a Hub id.
        revision: revision to download from the Hub.

    Returns:
        The local folder, and the commit it was downloaded from (None for a local one).

    Raises:
        OSError: when the source is not local and cannot be downloaded.
    """
    folder = Path(local_source(source))
    if folder.is_dir():
        return folder, None
    try:
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=READ_PATTERNS))
    except (OSError, ValueError) as error:  # a network error, an answer of the Hub, or a name that is no Hub id
        reason = str(error).strip().splitlines()[0]
        embedded = ", ".join(f"{name} ({folder})" for name, folder in EMBEDDED_NAMES.items())
        raise OSError(
            f"{source} is not a local folder, and downloading it from the Hub failed: {reason} "
            f"(embedded checkpoints: {embedded})"
        ) from error
    return folder, folder.name


def weight_files(folder) -> list[Path]:
    """The safetensors files of a checkpoint: the shards of its index, or `model.safetensors`.

    Raises:
        ValueError: naming the files that are not there.
    """
    index = Path(folder) / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in names if not (Path(folder) / name).exists())
    if missing:
        raise ValueError(f"{folder} is incomplete: missing {', '.join(missing)}")
    return [Path(folder) / name for name in sorted(names)]


def weights_dtype(folder) -> torch.dtype:
    """The floating dtype that most values of a folder's safetensors have.

    Raises:
        ValueError: when there are no readable floating-point safetensors.
    """
    values: Counter = Counter()
    for path in weight_files(folder):
        for _, dtype, shape in tensor_index(path):
            values[dtype] += torch.Size(shape).numel()
    unknown = sorted(values.keys() - DTYPES.keys())
    if unknown:
        raise ValueError(f"{folder} has tensors of dtype {', '.join(unknown)}, expected one of {', '.join(DTYPES)}")
    dtype = max(values, key=lambda key: values[key])
    if len(values) > 1:
        logger.warning("tensors of several dtypes (%s): all are written as %s", ", ".join(sorted(values)), dtype)
    return DTYPES[dtype]


def tensor_index(path) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of every tensor of a safetensors file; reads the header only.

    Raises:
        ValueError: when the file is damaged or cut short.
    """
    try:
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in sorted(tensors.keys())}
            return [(name, part.get_dtype(), part.get_shape()) for name, part in slices.items()]
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): it is damaged or cut short") from error


def base_of(model, source=None, commit: str | None = None) -> tuple[str, str | None]:
    """Id and revision of the backbone that a model was made from, as far as they are known.

    A converted checkpoint remembers where it came from. A folder counts by its name: where it lies is nobody else's
    business.
    """
    values = model.config.to_dict()
    if values.get("base_model"):
        return values["base_model"], values.get("base_revision")
    source = str(source if source is not None else model.config.name_or_path)
    return (Path(source).resolve().name, None) if Path(source).is_dir() else (source, commit)


@torch.no_grad()
def backbone_hash(model) -> str:
    """Hash of the backbone's weight index: name and shape of every tensor with a sample of its values.

    The values are taken as bfloat16, so that the hash does not depend on the dtype a backbone was loaded in. A live
    LoRA adapter counts as if it were merged.
    """
    digest = hashlib.sha256()
    for name, tensor in merged_tensors(model):
        if name.startswith("mrp_head.") or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()

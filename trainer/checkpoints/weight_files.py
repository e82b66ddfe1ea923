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
READ_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md"]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLES = 64  # values of each tensor that enter the hash of a backbone


def fetch(source, revision: str | None = None) -> tuple[Path, str | None]:
    """The local folder of a folder, an embedded checkpoint's name or a Hub id, and the commit it is at (None: none).

    Raises:
        OSError: when it is neither.
    """
    if Path(source).is_dir():
        return Path(source), None
    if (EMBEDDED / source / "config.json").is_file():
        return EMBEDDED / source, None
    try:
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=READ_PATTERNS))
    except (OSError, ValueError) as error:  # of the network, of the Hub, of the form of the id
        reason = str(error).strip().splitlines()[0]
        embedded = " or ".join(sorted(path.parent.name for path in EMBEDDED.glob("*/config.json")))
        raise OSError(
            f"{source} is no folder here and cannot be fetched from the Hub: {reason} (embedded: {embedded})"
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

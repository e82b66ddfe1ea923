"""Weight files: fetching them, their dtype, and hashing a backbone's weights."""

import hashlib
from collections import Counter
from pathlib import Path

import torch
from transformers.utils import logging

import hub_cards
from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.checkpoint_files import checkpoint_folder, tensor_index, weight_files

from .lora import merged_tensors

logger = logging.get_logger(__name__)

EMBEDDED = Path(hub_cards.__file__).parent
# The embedded checkpoints by the names of their tasks. Read from here so that a name is resolved without the tasks.
EMBEDDED_NAMES = {"words": "sdar-tiny-mrp", "code": "sdar-tiny-code-mrp"}
READ_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md"]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLES = 64  # number of values of each tensor that enter the hash of a backbone


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
        ValueError: when a revision of a local folder is asked for.
        OSError: when the source is not local and cannot be downloaded.
    """
    if revision is not None and Path(local_source(source)).is_dir():  # "main" too, and with the name as it was given
        raise ValueError(f"revision {revision} is for Hub ids, but {source} is a local folder: omit it")
    try:
        return checkpoint_folder(local_source(source), READ_PATTERNS, revision=revision)
    except OSError as error:
        embedded = ", ".join(f"{name} ({folder})" for name, folder in EMBEDDED_NAMES.items())
        raise OSError(f"{error} (embedded checkpoints: {embedded})") from error


def weights_dtype(folder: str | Path) -> torch.dtype:
    """Return the dtype of most values in a checkpoint's safetensors files.

    Raises:
        ValueError: if a file is missing, cannot be read, or has a tensor that is not floating-point.
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
        found = ", ".join(sorted(values))
        logger.warning("the checkpoint has tensors of several dtypes (%s); all are written as %s", found, dtype)
    return DTYPES[dtype]


def base_of(
    model: MRPForDiffusionLM, source: str | Path | None = None, commit: str | None = None
) -> tuple[str, str | None]:
    """Return id and revision of the backbone's checkpoint, as far as they are known.

    A converted checkpoint has them in its config. For a local folder only its name is returned, since the path would
    be published with the head.

    Args:
        model: the model.
        source: what it was loaded from; None means `name_or_path` of its config.
        commit: revision of a source on the Hub.
    """
    recorded = getattr(model.config, "base_model", None)
    if recorded:
        return recorded, getattr(model.config, "base_revision", None)
    source = str(source if source is not None else model.config.name_or_path)
    return (Path(source).resolve().name, None) if Path(source).is_dir() else (source, commit)


@torch.no_grad()
def backbone_hash(model: MRPForDiffusionLM) -> str:
    """Return a hash of the backbone: name and shape of every tensor, and a sample of its values.

    Values are rounded to bfloat16 first, so that the hash does not depend on the dtype in which the backbone was
    loaded. A live LoRA adapter is hashed as if it were merged.
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

"""Reading a checkpoint that was not written by this package: its config and its tensor names, never its code."""

import json
import warnings
from dataclasses import dataclass

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from .configuration_mrp import AUTO_MAP, MRPConfig

HEAD_PREFIX = "mrp_head."
# names of the head in published checkpoints, newest first
PUBLISHED_HEAD_PREFIXES = ("mrp_modules.0.model.", "mtp_modules.0.model.")
ARCHITECTURES = ("sdar", "sdar_mrp", "qwen3")
HUB_ARGUMENTS = ("revision", "cache_dir", "token", "force_download", "local_files_only", "subfolder", "proxies")
# keys of a published config.json that our config names otherwise, or that belong to the code it came with
DROPPED = (
    "architectures",
    "model_type",
    "auto_map",
    "num_nextn_predict_layers",
    "num_mrp_heads",
    "fuse_cross_entropy",
    "use_cache",
)
OF_A_HEAD = ("calibrated_remask_threshold", "trained_acceptance")  # measured on it: they go when it goes


@dataclass
class Checkpoint:
    """What is to be loaded: our config for it, how its tensors are renamed (regex), whether it holds a head."""

    config: MRPConfig
    renames: dict[str, str]
    has_head: bool


def read_checkpoint(
    source, num_mrp_layers=None, block_size=None, mask_token_id=None, arguments=(), mrp_residual=None
) -> Checkpoint:
    """Read the config and the tensor names of an SDAR, a published SDAR-MRP or our own checkpoint.

    Args:
        source: a folder or a Hub id.
        num_mrp_layers, block_size, mask_token_id: override what the checkpoint says.
        arguments: mapping from which the arguments for the Hub are taken (revision, token, ...).
        mrp_residual: of a fresh head, or of one whose checkpoint does not say (see `MRPConfig`).

    Raises:
        ValueError: for another architecture, or for options that contradict the checkpoint.
        OSError: when `config.json` or the safetensors are not there.
    """
    hub = {name: arguments[name] for name in HUB_ARGUMENTS if name in arguments}
    path = cached_file(source, "config.json", **hub)
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    if values.get("model_type") not in ARCHITECTURES:
        raise ValueError(
            f"{source} has model_type {values.get('model_type')!r}, expected one of {', '.join(ARCHITECTURES)}: "
            "only SDAR checkpoints (Qwen3 architecture) can be wrapped"
        )
    prefix = _head_prefix(tensor_names(source, hub))
    has_head = prefix is not None and num_mrp_layers != 0
    _override(values, "block_size", block_size)
    _override(values, "mask_token_id", mask_token_id)
    values["mrp_residual"] = _residual(source, values.get("mrp_residual") if has_head else None, mrp_residual)
    config = _config(source, values, num_mrp_layers, has_head)
    config._commit_hash = extract_commit_hash(path, None)  # the weights are then of the same commit
    renames = {}
    if prefix is not None and prefix != HEAD_PREFIX:
        renames["^" + prefix.replace(".", r"\.")] = HEAD_PREFIX
    return Checkpoint(config, renames, has_head)


def tensor_names(source, hub=None) -> list[str]:
    """Names of all tensors of a safetensors checkpoint, sharded or not; reads headers only.

    Raises:
        ValueError: when the file is damaged.
        OSError: when there is none.
    """
    hub = hub or {}
    index = cached_file(source, "model.safetensors.index.json", **hub, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            return list(json.load(file)["weight_map"])
    path = cached_file(source, "model.safetensors", **hub)
    try:
        with safe_open(path, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): it is damaged or cut short") from error


def _head_prefix(names: list[str]) -> str | None:
    for prefix in (HEAD_PREFIX, *PUBLISHED_HEAD_PREFIXES):
        if any(name.startswith(prefix) for name in names):
            return prefix
    return None


def _config(source, values: dict, num_mrp_layers: int | None, has_head: bool) -> MRPConfig:
    """Our config from the `config.json` of the source."""
    layers = values.pop("num_mrp_layers", values.get("num_nextn_predict_layers"))
    if has_head and num_mrp_layers is not None and num_mrp_layers != layers:
        raise ValueError(
            f"num_mrp_layers={num_mrp_layers} contradicts {source}, whose head has {layers} layers: "
            "leave it out to keep that head, or pass 0 to drop it"
        )
    fresh = 3 if num_mrp_layers is None else num_mrp_layers
    kept = {key: value for key, value in values.items() if key not in (DROPPED if has_head else DROPPED + OF_A_HEAD)}
    config = MRPConfig(**kept, num_mrp_layers=layers if has_head else fresh, auto_map=dict(AUTO_MAP))
    config.architectures = ["MRPForDiffusionLM"]
    return config


def _residual(source, stated: bool | None, wanted: bool | None) -> bool:
    """`mrp_residual` of the head that is loaded (`stated` by its own checkpoint) or made."""
    if None not in (stated, wanted) and stated != wanted:
        raise ValueError(
            f"mrp_residual={wanted} contradicts {source}, whose head was trained with {stated}: "
            "leave it out to keep that head, or drop it first (`mrp convert --num-mrp-layers 0`)"
        )
    return next((value for value in (stated, wanted) if value is not None), True)


def _override(values: dict, name: str, value: int | None):
    """Set an option in the config's values; one other than the checkpoint's own is allowed, but not in silence."""
    current = values.get(name)
    if value is None or value == current:
        return
    if current is not None:
        warnings.warn(f"{name}={value} overrides {current}, which the checkpoint was trained with", stacklevel=4)
    values[name] = value

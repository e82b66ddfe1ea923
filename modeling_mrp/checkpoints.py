"""Loading checkpoints, also those of other projects: their config and their tensors, never the code they hold."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig

from .checkpoint_files import (
    CONFIG,
    GENERATION_CONFIG,
    checkpoint_folder,
    read_config,
    read_json,
    tensor_names,
    weight_files,
)
from .configuration_mrp import AUTO_MAP, MRPConfig, check_block_size

HEAD_PREFIX = "mrp_head."
# prefixes of the head's tensors in published checkpoints, newest first
PUBLISHED_HEAD_PREFIXES = ("mrp_modules.0.model.", "mtp_modules.0.model.")
ARCHITECTURES = ("sdar", "sdar_mrp", "qwen3")
HUB_ARGUMENTS = ("revision", "cache_dir", "token", "force_download", "local_files_only", "subfolder")
# keys of a published config.json that have another name in our config or that belong to the code it came with
DROPPED = (
    "architectures",
    "model_type",
    "auto_map",
    "num_nextn_predict_layers",
    "num_mrp_heads",
    "fuse_cross_entropy",
    "use_cache",
)
# values that were measured with a head: they are dropped together with it
MEASURED_WITH_HEAD = ("calibrated_remask_threshold", "trained_acceptance")


@dataclass
class Checkpoint:
    """How to load a checkpoint.

    Attributes:
        config: our config for it.
        renames: how to rename its tensors, regular expression to replacement.
        has_head: whether it holds a head that is to be loaded.
    """

    config: MRPConfig
    renames: dict[str, str]
    has_head: bool


class CheckpointMixin:
    """Loads `MRPForDiffusionLM`: `from_pretrained` takes our own checkpoints, `from_backbone` takes others too."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, *model_args: Any, **kwargs: Any
    ) -> "CheckpointMixin | tuple[CheckpointMixin, dict]":
        """Load a checkpoint as in transformers, but raise unless it holds exactly the tensors of its config.

        A head is never initialised at random because the checkpoint lacks it.

        Args:
            pretrained_model_name_or_path: a folder or a Hub id.
            model_args: further positional arguments of transformers' `from_pretrained`.
            kwargs: keyword arguments of transformers' `from_pretrained`; and `optional_tensors`, a prefix of tensor
                names that the checkpoint may lack or hold in excess (None: no tensor may).

        Raises:
            ValueError: for tensors that are missing, left over, of a wrong shape or unreadable; the message names
                them.
        """
        with_info = kwargs.pop("output_loading_info", False)
        optional = kwargs.pop("optional_tensors", None)
        source, commit = pretrained_model_name_or_path, None
        folder = source
        if source is not None:
            folder, commit = _folder_to_load(source, kwargs)
        try:
            with _without_load_report():
                model, info = super().from_pretrained(
                    folder,
                    *model_args,
                    # tensors of a wrong shape are not ignored: check_tensors names them all
                    **kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True},
                )
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {source} cannot be read ({error}): "
                "a file is damaged or cut short; copy or download it again"
            ) from error
        check_tensors(source, info, optional)
        if commit is not None:  # remember the Hub id and the commit, not the folder in the cache
            model.name_or_path = model.config._name_or_path = str(source)
            model.config._commit_hash = commit
        if source is not None and model.mrp_head is not None and not (Path(folder) / GENERATION_CONFIG).is_file():
            _decode_with_head(model.generation_config)
        model.generation_config._from_model_config = False  # otherwise the next reload would lose its options
        model.freeze_backbone()
        return (model, info) if with_info else model

    @classmethod
    def from_backbone(
        cls,
        source: str | PathLike,
        num_mrp_layers: int | None = None,
        head_init: str = "fresh",
        block_size: int | None = None,
        mask_token_id: int | None = None,
        mrp_residual: bool | None = None,
        default_mrp_layers: int = 3,
        **kwargs: Any,
    ) -> "CheckpointMixin":
        """Load an SDAR checkpoint with a fresh head, or a published SDAR-MRP checkpoint or our own with its head.

        Only `config.json` and the safetensors are read; code that the source holds is never run.

        Args:
            source: a folder or a Hub id.
            num_mrp_layers: number of layers of the head; 0 drops a head that the source holds, and any other value
                must agree with it.
            head_init: "fresh" (random layers) or "backbone_layers" (copies of the backbone's last layers). In both
                cases the output of a new residual head is zero.
            block_size: replaces the source's block size, with a warning.
            mask_token_id: replaces the source's mask token id, with a warning.
            mrp_residual: False for a head that predicts the full next distribution (see `MRPConfig`). The default is
                what the source's config says, or True. The config of a published head does not say: pass False for
                one that was trained without residual.
            default_mrp_layers: number of layers of a fresh head when `num_mrp_layers` is None; 0 leaves a source
                without a head as it is.
            kwargs: arguments of `from_pretrained` (dtype, revision, cache_dir, token, device_map, ...).

        Raises:
            ValueError: for another architecture, for tensors that are missing, left over or of a wrong shape, or for
                an option out of its range.
        """
        if head_init not in ("fresh", "backbone_layers"):
            raise ValueError(f"head_init must be 'fresh' or 'backbone_layers', got {head_init!r}")
        checkpoint = read_checkpoint(
            source, num_mrp_layers, block_size, mask_token_id, kwargs, mrp_residual, default_mrp_layers
        )
        if head_init == "backbone_layers" and checkpoint.config.num_mrp_layers > checkpoint.config.num_hidden_layers:
            raise ValueError(
                f"head_init='backbone_layers' cannot copy num_mrp_layers={checkpoint.config.num_mrp_layers} layers: "
                f"the backbone has {checkpoint.config.num_hidden_layers}"
            )
        model = cls.from_pretrained(
            source,
            config=checkpoint.config,
            key_mapping=checkpoint.renames,
            optional_tensors=None if checkpoint.has_head else HEAD_PREFIX,
            **kwargs,
        )
        model._weight_conversions = None  # otherwise transformers would save under the source's tensor names
        model.generation_config.use_cache = None  # False in published configs, which refers to training
        if model.mrp_head is None:
            model.generation_config.mrp_mode = None
        elif getattr(model.generation_config, "mrp_mode", None) is None:
            _decode_with_head(model.generation_config)
        if head_init == "backbone_layers" and not checkpoint.has_head:
            model.copy_backbone_layers_to_head()
        return model


def read_checkpoint(
    source: str | PathLike,
    num_mrp_layers: int | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    arguments: Mapping | tuple = (),
    mrp_residual: bool | None = None,
    default_mrp_layers: int = 3,
) -> Checkpoint:
    """Read the config and the tensor names of an SDAR, a published SDAR-MRP or our own checkpoint.

    Args:
        source: a folder or a Hub id.
        num_mrp_layers: number of layers of the head; 0 drops the checkpoint's head.
        block_size: replaces the checkpoint's block size.
        mask_token_id: replaces the checkpoint's mask token id.
        arguments: mapping that may hold arguments for the Hub (revision, token, ...); its other entries are ignored.
        mrp_residual: kind of a fresh head, or of a head whose checkpoint does not say (see `MRPConfig`).
        default_mrp_layers: number of layers of a fresh head when `num_mrp_layers` is None.

    Raises:
        ValueError: for another architecture, or for options that contradict the checkpoint.
        OSError: when `config.json` or the safetensors cannot be found.
    """
    folder, commit = checkpoint_folder(source, **_hub_arguments(arguments))
    values = read_config(folder)
    if values.get("model_type") not in ARCHITECTURES:
        raise ValueError(
            f"{source} has model_type {values.get('model_type')!r}, expected one of {', '.join(ARCHITECTURES)}: "
            "only SDAR checkpoints (Qwen3 architecture) can be wrapped"
        )
    prefix = head_prefix(tensor_names(folder))
    has_head = prefix is not None and num_mrp_layers != 0
    _override(values, "block_size", block_size)
    _override(values, "mask_token_id", mask_token_id)
    values["mrp_residual"] = _residual(source, values.get("mrp_residual") if has_head else None, mrp_residual)
    layers = values.pop("num_mrp_layers", values.get("num_nextn_predict_layers"))
    if prefix is None and layers and num_mrp_layers != 0:
        raise ValueError(
            f"{source} lacks its head: {CONFIG} states num_mrp_layers={layers}, but there is no tensor {HEAD_PREFIX}*"
            ": copy or download it again, or pass num_mrp_layers=0 (mrp convert --num-mrp-layers 0) for the backbone"
        )
    try:
        check_block_size(values)
        config = _config(source, values, layers, num_mrp_layers, has_head, default_mrp_layers)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    config._commit_hash = commit  # so that the weights are loaded from the same commit
    renames = {}
    if prefix is not None and prefix != HEAD_PREFIX:
        renames["^" + prefix.replace(".", r"\.")] = HEAD_PREFIX
    return Checkpoint(config, renames, has_head)


def _hub_arguments(arguments: Mapping | tuple) -> dict[str, Any]:
    return {name: arguments[name] for name in HUB_ARGUMENTS if name in arguments and arguments[name] is not None}


def _folder_to_load(source: str | PathLike, arguments: dict[str, Any]) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint and its commit on the Hub, after checking the files that will be read.

    Arguments for the Hub are taken out of `arguments`, which are then those for loading the folder.
    """
    hub = _hub_arguments(arguments)
    config = arguments.get("config")
    if getattr(config, "_commit_hash", None) is not None and not Path(source).is_dir():
        hub["revision"] = config._commit_hash
    folder, commit = checkpoint_folder(source, **hub)
    for name in HUB_ARGUMENTS:
        arguments.pop(name, None)
    if config is None:
        values = read_config(folder)
        try:
            MRPConfig.from_dict(values, **{k: arguments[k] for k in ("block_size",) if k in arguments})
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG}: {error}") from error
    if (folder / GENERATION_CONFIG).is_file():
        read_json(folder / GENERATION_CONFIG)  # transformers would go on without one that it cannot read
    if not {"variant", "state_dict", "gguf_file"} & arguments.keys():
        weight_files(folder)
    return folder, commit


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence transformers' table of missing and left-over tensors: `check_tensors` names those that matter."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def check_tensors(source: str | PathLike, info: dict, optional: str | None = None) -> None:
    """Raise unless a checkpoint held exactly the tensors of the model that was loaded from it.

    Args:
        source: the checkpoint, for the message.
        info: loading info of transformers' `from_pretrained`.
        optional: prefix of tensors that may be missing or left over; None: no tensor may.

    Raises:
        ValueError: for tensors that are missing, left over or of a wrong shape; the message names them.
    """
    missing, left_over = (
        sorted(name for name in info[kind] if optional is None or not name.startswith(optional))
        for kind in ("missing_keys", "unexpected_keys")
    )
    wrong = [
        f"{name} {list(found)} instead of {list(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    if missing or left_over or wrong:
        raise ValueError(
            f"{source} does not fit its config: missing tensors: {_some(missing)}; "
            f"left-over tensors: {_some(left_over)}; tensors of a wrong shape: {_some(wrong)}"
        )


def _some(names: list[str]) -> str:
    """List at most eight names, and say how many more there are."""
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _decode_with_head(generation_config: GenerationConfig) -> None:
    """Let `generate` draft with the head, as far as it pays, unless it is told otherwise."""
    generation_config.mrp_mode = "spec"
    if getattr(generation_config, "mrp_steps", None) is None:
        generation_config.mrp_steps = "auto"


def head_prefix(names: list[str]) -> str | None:
    """Return what the names of the head's tensors begin with in a checkpoint; None if it holds no head.

    Args:
        names: names of all its tensors.
    """
    for prefix in (HEAD_PREFIX, *PUBLISHED_HEAD_PREFIXES):
        if any(name.startswith(prefix) for name in names):
            return prefix
    return None


def _config(
    source, values: dict, layers: int | None, num_mrp_layers: int | None, has_head: bool, default_layers: int
) -> MRPConfig:
    """Make our config from the `config.json` of the source, whose head has `layers` layers."""
    if has_head and num_mrp_layers is not None and num_mrp_layers != layers:
        raise ValueError(
            f"num_mrp_layers={num_mrp_layers} contradicts {source}, whose head has {layers}: "
            "omit it to keep that head, or pass 0 to drop the head"
        )
    fresh = default_layers if num_mrp_layers is None else num_mrp_layers
    dropped = DROPPED if has_head else DROPPED + MEASURED_WITH_HEAD
    kept = {key: value for key, value in values.items() if key not in dropped}
    config = MRPConfig(**kept, num_mrp_layers=layers if has_head else fresh, auto_map=dict(AUTO_MAP))
    config.architectures = ["MRPForDiffusionLM"]
    return config


def _residual(source, stated: bool | None, wanted: bool | None) -> bool:
    """Return `mrp_residual` from what the checkpoint of the head states and what the caller wants; default True."""
    if None not in (stated, wanted) and stated != wanted:
        raise ValueError(
            f"mrp_residual={wanted} contradicts {source}, whose head was trained with {stated}: "
            "omit it to keep that head, or drop the head first (`mrp convert --num-mrp-layers 0`)"
        )
    if stated is not None:
        return stated
    return True if wanted is None else wanted


def _override(values: dict, name: str, value: int | None):
    """Set a value of the config; replacing a different value of the checkpoint gives a warning."""
    current = values.get(name)
    if value is None or value == current:
        return
    if current is not None:
        warnings.warn(f"{name}={value} overrides {current}, which the checkpoint was trained with", stacklevel=4)
    values[name] = value

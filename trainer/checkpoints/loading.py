"""Loading the model and the tokenizer that a command was asked for, and choosing device and attention."""

from argparse import Namespace
from os import PathLike
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.modeling_mrp import ResidualHead

from .head_files import load_head, read_head_config
from .tokenizer_files import check_tokenizer_files
from .weight_files import fetch


def load(arguments: Namespace) -> tuple[MRPForDiffusionLM, PreTrainedTokenizerBase]:
    """Load the model, in eval mode on its device, and its tokenizer, which pads on the left.

    Args:
        arguments: a command's arguments `model`, `revision`, `head`, `dtype` and `device`. With `head`, a folder or
            Hub id, that head is loaded into the model; without it the model keeps the head that its checkpoint holds,
            and has none if the checkpoint has none.
    """
    folder = fetch(arguments.model, arguments.revision)[0]
    if arguments.head is None:
        model = _as_stored(folder, arguments)
    else:
        head_folder = fetch(arguments.head)[0]
        trained = read_head_config(head_folder)
        head = {name: trained.get(name) for name in ("num_mrp_layers", "mrp_residual")}
        model = load_head(MRPForDiffusionLM.from_backbone(folder, **head, dtype=arguments.dtype), head_folder)
    return _placed(model, arguments), load_tokenizer(folder, model.config, padding_side="left")


def load_tokenizer(source: str | PathLike, config: MRPConfig, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hub id without running code that it holds.

    Args:
        source: a folder or a Hub id.
        config: the model's config.
        options: arguments of `AutoTokenizer.from_pretrained` (revision, padding_side, ...).

    Raises:
        ValueError: naming a JSON file of the folder that is damaged.
    """
    check_tokenizer_files(source)
    # given our config and no trust, transformers takes a tokenizer class of its own, whatever code the folder names
    return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=False, **options)


def load_full_head(arguments: Namespace) -> MRPForDiffusionLM:
    """Load the backbone of one checkpoint with a head that predicts the full next distribution.

    Args:
        arguments: a command's arguments `model`, `revision`, `full_head` (folder or Hub id of the head), `dtype` and
            `device`.

    Raises:
        ValueError: when that head is residual, or belongs to another backbone.
    """
    folder = fetch(arguments.full_head)[0]
    trained = read_head_config(folder)
    if trained["mrp_residual"]:
        raise ValueError(f"the head in {folder} is residual: --full-head needs one trained with mrp_residual: false")
    model = _as_stored(fetch(arguments.model, arguments.revision)[0], arguments)
    model.config.num_mrp_layers, model.config.mrp_residual = trained["num_mrp_layers"], False
    model.mrp_head = ResidualHead(model.config).to(model.dtype)
    load_head(model, folder)
    return _placed(model, arguments)


def _as_stored(folder, arguments) -> MRPForDiffusionLM:
    """Load a checkpoint with the head that it holds, or without a head if it holds none."""
    return MRPForDiffusionLM.from_backbone(folder, default_mrp_layers=0, dtype=arguments.dtype)


def _placed(model, arguments):
    return model.to(usable_device(arguments.device)).eval()


def usable_device(name: str | None) -> torch.device:
    """Return the device of that name; by default a GPU if there is one.

    Raises:
        ValueError: when the device is unknown or cannot be used on this machine.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error


def default_attention(device: torch.device, autocast: bool) -> str:
    """Choose the attention implementation for training.

    Args:
        device: device of the model.
        autocast: whether training runs under autocast to half precision.
    """
    if device.type != "cuda":
        return "sdpa"
    # under autocast the norms of queries and keys return float32 while values stay in half precision, and releases of
    # flex_attention before 2.11 refuse this mix
    return "sdpa" if autocast and torch.__version__ < "2.11" else "flex_attention"

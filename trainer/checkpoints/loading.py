"""Model and tokenizer of a command from its arguments `model`, `revision`, `dtype`, ...; device and attention."""

import torch
from transformers import AutoTokenizer

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.checkpoints import read_checkpoint
from modeling_mrp.modeling_mrp import ResidualHead

from .head_files import load_head, read_head_config
from .weight_files import fetch


def load(arguments):
    """The model, in eval mode on its device, and its tokenizer, which pads on the left.

    A head of its own (`head`) is put on when asked for; a checkpoint without a head otherwise stays without one.
    """
    folder = fetch(arguments.model, arguments.revision)[0]
    if arguments.head is None:
        model = _as_stored(folder, arguments)
    else:
        trained = read_head_config(fetch(arguments.head)[0])
        head = {name: trained.get(name) for name in ("num_mrp_layers", "mrp_residual")}
        model = load_head(MRPForDiffusionLM.from_backbone(folder, **head, dtype=arguments.dtype), arguments.head)
    return _placed(model, arguments), load_tokenizer(folder, model.config, padding_side="left")


def load_tokenizer(source, config, **options):
    """The tokenizer of a folder or Hub id, never by code that it holds.

    Args:
        config: the model's.
        options: of `AutoTokenizer.from_pretrained` (revision, padding_side, ...).
    """
    # with our config and no trust its class is transformers' own, whatever code the folder names
    return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=False, **options)


def load_full_head(arguments):
    """The backbone of `model` under the head of `full_head`: a folder or Hub id, as training writes it.

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
    head = {} if read_checkpoint(str(folder), None, None, None, {}).has_head else {"num_mrp_layers": 0}
    return MRPForDiffusionLM.from_backbone(folder, **head, dtype=arguments.dtype)


def _placed(model, arguments):
    return model.to(usable_device(arguments.device)).eval()


def usable_device(name: str | None) -> torch.device:
    """The device of that name; by default a GPU when there is one.

    Raises:
        ValueError: when it is unknown or cannot be used here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error


def default_attention(device: torch.device, autocast: bool) -> str:
    """The attention implementation to train with on this device, under autocast to half precision or not."""
    if device.type != "cuda":
        return "sdpa"
    # the norms of q and k give float32 under autocast, v stays half: older releases of flex_attention refuse the mix
    return "sdpa" if autocast and torch.__version__ < "2.11" else "flex_attention"

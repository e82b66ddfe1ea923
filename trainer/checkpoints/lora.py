"""LoRA by `peft`: over the layers of the head, and backbones that are LoRA fine-tunes themselves."""

import copy
import hashlib
import warnings
from collections.abc import Iterator

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from modeling_mrp import MRPForDiffusionLM

TARGETS = r"mrp_head\.layers\.\d+\..*_proj"  # every linear map of the head's layers, none of the backbone's


def lora_head(model: MRPForDiffusionLM, rank: int, *, alpha: float | None = None, dropout: float = 0.0) -> PeftModel:
    """Put LoRA over the linear maps of the head's layers; `eh_proj` and the norms of the head train in full.

    An adapter holds what was trained and nothing else, so the layers must come back by themselves when it is loaded:
    they are copies of the backbone's last layers (`from_backbone(..., head_init="backbone_layers")`) or belong to the
    checkpoint that the model was loaded from.

    Args:
        model: an `MRPForDiffusionLM` with a head; is changed in place.
        rank: of the low-rank updates, from 1 to the hidden size.
        alpha: updates are scaled by alpha / rank; default 2 * rank.
        dropout: on the input of the updates, from 0 to below 1.

    Returns:
        A model that `MRPTrainer` trains, `save_head` saves, `PeftModel.from_pretrained` or `load_head` loads and
        `merge_and_unload` turns into an `MRPForDiffusionLM` again.

    Raises:
        ValueError: for an option out of its range, a model without a head, a new head of random layers, or a backbone
            with a live adapter.
    """
    if model.mrp_head is None:
        raise ValueError("the model has no head to adapt (num_mrp_layers is 0): load it with num_mrp_layers=1 or more")
    size = model.config.hidden_size
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= size:
        raise ValueError(f"rank must be a whole number from 1 to the hidden size {size}, got {rank!r}")
    alpha = 2 * rank if alpha is None else alpha
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    check_no_live_adapter(model)
    if is_fresh(model) and not _layers_are_copies(model):
        raise ValueError(
            "head_init must be 'backbone_layers' under LoRA: a new head of random layers could not be built again "
            "from its adapter"
        )
    linear = {
        name for name, module in model.mrp_head.layers.named_modules(prefix="layers") if type(module) is nn.Linear
    }
    in_full = [
        f"mrp_head.{name}"
        for name, module in model.mrp_head.named_modules()
        if name not in linear and any(True for _ in module.parameters(recurse=False))
    ]
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=TARGETS, modules_to_save=in_full
    )
    return get_peft_model(model, config)


def apply_backbone_adapter(model: MRPForDiffusionLM, adapter, *, merge: bool = True, **kwargs) -> MRPForDiffusionLM:
    """Make a LoRA fine-tune of the backbone the frozen base of the head, in place; returns the model.

    A head that started as copies of the backbone's layers keeps the copies it has: call
    `model.copy_backbone_layers_to_head()` for those of the fine-tune.

    Args:
        model: over the backbone that was fine-tuned, with or without a head.
        adapter: a folder or a Hub id that `peft` wrote.
        merge: add the adapter to the weights; else it stays beside them, and `save_pretrained` is of no use until it
            is merged.
        kwargs: of `PeftModel.from_pretrained` (revision, token, ...).

    Raises:
        ValueError: for an adapter that does not fit the backbone, or that cannot stay beside it: one that changes
            `lm_head` or holds whole modules. The model is of no use then.
    """
    check_no_live_adapter(model)
    # An adapter names its targets by their last words, which the head's layers have in common with the backbone's.
    head, model.mrp_head = model.mrp_head, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, adapter, **kwargs)
        if not merge:
            _check_can_stay_beside(adapted, adapter)
        else:
            adapted.merge_and_unload()
            forget_adapter(model)
    except (RuntimeError, UserWarning) as error:
        raise ValueError(f"the adapter {adapter} does not fit this backbone: {error}") from error
    finally:
        model.mrp_head = head
    model.freeze_backbone()
    return model


def without_peft(model) -> MRPForDiffusionLM:
    """The model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_fresh(model: MRPForDiffusionLM) -> bool:
    """Whether the head's last norm is that of a new one, which no training leaves."""
    return bool((model.mrp_head.norm.weight == model.initial_head_norm).all())


def check_no_live_adapter(model: MRPForDiffusionLM):
    """Refuse a model some of whose modules are wrapped by peft already.

    Raises:
        ValueError: naming the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            raise ValueError(f"{name} has a live adapter already, and only one can be told apart: merge it first")


def forget_adapter(model: MRPForDiffusionLM):
    """After a merge: peft would warn of a second adapter where there is none."""
    vars(model).pop("peft_config", None)


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model's state in the order of the names, as if live adapters were merged.

    At most one weight is copied at a time.
    """
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    state = model.state_dict()
    owner = {name: None for name in state if not any(name.startswith(f"{prefix}.") for prefix in wrapped)}
    owner |= {
        f"{prefix}.{name}": prefix for prefix in wrapped for name in wrapped[prefix].get_base_layer().state_dict()
    }
    for name in sorted(owner):
        prefix = owner[name]
        if prefix is None:
            yield name, state[name]
        else:
            layer = copy.deepcopy(wrapped[prefix])
            layer.merge()
            yield name, layer.get_base_layer().state_dict()[name.removeprefix(f"{prefix}.")]


@torch.no_grad()
def frozen_layers_hash(model: MRPForDiffusionLM) -> str:
    """Hash of the frozen weights under a head's LoRA, or of those that would lie under it; as bfloat16."""
    digest = hashlib.sha256()
    for name, module in sorted(model.mrp_head.layers.named_modules()):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if type(module) is nn.Linear and "lora_" not in name and not name.endswith("base_layer"):
            digest.update(name.encode())
            digest.update(module.weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _layers_are_copies(model: MRPForDiffusionLM) -> bool:
    ours = model.mrp_head.layers
    theirs = model.model.layers[-len(ours) :]
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=False)
    return len(ours) == len(theirs) and all(torch.equal(a, b.to(a.dtype)) for a, b in pairs)


def _check_can_stay_beside(adapted: PeftModel, adapter):
    model = adapted.get_base_model()
    whole = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    if isinstance(model.lm_head, BaseTunerLayer):
        whole.append("lm_head")  # the loss reads its weight
    if whole:
        raise ValueError(f"the adapter {adapter} changes {whole[0]}, which merge=False does not allow: use merge=True")

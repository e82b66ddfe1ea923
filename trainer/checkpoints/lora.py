"""LoRA with `peft`: adapters on the layers of the head, and backbones that are LoRA fine-tunes themselves."""

import copy
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.checkpoint_files import checkpoint_folder

TARGETS = r"mrp_head\.layers\.\d+\..*_proj"  # the linear maps of the head's layers, and none of the backbone's


def lora_head(model: MRPForDiffusionLM, rank: int, *, alpha: float | None = None, dropout: float = 0.0) -> PeftModel:
    """Add LoRA to the linear maps of the head's layers; `eh_proj` and the norms of the head are trained in full.

    An adapter holds only what was trained, so it must be possible to rebuild the layers under it when it is loaded:
    they are copies of the backbone's last layers (`from_backbone(..., head_init="backbone_layers")`), or those of the
    checkpoint that the model was loaded from.

    Args:
        model: a model with a head; it is changed in place.
        rank: rank of the updates, from 1 to the hidden size.
        alpha: updates are scaled by alpha / rank; None means 2 * rank.
        dropout: dropout on the input of the updates, at least 0 and below 1.

    Returns:
        A `PeftModel`. `MRPTrainer` trains it, `save_head` saves it, `PeftModel.from_pretrained` or `load_head` loads
        it, and `merge_and_unload` turns it back into an `MRPForDiffusionLM`.

    Raises:
        ValueError: if an option is out of its range, the model has no head, the head is new with random layers, or
            the backbone has a live adapter.
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
            "LoRA requires head_init='backbone_layers' for a new head: random layers could not be rebuilt from the "
            "adapter alone"
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


def apply_backbone_adapter(
    model: MRPForDiffusionLM, adapter: str | Path, *, merge: bool = True, **kwargs: Any
) -> MRPForDiffusionLM:
    """Apply a LoRA fine-tune to the backbone, in place.

    A head whose layers are copies of the backbone's keeps the old copies; call `model.copy_backbone_layers_to_head()`
    to copy those of the fine-tune.

    Args:
        model: a model over the backbone that was fine-tuned, with or without a head.
        adapter: a folder or a Hub id written by `peft`.
        merge: add the adapter to the weights. If False, it stays separate, and the model cannot be saved with
            `save_pretrained` until it is merged.
        **kwargs: arguments of `PeftModel.from_pretrained` (revision, token, ...).

    Returns:
        The model.

    Raises:
        OSError: if the adapter is neither a folder nor can be downloaded.
        ValueError: if there is no adapter, or if the adapter does not fit the backbone, changes `lm_head` or holds
            whole modules, so that it cannot stay separate. The model must be discarded then.
    """
    check_no_live_adapter(model)
    hub = {name: kwargs.pop(name) for name in ("revision", "token", "cache_dir") if name in kwargs}
    folder, _ = checkpoint_folder(adapter, ("*.json", "*.safetensors"), **hub)
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} holds no adapter of peft: adapter_config.json is missing")
    # peft matches targets by the end of their names, and the head's layers have the same names as the backbone's:
    # take the head out while the adapter is applied.
    head, model.mrp_head = model.mrp_head, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, folder, **kwargs)
        if not merge:
            _check_can_stay_separate(adapted, adapter)
        else:
            adapted.merge_and_unload()
            forget_adapter(model)
    except (RuntimeError, UserWarning) as error:
        raise ValueError(f"the adapter {adapter} does not fit this backbone: {error}") from error
    finally:
        model.mrp_head = head
    model.freeze_backbone()
    return model


def without_peft(model: MRPForDiffusionLM | PeftModel) -> MRPForDiffusionLM:
    """Return the model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_fresh(model: MRPForDiffusionLM) -> bool:
    """Return whether the head is untrained: its last norm still has its initial value, which training changes."""
    return bool((model.mrp_head.norm.weight == model.initial_head_norm).all())


def check_no_live_adapter(model: MRPForDiffusionLM) -> None:
    """Check that peft has not wrapped any of the model's modules.

    Raises:
        ValueError: naming the first module that is wrapped.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            raise ValueError(f"{name} already has a live adapter, and only one is supported: merge it first")


def forget_adapter(model: MRPForDiffusionLM) -> None:
    """Remove what peft leaves on a model after a merge, and would take for a second adapter later."""
    if hasattr(model, "peft_config"):
        del model.peft_config


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model's state in the order of the names, as if live adapters were merged.

    At most one weight is copied at a time.
    """
    # `owner` maps each name of the merged state to the wrapped module it comes from, or to None.
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
    """Return a hash of the head's linear maps without their LoRA updates, with values rounded to bfloat16."""
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


def _check_can_stay_separate(adapted: PeftModel, adapter: str | Path):
    model = adapted.get_base_model()
    changed = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    if isinstance(model.lm_head, BaseTunerLayer):
        changed.append("lm_head")  # the loss reads lm_head.weight directly
    if changed:
        raise ValueError(
            f"the adapter {adapter} changes {changed[0]}, which merge=False does not allow: use merge=True"
        )

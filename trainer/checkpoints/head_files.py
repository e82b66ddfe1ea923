"""A head on its own: its weights, and which backbone they belong to."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from .lora import check_no_live_adapter, forget_adapter, frozen_layers_hash, is_fresh, without_peft
from .sharded import sharded_like, whole_state
from .weight_files import backbone_hash, base_of, fetch, tensor_index

HEAD_WEIGHTS = "mrp_head.safetensors"
HEAD_CONFIG = "mrp_head_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Of the model's config: what head and model must have in common.
HEAD_KIND = ("num_mrp_layers", "mrp_residual")
BLOCKS = ("block_size", "mask_token_id")


def backbone_note(model) -> dict:
    """Which backbone a head belongs to: id, revision and hash; under LoRA also a hash of the layers it lies over.

    Args:
        model: an `MRPForDiffusionLM` with a head, or one under `lora_head`; no tensor of it is sharded yet.
    """
    bare = without_peft(model)
    base_model, base_revision = base_of(bare, commit=vars(bare.config).get("_commit_hash"))
    note = {"base_model": base_model, "base_revision": base_revision, "base_hash": backbone_hash(bare)}
    if isinstance(model, PeftModel):
        note["frozen_layers_hash"] = frozen_layers_hash(bare)
    return note


def save_head(model, folder, note: dict | None = None, write: bool = True) -> Path:
    """Write the head alone, with the id, the revision and a hash of the backbone it belongs to.

    Args:
        model: an `MRPForDiffusionLM` with a head, or one under `lora_head`, of which the adapter is written. Where
            FSDP2 has sharded it, every rank must call this.
        folder: is made when missing; gets `mrp_head.safetensors` (or the files of `peft`) and `mrp_head_config.json`.
        note: `backbone_note(model)` of before the model was sharded.
        write: False on ranks that only give their part.

    Raises:
        ValueError: when the model has no head.
    """
    if without_peft(model).mrp_head is None:
        raise ValueError("the model has no head to save (num_mrp_layers is 0)")
    folder = Path(folder)
    config = backbone_note(model) if note is None else dict(note)
    for name in (*HEAD_KIND, *BLOCKS, "trained_acceptance"):
        config[name] = vars(model.config)[name]
    adapted = isinstance(model, PeftModel)
    state = {name: tensor for name, tensor in model.state_dict().items() if "mrp_head." in name}
    state = whole_state(state, keep=write)
    if not write:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if adapted:
        model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
    else:
        state = {name.removeprefix("mrp_head."): tensor for name, tensor in state.items()}
        save_file(state, folder / HEAD_WEIGHTS, metadata={"format": "pt"})
    (folder / HEAD_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def load_head(model, folder, note: dict | None = None):
    """Load a head written by `save_head` into a model, in place; returns the model.

    A LoRA adapter of a head is merged, unless the model is under `lora_head` itself: that one goes on training it.

    Args:
        model: an `MRPForDiffusionLM` over the same backbone, with a head of as many layers; or one under `lora_head`.
        folder: a folder or a Hub id.
        note: `backbone_note(model)` of before the model was sharded.

    Raises:
        ValueError: when the head belongs to another backbone, has other layers, or does not hold every tensor.
    """
    folder = fetch(folder)[0]
    config = read_head_config(folder)
    note = backbone_note(model) if note is None else note
    _check_base(without_peft(model), folder, config, note)
    if "frozen_layers_hash" in config:
        _load_adapter(model, folder, config, note)
    elif isinstance(model, PeftModel):
        raise ValueError(f"the head in {folder} is no LoRA adapter: load it into a model without lora_head")
    else:
        model.mrp_head.load_state_dict(_read_tensors(folder / HEAD_WEIGHTS, model.mrp_head.state_dict()))
    bare = without_peft(model)
    bare.config.trained_acceptance, bare.config.base_hash = config.get("trained_acceptance"), config["base_hash"]
    return model


def _load_adapter(model, folder: Path, config: dict, note: dict):
    """Into the model's own adapter, or merged into the head's layers."""
    bare = without_peft(model)
    merge = not isinstance(model, PeftModel)
    if merge:
        check_no_live_adapter(bare)
        if is_fresh(bare):
            bare.copy_backbone_layers_to_head()
    layers_hash = frozen_layers_hash(bare) if merge else note["frozen_layers_hash"]
    if layers_hash != config["frozen_layers_hash"]:
        raise ValueError(
            f"the adapter in {folder} was trained over other layers than those of the model's head: load the "
            "checkpoint it was trained on as it was loaded then (head_init='backbone_layers' for a new head)"
        )
    lora = LoraConfig.from_pretrained(folder)
    if not merge:
        _check_lora(model.peft_config[model.active_adapter], lora, folder)
    adapted = get_peft_model(bare, lora) if merge else model
    try:
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        set_peft_model_state_dict(adapted, _read_tensors(folder / ADAPTER_WEIGHTS, expected))
    finally:
        if merge:
            adapted.merge_and_unload()
            forget_adapter(bare)
            bare.mrp_head.requires_grad_(True)


def _check_lora(own: LoraConfig, stored: LoraConfig, folder: Path):
    for name, option in (("r", "lora_rank"), ("lora_alpha", "lora_alpha")):
        if vars(own)[name] != vars(stored)[name]:
            raise ValueError(
                f"the adapter in {folder} was trained with {option}={vars(stored)[name]} and the model's has "
                f"{vars(own)[name]}: set {option} to {vars(stored)[name]}"
            )


def _check_base(model, folder: Path, config: dict, note: dict):
    for name in (*HEAD_KIND, *BLOCKS):
        own = vars(model.config)[name]
        if own != config.get(name, own):
            raise ValueError(
                f"the head in {folder} was trained with {name}={config[name]} and the model has {own}: build the "
                f"model with {name}={config[name]}"
            )
    if note["base_hash"] != config["base_hash"]:
        raise ValueError(
            f"the head in {folder} was trained on {config['base_model']} (revision {config['base_revision']}), "
            f"whose weights differ from those of {note['base_model']}: load it onto the backbone it belongs to"
        )


def read_head_config(folder: Path) -> dict:
    """What `save_head` noted of a head; one that does not say otherwise is residual."""
    path = Path(folder) / HEAD_CONFIG
    if not path.exists():
        raise ValueError(f"{folder} holds no head: {HEAD_CONFIG} is missing")
    return {"mrp_residual": True} | json.loads(path.read_text(encoding="utf-8"))


def _read_tensors(path: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file, which must be those that are expected; sharded where those are."""
    found = {name: tuple(shape) for name, _, shape in tensor_index(path)}
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    missing, left_over = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    wrong = [f"{n} {found[n]} instead of {shapes[n]}" for n in shapes.keys() & found.keys() if found[n] != shapes[n]]
    if missing or left_over or wrong:
        raise ValueError(
            f"{path} does not fit the model: missing tensors: {', '.join(missing) or 'none'}; left-over tensors: "
            f"{', '.join(left_over) or 'none'}; wrong shapes: {', '.join(sorted(wrong)) or 'none'}"
        )
    return {name: sharded_like(tensor, expected[name]) for name, tensor in load_file(path).items()}

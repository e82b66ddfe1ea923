"""A head on its own: its weights, and which backbone they belong to."""

import json
import shutil
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.checkpoint_files import CONFIG, HEAD_CONFIG, read_json

from .durable import checksum, staged
from .lora import check_no_live_adapter, forget_adapter, frozen_layers_hash, is_fresh, without_peft
from .sharded import sharded_like, whole_state
from .weight_files import backbone_hash, base_of, fetch, tensor_index

HEAD_WEIGHTS = "mrp_head.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"
WEIGHTS_CHECKSUM = "weights_sha256"  # entry of HEAD_CONFIG
# Values of the model's config that are saved with a head. A head and the model it is loaded into must agree on these:
SHARED_CONFIG = ("num_mrp_layers", "mrp_residual", "block_size", "mask_token_id")
CARRIED_CONFIG = ("trained_acceptance", "draft_vocabulary")  # and these the model takes from the head


def backbone_identity(model: MRPForDiffusionLM | PeftModel) -> dict[str, str | None]:
    """Return which backbone the model's head belongs to.

    Args:
        model: a model with a head, possibly wrapped by `lora_head`. Its weights must not be sharded yet.

    Returns:
        `base_model`, `base_revision` and `base_hash`; under LoRA also `frozen_layers_hash`, a hash of the frozen
        layers that the adapter adds to.
    """
    bare = without_peft(model)
    base_model, base_revision = base_of(bare, commit=getattr(bare.config, "_commit_hash", None))
    identity = {"base_model": base_model, "base_revision": base_revision, "base_hash": backbone_hash(bare)}
    if isinstance(model, PeftModel):
        identity["frozen_layers_hash"] = frozen_layers_hash(bare)
    return identity


def save_head(
    model: MRPForDiffusionLM | PeftModel,
    folder: str | Path,
    identity: dict[str, str | None] | None = None,
    write: bool = True,
) -> Path:
    """Write the head alone, together with the id, the revision and a hash of the backbone it belongs to.

    The files replace earlier ones when they are whole and on the disk. The checksum of the weights is written with
    them, and `load_head` checks it. If FSDP2 has sharded the model, every rank must call this.

    Args:
        model: a model with a head. If it is wrapped by `lora_head`, the adapter is written.
        folder: folder to write to, created if missing. It receives `mrp_head_config.json` and `mrp_head.safetensors`
            (under LoRA the files of `peft`).
        identity: `backbone_identity(model)`, computed before the model was sharded; None computes it now.
        write: False on ranks that only contribute their shards.

    Returns:
        The folder.

    Raises:
        ValueError: if the model has no head, or one with weights that are not finite. Nothing is written then.
    """
    if without_peft(model).mrp_head is None:
        raise ValueError("the model has no head to save (num_mrp_layers is 0)")
    folder = Path(folder)
    config = backbone_identity(model) if identity is None else dict(identity)
    config |= {name: getattr(model.config, name) for name in (*SHARED_CONFIG, *CARRIED_CONFIG)}
    state = {name: tensor for name, tensor in model.state_dict().items() if "mrp_head." in name}
    state = whole_state(state, keep=write)  # on every rank, whether it writes or not
    if not write:
        return folder
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise ValueError(
            f"the head's {broken[0]} is not finite ({len(broken)} of {len(state)} tensors are not), so it is not "
            f"written to {folder}: go back to an earlier checkpoint and lower the learning rate"
        )
    with staged(folder) as staging:
        if isinstance(model, PeftModel):
            if (folder / CARD).is_file():  # peft extends a card
                shutil.copy(folder / CARD, staging)
            model.save_pretrained(staging, state_dict=state, save_embedding_layers=False)
        else:
            state = {name.removeprefix("mrp_head."): tensor for name, tensor in state.items()}
            save_file(state, staging / HEAD_WEIGHTS, metadata={"format": "pt"})
        weights = ADAPTER_WEIGHTS if isinstance(model, PeftModel) else HEAD_WEIGHTS
        config[WEIGHTS_CHECKSUM] = checksum(staging / weights)
        (staging / HEAD_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def load_head(
    model: MRPForDiffusionLM | PeftModel, folder: str | Path, identity: dict[str, str | None] | None = None
) -> MRPForDiffusionLM | PeftModel:
    """Load a head written by `save_head` into a model, in place.

    A LoRA adapter is merged into the head's layers, unless the model is itself wrapped by `lora_head`: then it is
    loaded as the adapter, to be trained further.

    Args:
        model: a model over the same backbone, with a head of as many layers, possibly wrapped by `lora_head`.
        folder: a local folder or a Hub id.
        identity: `backbone_identity(model)`, computed before the model was sharded; None computes it now.

    Returns:
        The model.

    Raises:
        ValueError: if the head is damaged, belongs to another backbone, has other layers, or lacks a tensor.
    """
    folder = fetch(folder)[0]
    identity = backbone_identity(model) if identity is None else identity
    config = check_head_fits(model, folder, identity)
    if "frozen_layers_hash" in config:
        _load_adapter(model, folder, config, identity)
    elif isinstance(model, PeftModel):
        raise ValueError(f"the head in {folder} is not a LoRA adapter: load it into a model without lora_head")
    else:
        model.mrp_head.load_state_dict(_read_tensors(folder / HEAD_WEIGHTS, model.mrp_head.state_dict(), config))
    bare = without_peft(model)
    bare.config.trained_acceptance, bare.config.base_hash = config.get("trained_acceptance"), config["base_hash"]
    if config.get("draft_vocabulary") is not None:
        bare.config.draft_vocabulary = config["draft_vocabulary"]
    return model


def _load_adapter(model, folder: Path, config: dict, identity: dict):
    """Load an adapter into the model's own, or merge it into the head's layers if the model has none."""
    bare = without_peft(model)
    merge = not isinstance(model, PeftModel)
    if merge:
        check_no_live_adapter(bare)
        if is_fresh(bare):  # adapters are trained over copies of the backbone's layers, see `lora_head`
            bare.copy_backbone_layers_to_head()
    layers_hash = frozen_layers_hash(bare) if merge else identity["frozen_layers_hash"]
    if layers_hash != config["frozen_layers_hash"]:
        raise ValueError(
            f"the adapter in {folder} was trained over other layers than those of the model's head: reload its "
            "original checkpoint with the same head_init ('backbone_layers' for a new head)"
        )
    lora = LoraConfig.from_pretrained(folder)
    if not merge:
        _check_lora(model.peft_config[model.active_adapter], lora, folder)
    adapted = get_peft_model(bare, lora) if merge else model
    try:
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        set_peft_model_state_dict(adapted, _read_tensors(folder / ADAPTER_WEIGHTS, expected, config))
    finally:
        if merge:  # also after an error: leave the caller a model without a half-loaded adapter
            adapted.merge_and_unload()
            forget_adapter(bare)
            bare.mrp_head.requires_grad_(True)


def _check_lora(own: LoraConfig, stored: LoraConfig, folder: Path):
    for option, ours, theirs in (
        ("lora_rank", own.r, stored.r),
        ("lora_alpha", own.lora_alpha, stored.lora_alpha),
    ):
        if ours != theirs:
            raise ValueError(
                f"the adapter in {folder} was trained with {option}={theirs}, but the model's has {ours}: set "
                f"{option} to {theirs}"
            )


def check_head_fits(
    model: MRPForDiffusionLM | PeftModel, folder: str | Path, identity: dict[str, str | None]
) -> dict[str, Any]:
    """Check that a saved head belongs to the model's backbone. Its tensors are not read.

    Args:
        model: the model, possibly wrapped by `lora_head`.
        folder: a local folder with a head.
        identity: `backbone_identity(model)`, computed before the model was sharded.

    Returns:
        What `save_head` recorded about the head.

    Raises:
        ValueError: if the folder holds no head, or one of another backbone or of another number of layers.
    """
    config = read_head_config(folder)
    for name in SHARED_CONFIG:
        own = getattr(model.config, name)
        if own != config.get(name, own):
            raise ValueError(
                f"the head in {folder} was trained with {name}={config[name]} and the model has {own}: load the "
                f"model with {name}={config[name]}"
            )
    if identity["base_hash"] != config["base_hash"]:
        raise ValueError(
            f"the head in {folder} was trained on {config['base_model']} (revision {config['base_revision']}), whose "
            f"weights differ from those of {identity['base_model']}: load it onto the backbone it belongs to"
        )
    return config


def read_head_config(folder: str | Path) -> dict[str, Any]:
    """Read what `save_head` recorded about a head. Heads saved without `mrp_residual` are residual.

    Raises:
        ValueError: if the folder holds no head.
    """
    path = Path(folder) / HEAD_CONFIG
    if not path.exists():
        whole = " (it holds a whole model: name it as the model)" if (Path(folder) / CONFIG).exists() else ""
        raise ValueError(f"{folder} holds no head: {HEAD_CONFIG} is missing{whole}")
    return {"mrp_residual": True} | read_json(path)


def _read_tensors(path: Path, expected: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Read the tensors of a file, check them against `expected`, and shard them in the same way.

    The file must also have the checksum in the head's `config`. Heads of older versions have none.
    """
    found = {name: tuple(shape) for name, _, shape in tensor_index(path)}
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    missing, left_over = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    wrong = [f"{n} {found[n]} instead of {shapes[n]}" for n in shapes.keys() & found.keys() if found[n] != shapes[n]]
    if missing or left_over or wrong:
        raise ValueError(
            f"{path} does not fit the model: missing tensors: {', '.join(missing) or 'none'}; left-over tensors: "
            f"{', '.join(left_over) or 'none'}; wrong shapes: {', '.join(sorted(wrong)) or 'none'}"
        )
    if config.get(WEIGHTS_CHECKSUM) not in (None, checksum(path)):
        raise ValueError(
            f"{path} is damaged, or belongs to another {HEAD_CONFIG} than the one beside it: its checksum differs. If "
            f"the weights were changed on purpose, remove {WEIGHTS_CHECKSUM} from {HEAD_CONFIG}"
        )
    return {name: sharded_like(tensor, expected[name]) for name, tensor in load_file(path).items()}

"""A head on its own: its weights, and which backbone they belong to."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .weight_files import backbone_hash, base_of, fetch, tensor_index

HEAD_WEIGHTS = "mrp_head.safetensors"
HEAD_CONFIG = "mrp_head_config.json"


def save_head(model, folder) -> Path:
    """Write the head alone, with the id, the revision and a hash of the backbone it belongs to.

    Args:
        model: an `MRPForDiffusionLM` with a head.
        folder: is made when missing; gets `mrp_head.safetensors` and `mrp_head_config.json`.

    Raises:
        ValueError: when the model has no head.
    """
    if model.mrp_head is None:
        raise ValueError("the model has no head to save (num_mrp_layers is 0)")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base_model, base_revision = base_of(model, commit=vars(model.config).get("_commit_hash"))
    config = {
        "base_model": base_model,
        "base_revision": base_revision,
        "base_hash": backbone_hash(model),
        "num_mrp_layers": model.config.num_mrp_layers,
        "block_size": model.config.block_size,
    }
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.mrp_head.state_dict().items()}
    save_file(state, folder / HEAD_WEIGHTS, metadata={"format": "pt"})
    (folder / HEAD_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def load_head(model, folder):
    """Load a head written by `save_head` into a model, in place; returns the model.

    Args:
        model: an `MRPForDiffusionLM` over the same backbone, with a head of as many layers.
        folder: a folder or a Hub id.

    Raises:
        ValueError: when the head belongs to another backbone, has other layers, or does not hold every tensor.
    """
    folder = fetch(folder)[0]
    config = read_head_config(folder)
    if model.config.num_mrp_layers != config["num_mrp_layers"]:
        raise ValueError(
            f"the head in {folder} has {config['num_mrp_layers']} layers and the model's has "
            f"{model.config.num_mrp_layers}: build the model with num_mrp_layers={config['num_mrp_layers']}"
        )
    if backbone_hash(model) != config["base_hash"]:
        raise ValueError(
            f"the head in {folder} was trained on {config['base_model']} (revision {config['base_revision']}), "
            f"whose weights differ from those of {base_of(model)[0]}: load it onto the backbone it belongs to"
        )
    tensor_index(folder / HEAD_WEIGHTS)
    _check_tensors(folder / HEAD_WEIGHTS, model.mrp_head.state_dict())
    model.mrp_head.load_state_dict(load_file(folder / HEAD_WEIGHTS))
    return model


def read_head_config(folder: Path) -> dict:
    path = Path(folder) / HEAD_CONFIG
    if not path.exists():
        raise ValueError(f"{folder} holds no head: {HEAD_CONFIG} is missing")
    return json.loads(path.read_text(encoding="utf-8"))


def _check_tensors(path: Path, expected: dict[str, torch.Tensor]):
    found = {name: tuple(shape) for name, _, shape in tensor_index(path)}
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    missing, left_over = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    wrong = [f"{n} {found[n]} instead of {shapes[n]}" for n in shapes.keys() & found.keys() if found[n] != shapes[n]]
    if missing or left_over or wrong:
        raise ValueError(
            f"{path} does not fit the model: missing tensors: {', '.join(missing) or 'none'}; left-over tensors: "
            f"{', '.join(left_over) or 'none'}; wrong shapes: {', '.join(sorted(wrong)) or 'none'}"
        )

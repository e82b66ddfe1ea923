"""Checkpoints as Hub folders: conversion, heads on their own, model cards, uploads."""

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from transformers import GenerationConfig
from transformers.utils import logging

from modeling_mrp import MRPForDiffusionLM

from .cards import card_license, render_card
from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS, load_head, read_head_config, save_head
from .peft_head import is_fresh
from .weight_files import backbone_hash, base_of, fetch, tensor_index, weight_files, weights_dtype

__all__ = ["Conversion", "check_folder", "convert", "load_head", "push", "render_card", "save_head"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
SAMPLING_VALUES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")

logger = logging.get_logger(__name__)


@dataclass
class Conversion:
    """What `convert` wrote: `head` is "kept", "fresh", "merged" (from `head=`) or "none"."""

    destination: str
    base_model: str
    base_revision: str | None
    head: str
    num_mrp_layers: int
    block_size: int
    dtype: str
    parameters: int


def convert(
    source,
    destination,
    *,
    num_mrp_layers: int | None = None,
    head=None,
    head_init: str = "fresh",
    block_size: int | None = None,
    mask_token_id: int | None = None,
    mrp_residual: bool | None = None,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> Conversion:
    """Write a self-contained remote-code folder from an SDAR, a published SDAR-MRP or one of our own checkpoints.

    Reads `config.json`, safetensors, tokenizer files and generation config; never runs the source's code. The folder
    appears only when it is complete.

    Args:
        source: a folder or a Hub id.
        destination: the folder to write.
        num_mrp_layers: layers of a fresh head (default 3), 0 for none.
        head: a folder or Hub id written by `save_head`, to be merged into the backbone.
        head_init, block_size, mask_token_id, mrp_residual: see `MRPForDiffusionLM.from_backbone`.
        revision: of the source on the Hub.
        max_shard_size: largest weight file, such as "5GB".
        overwrite: replace `destination` when it exists.

    Raises:
        ValueError: for an unreadable or unfitting source, or a destination that exists.
        OSError: when the source cannot be found.
    """
    destination = Path(destination)
    if destination.exists() and not overwrite:
        raise ValueError(f"{destination} exists already: choose another folder, or ask to overwrite it")
    folder, commit = fetch(source, revision)
    if head is not None:
        head = fetch(head)[0]
        trained = read_head_config(head)
        num_mrp_layers, mrp_residual = trained["num_mrp_layers"], trained["mrp_residual"]
    model = MRPForDiffusionLM.from_backbone(
        folder,
        num_mrp_layers=num_mrp_layers,
        head_init=head_init,
        block_size=block_size,
        mask_token_id=mask_token_id,
        mrp_residual=mrp_residual,
        dtype=weights_dtype(folder),
    )
    if head is not None:
        load_head(model, head)
    model.config.base_model, model.config.base_revision = base_of(model, source, commit)
    model.config.base_hash = vars(model.config).get("base_hash") or backbone_hash(model)
    _set_generation_defaults(model)
    report = Conversion(
        destination=str(destination),
        base_model=model.config.base_model,
        base_revision=model.config.base_revision,
        head=_head_origin(model, folder, head),
        num_mrp_layers=model.config.num_mrp_layers,
        block_size=model.config.block_size,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters(),
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as work:
        written = Path(work) / "folder"
        model.save_pretrained(written, max_shard_size=max_shard_size)
        copy_tokenizer(folder, written)
        card = render_card(model, name=destination.name, license=card_license(folder))
        (written / "README.md").write_text(card, encoding="utf-8")
        if destination.exists():
            shutil.rmtree(destination)
        written.rename(destination)
    return report


def _set_generation_defaults(model):
    """Speculative decoding where there is a head; no sampling values that the source itself leaves without effect."""
    generation = model.generation_config
    if model.mrp_head is not None:
        generation.mrp_mode = generation.to_dict().get("mrp_mode") or "spec"
    if generation.do_sample:
        return
    unset = GenerationConfig().to_dict()
    idle = [name for name in SAMPLING_VALUES if generation.to_dict()[name] != unset[name]]
    if idle:  # transformers reads such a file, but refuses to write it
        logger.warning("generation config: %s dropped, they mean nothing without do_sample", ", ".join(idle))
        generation.update(**{name: unset[name] for name in idle})


def copy_tokenizer(source, destination):
    """Copy the tokenizer's files as they are, without references to tokenizer code that stays behind."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, Path(destination) / name)
    path = Path(destination) / "tokenizer_config.json"
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("auto_map", None) is not None:
            path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _head_origin(model, folder, head) -> str:
    if model.mrp_head is None:
        return "none"
    if head is not None:
        return "merged"
    return "fresh" if is_fresh(model) else "kept"


def check_folder(folder) -> None:
    """Refuse a folder that others could not load: incomplete weights or code, or no checkpoint of ours at all.

    Raises:
        ValueError: naming what is wrong.
    """
    folder = Path(folder)
    if (folder / HEAD_CONFIG).exists():
        weights = [folder / name for name in (HEAD_WEIGHTS, ADAPTER_WEIGHTS) if (folder / name).exists()]
        if not weights:
            raise ValueError(f"{folder} is incomplete: missing {HEAD_WEIGHTS}")
        tensor_index(weights[0])
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds neither config.json nor {HEAD_CONFIG}: run `mrp convert` first")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "sdar_mrp":
        raise ValueError(f"{folder} has model_type {config.get('model_type')!r}: run `mrp convert` on it first")
    missing = sorted(name for name in _code_files(folder, config) if not (folder / name).exists())
    if missing:
        raise ValueError(f"{folder} is incomplete: missing {', '.join(missing)}")
    for path in weight_files(folder):
        tensor_index(path)


def _code_files(folder: Path, config: dict) -> set[str]:
    """The code that `auto_map` names and all that it imports from beside it."""
    if not config.get("auto_map"):
        raise ValueError(f"{folder}/config.json has no auto_map: run `mrp convert` on it first")
    files, unread = set(), {f"{target.split('.')[0]}.py" for target in config["auto_map"].values()}
    while unread:
        name = unread.pop()
        files.add(name)
        if (folder / name).exists():
            imported = re.findall(r"^from \.(\w+) import", (folder / name).read_text(encoding="utf-8"), re.MULTILINE)
            unread |= {f"{module}.py" for module in imported} - files
    return files


def push(
    folder,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload the checkpoint",
) -> str:
    """Upload a folder in one commit and return the commit's URL.

    The commit replaces weights and code that the folder no longer has. When anything fails on the way the repository
    stays as it was.

    Args:
        folder: written by `convert`, `save_pretrained` or `save_head`.
        repo_id: "owner/name", made when missing.
        private: for a repository that is made.
        revision: branch, default the main one.

    Raises:
        ValueError: when the folder is incomplete.
        OSError: when the Hub refuses.
    """
    check_folder(folder)
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=str(folder),
        revision=revision,
        commit_message=message,
        delete_patterns=["*.safetensors", "*.safetensors.index.json", "*.py"],
        ignore_patterns=["**/__pycache__/**", "optimizer.pt", "scheduler.pt", "rng_state*", "*.tmp"],
    )
    return commit.commit_url

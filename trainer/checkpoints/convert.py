"""Conversion of a checkpoint into a self-contained folder that loads with `trust_remote_code=True`."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import logging

from modeling_mrp import MRPForDiffusionLM

from .cards import card_license, render_card
from .head_files import load_head, read_head_config
from .lora import is_fresh
from .weight_files import backbone_hash, base_of, fetch, weights_dtype

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

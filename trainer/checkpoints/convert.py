"""Converts a checkpoint into a self-contained folder that loads with `trust_remote_code=True`."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.checkpoint_files import tensor_names
from modeling_mrp.checkpoints import head_prefix

from .cards import card_license, render_card
from .head_files import load_head, read_head_config
from .lora import is_fresh
from .output_paths import check_output
from .tokenizer_files import copy_tokenizer
from .weight_files import backbone_hash, base_of, fetch, weights_dtype

SAMPLING_VALUES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")

logger = logging.get_logger(__name__)


@dataclass
class Conversion:
    """What `convert` wrote.

    Attributes:
        destination: the folder.
        base_model: id or name of the backbone's checkpoint.
        base_revision: its revision on the Hub, if it has one.
        head: "kept" (the source's own), "merged" (from the argument `head`), "fresh", "none", or "dropped" (the
            source's own, because of `num_mrp_layers=0`).
        num_mrp_layers: layers of the head.
        block_size: tokens per block.
        dtype: dtype of the weights.
        parameters: number of parameters.
    """

    destination: str
    base_model: str
    base_revision: str | None
    head: str
    num_mrp_layers: int
    block_size: int
    dtype: str
    parameters: int


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    num_mrp_layers: int | None = None,
    head: str | Path | None = None,
    head_init: str = "fresh",
    block_size: int | None = None,
    mask_token_id: int | None = None,
    mrp_residual: bool | None = None,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> Conversion:
    """Write a self-contained remote-code folder from an SDAR, a published SDAR-MRP or one of our own checkpoints.

    Reads config.json, safetensors, tokenizer files and the generation config; the source's code is never run. The
    destination appears only once it is complete.

    Args:
        source: a local folder or a Hub id.
        destination: the folder to write.
        num_mrp_layers: layers of a fresh head (default 3); 0 drops the head.
        head: a folder or Hub id written by `save_head`, whose head the destination gets.
        head_init: how a fresh head starts, see `MRPForDiffusionLM.from_backbone`.
        block_size: tokens per block, if the source's config does not say or is wrong.
        mask_token_id: id of the mask token, if the source's config does not say.
        mrp_residual: whether the head predicts a change of the logits, see `MRPForDiffusionLM.from_backbone`.
        revision: revision of the source on the Hub.
        max_shard_size: size of the largest weight file, such as "5GB".
        overwrite: replace `destination` if it exists.

    Returns:
        What was written.

    Raises:
        ValueError: if the source cannot be read or does not fit, or the destination exists, cannot be written or
            overlaps with a folder that is read.
        OSError: if the source cannot be found, or the disk is full; an existing destination stays as it was.
    """
    place = Path(destination).resolve()  # through a link, so that its target is replaced and not the link
    _check_places(place, overwrite)
    folder, commit = fetch(source, revision)
    head = None if head is None else fetch(head)[0]
    _check_places(place, overwrite, folder, head)
    if head is not None:
        trained = read_head_config(head)
        for name, given in (("num_mrp_layers", num_mrp_layers), ("mrp_residual", mrp_residual)):
            if given not in (None, trained[name]):
                raise ValueError(f"{name}={given} contradicts the head in {head}, which has {trained[name]}: omit it")
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
    model.config.base_hash = getattr(model.config, "base_hash", None) or backbone_hash(model)
    _set_generation_defaults(model)
    report = Conversion(
        destination=str(destination),
        base_model=model.config.base_model,
        base_revision=model.config.base_revision,
        head=_head_origin(model, head, folder),
        num_mrp_layers=model.config.num_mrp_layers,
        block_size=model.config.block_size,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters(),
    )
    _write(model, folder, place, Path(destination).name, max_shard_size)
    return report


def _write(model: MRPForDiffusionLM, source: Path, destination: Path, name: str, max_shard_size: str):
    """Write everything into a folder beside the destination, and move it there once it is complete."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as work:
        written = Path(work) / "folder"
        try:
            model.save_pretrained(written, max_shard_size=max_shard_size)
        except SafetensorError as error:  # safetensors reports a full disk so
            raise OSError(f"{destination} cannot be written: {error}") from error
        copy_tokenizer(source, written)
        card = render_card(model, name=name, license=card_license(source))
        (written / "README.md").write_text(card, encoding="utf-8")
        replace_folder(written, destination)


def _set_generation_defaults(model: MRPForDiffusionLM):
    """Make `spec` the default mode if there is a head, and drop sampling values that have no effect.

    transformers reads a generation config with, say, a temperature but without do_sample, and refuses to write it.
    """
    generation = model.generation_config
    if model.mrp_head is not None:
        generation.mrp_mode = generation.to_dict().get("mrp_mode") or "spec"
    if generation.do_sample:
        return
    unset = GenerationConfig().to_dict()
    without_effect = [name for name in SAMPLING_VALUES if generation.to_dict()[name] != unset[name]]
    if without_effect:
        logger.warning(
            "generation config: dropping %s, which have no effect without do_sample", ", ".join(without_effect)
        )
        generation.update(**{name: unset[name] for name in without_effect})


def _check_places(destination: Path, overwrite: bool, *sources: Path | None):
    """Check that writing the destination would lose none of the folders that are read, nor the current one."""
    check_output("DST", destination, folder=True)
    if destination.exists() and not overwrite:
        raise ValueError(f"{destination} exists already: choose another folder, or replace it with --overwrite")
    for folder in [path.resolve() for path in sources if path is not None]:
        if folder == destination or folder in destination.parents or destination in folder.parents:
            raise ValueError(f"DST {destination} overlaps with {folder}, which is read: choose another folder")
    if destination in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"DST {destination} holds the current folder: choose another folder")


def replace_folder(written: Path, destination: Path) -> None:
    """Move a complete folder to its place; one that is there is kept until the new one stands, and else restored.

    Args:
        written: the new folder, on the same file system.
        destination: its place, which may hold an older folder.
    """
    if not destination.exists():
        written.rename(destination)
        return
    aside = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.old."))
    destination.rename(aside)  # replaces the empty folder
    try:
        written.rename(destination)
    except BaseException:
        aside.rename(destination)
        raise
    shutil.rmtree(aside)


def _head_origin(model: MRPForDiffusionLM, head: Path | None, source: Path) -> str:
    if model.mrp_head is None:
        return "none" if head_prefix(tensor_names(source)) is None else "dropped"
    if head is not None:
        return "merged"
    return "fresh" if is_fresh(model) else "kept"

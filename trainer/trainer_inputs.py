"""What `MRPTrainer` is given: checks of the model and of FSDP, preparation of data sets, the default collator."""

from typing import Any

from accelerate import FullyShardedDataParallelPlugin
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_mrp import MRPForDiffusionLM

from .arguments import MRPTrainingArguments
from .checkpoints.lora import without_peft
from .data.collator import MRPCollator
from .data.rows import length_of, prepare_dataset
from .data.wording import counted

logger = logging.get_logger(__name__)


def collator_for(
    model: MRPForDiffusionLM | PeftModel, args: MRPTrainingArguments, sequence_length: int | None = None
) -> MRPCollator:
    """Build the collator that these training arguments describe for this model.

    Args:
        model: the model whose block size and special tokens are used.
        args: the training arguments.
        sequence_length: tokens per row; None pads each batch to its longest row.
    """
    config = model.config
    return MRPCollator(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        pad_token_id=config.pad_token_id or 0,
        steps=args.unroll_steps,
        sequence_length=sequence_length,
        seed=args.noise_seed,
        reveal_counts=tuple(args.reveal_counts),
        noise_eps=args.noise_eps,
        noise_per_block=args.noise_per_block,
    )


def prepare_if_raw(dataset: Any, tokenizer: PreTrainedTokenizerBase | None, sequence_length: int | None) -> Any:
    """Tokenize a data set, or each data set of a dict, unless it holds prepared rows already.

    Args:
        dataset: a `Dataset`, an `IterableDataset`, a dict of them, or anything else, which is returned unchanged.
        tokenizer: the tokenizer for raw data.
        sequence_length: tokens per row of raw data; None means 1024.
    """
    if isinstance(dataset, dict):
        return {name: prepare_if_raw(part, tokenizer, sequence_length) for name, part in dataset.items()}
    if isinstance(dataset, Dataset | IterableDataset):
        return prepare_dataset(dataset, tokenizer, sequence_length=sequence_length)
    return dataset


def check_trainable(model: MRPForDiffusionLM | PeftModel | None) -> None:
    """Check that the model has a head and that the head alone requires gradients.

    Raises:
        ValueError: if it does not.
    """
    if model is None:
        raise ValueError("model must be an MRPForDiffusionLM with a head, got None")
    if model.config.num_mrp_layers == 0:
        raise ValueError("the model has no head to train: load it with from_backbone(..., num_mrp_layers=3)")
    trained = [name for name, p in without_peft(model).named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter requires a gradient: load an adapter of the head with is_trainable=True, and an adapter of "
            "the backbone with apply_backbone_adapter"
        )
    not_frozen = [name for name in trained if not name.startswith("mrp_head.")]
    if not_frozen:
        raise ValueError(
            f"only the head can be trained, but {not_frozen[0]} requires a gradient: call model.freeze_backbone()"
        )


def check_functions(functions: dict[str, Any]) -> None:
    """Refuse functions that transformers' `Trainer` would call with logits and labels.

    Args:
        functions: further keyword arguments of the trainer.

    Raises:
        ValueError: naming the first of them.
    """
    for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
        if functions.get(name) is not None:
            raise ValueError(f"{name} is not supported: MRPTrainer computes its own loss and figures, without labels")


def check_fills_a_batch(name: str, dataset: Any, batch_size: int, args: MRPTrainingArguments) -> None:
    """Check that a data set gives at least one batch.

    Args:
        name: what the data set is called in the message.
        dataset: the data set, or None.
        batch_size: rows per device.
        args: the training arguments.

    Raises:
        ValueError: if it has no rows, or fewer than one batch of all devices and `dataloader_drop_last` is set.
    """
    rows = length_of(dataset)
    if rows == 0:
        raise ValueError(f"{name} has no rows")
    if rows is not None and args.dataloader_drop_last and rows < batch_size * args.world_size:
        raise ValueError(
            f"{name} has {counted(rows, 'row')}, and dataloader_drop_last drops what does not fill a batch of "
            f"{batch_size} on each of {counted(args.world_size, 'device')}: nothing would remain. Lower the batch "
            "size or remove dataloader_drop_last"
        )


def warn_of_far_positions(name: str, dataset: Any, sequence_length: int | None, limit: int) -> None:
    """Warn if samples are longer than the positions that the backbone was trained on.

    Args:
        name: what the data set is called in the message.
        dataset: prepared rows, a stream of them, or None.
        sequence_length: tokens per row; None if it varies.
        limit: `max_position_embeddings` of the backbone.
    """
    if dataset is None or (sequence_length is not None and sequence_length <= limit):
        return
    rows = length_of(dataset)
    longest = sequence_length if rows is None else max(max(lengths) for lengths in dataset["lengths"])
    if longest is not None and longest > limit:
        logger.warning(
            "%s has samples of up to %d tokens, but the backbone's max_position_embeddings is %d: it was not trained "
            "on later positions, and its predictions there may be poor",
            name,
            longest,
            limit,
        )


def check_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Check the FSDP options, and switch off FSDP's own mixed precision.

    Raises:
        ValueError: for FSDP1, or when the weights would be loaded on one rank only.
    """
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version must be 2, got {plugin.fsdp_version}: see accelerate-fsdp2.yaml")
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading must be false: every process hashes the backbone's weights before training"
        )
    # FSDP's bf16 would also round gradients and the model's output, whose small differences make up the loss.
    plugin.mixed_precision_policy = MixedPrecisionPolicy()

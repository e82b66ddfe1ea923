"""Options of transformers' TrainingArguments that would have no effect here, or a wrong one, and are refused."""

import re
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

NO_LABELS = "the loss compares the head with the backbone, and there are no labels"
NO_PREDICTIONS = "an evaluation keeps sums on the device and gathers no predictions"
NOT_RESUMABLE = "a run must read the same rows in the same order whenever it is resumed"
OWN_SHARDING = "the head is trained on one device, with DDP or with FSDP2 (see accelerate-fsdp2.yaml)"
REFUSED = {
    "auto_find_batch_size": "the rows per step would depend on free memory; set per_device_train_batch_size, and see "
    "the estimate that is printed at the start",
    "average_tokens_across_devices": "the loss is always divided by the normaliser of all devices",
    "batch_eval_metrics": NO_PREDICTIONS,
    "bf16_full_eval": "it would round the head's float32 weights for good",
    "dataloader_in_order": NOT_RESUMABLE,
    "debug": "it cannot read the outputs of the training forward; a step that is not finite is found without it",
    "deepspeed": OWN_SHARDING,
    "do_predict": "there is nothing to predict; use mrp eval",
    "enable_jit_checkpoint": "mrp train itself saves a checkpoint on SIGTERM",
    "eval_accumulation_steps": NO_PREDICTIONS,
    "eval_do_concat_batches": NO_PREDICTIONS,
    "eval_use_gather_object": NO_PREDICTIONS,
    "fp16_full_eval": "it would round the head's float32 weights for good",
    "ignore_data_skip": NOT_RESUMABLE,
    "include_for_metrics": NO_PREDICTIONS,
    "label_names": NO_LABELS,
    "label_smoothing_factor": NO_LABELS,
    "liger_kernel_config": "Liger has no kernels for this model; the loss has its own, see kl_backend",
    "logging_nan_inf_filter": "a loss that is not finite ends the run; see skip_nonfinite_batches",
    "neftune_noise_alpha": "the frozen backbone stays in eval mode, where no noise is added",
    "parallelism_config": OWN_SHARDING,
    "remove_unused_columns": "the collator needs columns that the model does not",
    "use_cache": "the training forward has its own cache",
    "use_liger_kernel": "Liger has no kernels for this model; the loss has its own, see kl_backend",
}
# Muon trains the matrices and torch's AdamW the rest, each as torch configures it.
REFUSED_WITH_MUON = ("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")
CHECKPOINT_UPLOADS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
# These optimizers take their steps during the backward pass, before a gradient can be checked.
STEPS_IN_BACKWARD = re.compile("lomo|layerwise")
ACCELERATOR = {"split_batches": False, "even_batches": True}  # the only values under which every row counts once
DEPTHS = ("kl_before", "kl_after", "kl_removed", "same_token", "same_pick", "accepted")
FIGURE = re.compile(rf"(.*_)?(loss|expected_tokens_per_forward|tokens_per_forward|({'|'.join(DEPTHS)})_\d+)")
LOWER_IS_BETTER = re.compile(r"(.*_)?(loss|kl_(before|after)_\d+)")


def refuse_unsupported(args: TrainingArguments, muon: bool) -> None:
    """Raise for the first option that is set and has no place in this trainer. Call it on options as they were given.

    Args:
        args: the training arguments, before transformers changes them.
        muon: whether Muon trains the matrices.

    Raises:
        ValueError: naming the option, its value and the reason.
    """
    reasons = dict(REFUSED)
    if muon:
        reasons |= dict.fromkeys(REFUSED_WITH_MUON, "muon_learning_rate chooses the optimizers; unset one of the two")
    for option in fields(args):
        if option.name not in reasons:
            continue
        default = option.default_factory() if option.default is MISSING else option.default
        value = getattr(args, option.name)
        if value != default and (value or default):  # None, "" and [] all mean that nothing is set
            raise ValueError(f"{option.name}={value!r} is not supported: {reasons[option.name]}")
    if STEPS_IN_BACKWARD.search(str(args.optim)):
        raise ValueError(f"optim={args.optim} is not supported: it takes steps before their gradients can be checked")
    if args.hub_strategy in CHECKPOINT_UPLOADS:
        raise ValueError(
            f"hub_strategy={HubStrategy(args.hub_strategy).value} is not supported: it uploads checkpoints with their "
            "optimizer states; use every_save or end"
        )
    metric = args.metric_for_best_model
    if metric is not None and not FIGURE.fullmatch(metric):
        known = ", ".join(f"{name}_1" for name in DEPTHS)
        raise ValueError(
            f"metric_for_best_model={metric} is no figure of an evaluation: expected one of loss, tokens_per_forward, "
            f"expected_tokens_per_forward, {known}, or another depth"
        )


def refuse_accelerator_options(config: Any) -> None:
    """Raise for options of `accelerator_config` under which rows would be counted twice or not at all.

    Args:
        config: the `AcceleratorConfig`.

    Raises:
        ValueError: naming the option.
    """
    for name, only in ACCELERATOR.items():
        if getattr(config, name) != only:
            raise ValueError(
                f"accelerator_config: {name} must be {str(only).lower()}, so that every row counts once per epoch"
            )

"""What shapes the result of a training run, and what may change when it is resumed.

The options of the training arguments fall into three groups. Those in `FREE` do not concern the result. Those in
`CHANGEABLE` may change with `resume_with_changes`, and then take effect. All others must stay as they were; an option
that is in neither list is one of them.
"""

import json
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Where results go and who is told, and how processes and devices do the work. How a step is spread over processes and
# batches is free as long as it takes as many rows: see `run_settings`.
FREE = _names("""
    output_dir overwrite_output_dir resume_from_checkpoint resume_with_changes report_to run_name project
    trackio_space_id trackio_bucket_id trackio_static_space_id disable_tqdm log_level log_level_replica
    log_on_each_node push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    do_train do_eval do_predict per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    local_rank use_cpu ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend ddp_timeout fsdp fsdp_config deepspeed parallelism_config save_on_each_node enable_jit_checkpoint
    debug skip_memory_metrics torch_empty_cache_steps dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    gradient_checkpointing gradient_checkpointing_kwargs
""")
# Settings of the optimizer and its schedule. A checkpoint holds the old ones: they are set again after it was loaded.
OPTIMIZER_SETTINGS = _names("""
    max_steps num_train_epochs learning_rate muon_learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon
""")
# The optimizer's; what is logged, evaluated and saved; and what only rounds the same step in another way.
CHANGEABLE = OPTIMIZER_SETTINGS + _names("""
    max_grad_norm logging_strategy logging_steps logging_first_step logging_nan_inf_filter head_metrics
    include_num_input_tokens_seen eval_data eval_strategy eval_steps eval_delay eval_on_start
    eval_accumulation_steps bf16_full_eval fp16_full_eval decode_prompts decode_new_tokens save_strategy save_steps
    save_total_limit save_only_model load_best_model_at_end metric_for_best_model greater_is_better
    activation_checkpointing activation_checkpointing_kwargs attn_implementation kl_chunk_rows kl_backend tf32
    torch_compile torch_compile_backend torch_compile_mode skip_nonfinite_batches
""")
# Schedules that follow the loss. Where they are after a number of steps cannot be told from the options.
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
ROWS_PER_STEP = "rows per step (per_device_train_batch_size * gradient_accumulation_steps * processes)"


def run_settings(args: TrainingArguments, data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are recorded with a run, by names that fit an error message, as JSON holds them.

    Args:
        args: the training arguments (`MRPTrainingArguments`).
        data: what is known about the data, and further settings of the run.
    """
    values = args.to_dict()
    options = {one.name: values[one.name] for one in fields(args) if one.init and one.name not in FREE}
    settings = {
        ROWS_PER_STEP: args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "Muon (muon_learning_rate)": args.muon_learning_rate is not None,
        **data,
        **options,
    }
    return json.loads(json.dumps(settings, default=str))


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (old value, new value) of each setting that differs; one that only one of them knows is left out.

    Args:
        old: settings of the recorded run.
        new: settings of the run that is to continue it. Another version may know other options.
    """
    return {name: (old[name], new[name]) for name in new if name in old and old[name] != new[name]}


def listed(changes: dict[str, tuple[Any, Any]]) -> str:
    """Return differences in words: `seed: 42 -> 1; max_steps: 100 -> 200`."""
    return "; ".join(f"{name}: {_shown(old)} -> {_shown(new)}" for name, (old, new) in changes.items())


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return f"{text[:12]}..." if is_hash else text

"""`mrp train`: train a head from one YAML file. Several devices: `torchrun ... -m mrp_trainer.train CONFIG.yaml`."""

import gc
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from modeling_mrp import MRPForDiffusionLM

from .argument_parsing import parse_arguments
from .arguments import DataArguments, ModelArguments, MRPTrainingArguments
from .checkpoints.head_files import load_head
from .checkpoints.loading import default_attention, load_tokenizer
from .checkpoints.lora import apply_backbone_adapter, is_fresh, lora_head, without_peft
from .checkpoints.output_paths import check_output
from .checkpoints.resume import last_checkpoint
from .data.reading import load_source
from .data.rows import is_streamed, prepare_dataset
from .hub_uploads import check_hub_options
from .memory import advice, estimate_memory, free_memory
from .mrp_trainer import MRPTrainer
from .recorded_settings import recorded_settings

logger = logging.getLogger("mrp_trainer.train")  # not __name__, which is __main__ under torchrun

INTERRUPTED = 130  # exit status of a process that ^C ended


def main(argv: list[str]) -> int:
    """Train a head, then leave the process group. Returns the exit status."""
    status = train(argv)
    leave_process_group()
    return status


def leave_process_group() -> None:
    """Destroy the process group, if there is one, and let gloo's threads end.

    A process that exits while one of gloo's threads still holds a tensor is aborted.
    """
    if dist.is_initialized():
        gc.collect()  # the trainer is part of reference cycles that hold process groups, and so their threads
        PartialState().destroy_process_group()
        time.sleep(1.0)  # FSDP's caches release their groups a moment later


def train(argv: list[str]) -> int:
    """Train a head as the options say and write it to `output_dir`.

    Args:
        argv: `CONFIG.yaml [--key value ...]`.

    Returns:
        The exit status: 0, or 130 if a signal stopped the run.

    Raises:
        ValueError: if an option is unknown, missing or out of range, if the data does not fit, or if `output_dir`
            holds another run.
    """
    model_args, data_args, args = parse_arguments(argv)
    show_log_lines(logging.INFO if args.process_index == 0 else logging.WARNING)
    check_output("output_dir", args.output_dir, folder=True)
    check_hub_options(args)
    resume = resuming(args)
    trainer = build_trainer(model_args, data_args, args)
    checkpoint = checkpoint_to_resume(args)
    if resume and trainer.is_finished(checkpoint):
        logger.info(
            "the run in %s is finished: nothing to do. More steps: raise max_steps or num_train_epochs and pass "
            "resume_with_changes",
            args.output_dir,
        )
        return 0
    transformers_logging.set_verbosity_info()  # only now: loading would print every config
    report_memory(trainer, data_args.sequence_length)
    interrupt = SaveOnInterrupt()
    trainer.add_callback(interrupt)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_state()
    trainer.save_model()  # after the rest, since it may upload the head and fail to
    if interrupt.requested.is_set():
        return INTERRUPTED
    trainer.finish_run()
    return 0


def show_log_lines(level: int) -> None:
    """Print this package's log messages from `level` on to stderr."""
    package_logger = logging.getLogger("mrp_trainer")
    package_logger.setLevel(level)
    package_logger.handlers = [logging.StreamHandler()]


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: MRPTrainingArguments) -> MRPTrainer:
    """Load model, tokenizer and data and build the trainer.

    Raises:
        ValueError: if a required option is missing, or a stream is given without `max_steps`.
    """
    for name, value in (("base_model", model_args.base_model), ("train_data", data_args.train_data)):
        if value is None:
            raise ValueError(f"{name} is required: set it in the YAML file or pass --{name}")
    if data_args.streaming and args.max_steps <= 0:
        raise ValueError("streaming requires max_steps: a stream has no known length")
    set_seed(args.seed)  # so that a fresh head is the same on every rank and in every run
    model = load_model(model_args, default_attention(args.device, args.bf16 or args.fp16))
    if model.config._attn_implementation == "flex_attention":
        # flex_attention is compiled for about a dozen kinds of shapes. Past dynamo's limit it would run uncompiled,
        # which keeps the full matrix of attention scores in memory.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    tokenizer = load_tokenizer(model_args.base_model, model.config, revision=model_args.base_revision)
    train_rows, eval_rows = load_data(data_args, args, tokenizer)
    settings = recorded_settings(model, model_args, data_args)
    if model_args.lora_rank is not None:
        model = lora_head(model, model_args.lora_rank, alpha=model_args.lora_alpha, dropout=model_args.lora_dropout)
    return MRPTrainer(
        model,
        args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        # Batches of a stream are concatenated across processes, so their rows must all have the same length.
        sequence_length=data_args.sequence_length if data_args.packing or data_args.streaming else None,
        recorded_settings=settings,
    )


def load_model(model_args: ModelArguments, attention: str) -> MRPForDiffusionLM:
    """Load the backbone with its own head, a fresh one, or the one that `head` names.

    Args:
        model_args: the options of the model.
        attention: attention implementation to use if the options name none.
    """
    model = MRPForDiffusionLM.from_backbone(
        model_args.base_model,
        num_mrp_layers=model_args.num_mrp_layers,
        head_init=model_args.head_init,
        block_size=model_args.block_size,
        mask_token_id=model_args.mask_token_id,
        mrp_residual=model_args.mrp_residual,
        revision=model_args.base_revision,
        dtype=model_args.backbone_dtype,
        attn_implementation=model_args.attn_implementation or attention,
    )
    if model_args.base_adapter is not None:
        apply_backbone_adapter(model, model_args.base_adapter)
        if model_args.head_init == "backbone_layers" and is_fresh(model):
            model.copy_backbone_layers_to_head()  # the layers as the adapter changed them
    if model_args.head is not None:
        load_head(model, model_args.head)
    return model


def load_data(
    data_args: DataArguments, args: MRPTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset | IterableDataset, Dataset | None]:
    """Return the prepared rows for training and for evaluation (None without `eval_data`)."""
    eval_rows = None
    with args.main_process_first(desc="tokenize"):
        train_rows = prepared_rows(
            data_args.train_data, data_args.train_split, data_args, tokenizer, data_args.streaming
        )
        if data_args.eval_data:
            eval_rows = prepared_rows(data_args.eval_data, data_args.eval_split, data_args, tokenizer)
    if is_streamed(train_rows) and data_args.shuffle_buffer:
        train_rows = train_rows.shuffle(seed=args.noise_seed, buffer_size=data_args.shuffle_buffer)
    return train_rows, eval_rows


def prepared_rows(
    source: str, split: str, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, streaming: bool = False
) -> Dataset | IterableDataset:
    """Load one data source and tokenize it into rows."""
    dataset = load_source(source, name=data_args.data_config, split=split, streaming=streaming)
    return prepare_dataset(
        dataset,
        tokenizer,
        sequence_length=data_args.sequence_length,
        packing=data_args.packing,
        long_samples=data_args.long_samples,
        append_eos=data_args.append_eos,
        num_proc=data_args.preprocessing_processes,
        prompt_field=data_args.prompt_field,
        answer_field=data_args.answer_field,
    )


def resuming(args: MRPTrainingArguments) -> bool:
    """Return whether an earlier run is to be resumed, if there is one.

    Raises:
        ValueError: if `resume_from_checkpoint` names a folder that does not exist, or the options contradict each
            other.
    """
    wanted = args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return False
    if not _automatic(args) and not Path(wanted).is_dir():
        raise ValueError(f"resume_from_checkpoint: folder {wanted} does not exist (use auto for the last checkpoint)")
    if _automatic(args) and args.overwrite_output_dir:
        raise ValueError(
            f"resume_from_checkpoint: {wanted} resumes the run in output_dir, which overwrite_output_dir deletes: set "
            "resume_from_checkpoint to none to start a new run"
        )
    return True


def _automatic(args: MRPTrainingArguments) -> bool:
    return str(args.resume_from_checkpoint).lower() in ("auto", "true")


def checkpoint_to_resume(args: MRPTrainingArguments) -> str | None:
    """Return the checkpoint folder that `resume_from_checkpoint` means, or None to start from the beginning.

    "auto" and "true" mean the last whole checkpoint of the run in `output_dir`, if there is one.

    Raises:
        ValueError: if it names a folder that does not exist, or contradicts another option.
    """
    if not resuming(args):
        return None
    return last_checkpoint(args.output_dir) if _automatic(args) else str(args.resume_from_checkpoint)


def report_memory(trainer: MRPTrainer, sequence_length: int) -> None:
    """Log the estimated memory of a training step, and what to change if it exceeds the free memory."""
    args = trainer.args
    estimate = estimate_memory(
        without_peft(trainer.model),
        max(args.per_device_train_batch_size, args.per_device_eval_batch_size if trainer.eval_dataset else 0),
        sequence_length,
        args.unroll_steps,
        bool(args.activation_checkpointing),
        shards=args.world_size if trainer.is_fsdp_enabled else 1,
    )
    logger.info("memory: %s", estimate)
    available = free_memory(args.device)
    warning = None if available is None else advice(estimate, available)
    if warning is not None:
        logger.warning("memory: %s", warning)


class SaveOnInterrupt(TrainerCallback):
    """On the first ^C or SIGTERM, saves a checkpoint after the current step and stops; the second stops at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested = threading.Event()
        self.previous_handlers: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Install the signal handlers. Python allows that in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self.previous_handlers = {number: signal.signal(number, self._request_stop) for number in self.SIGNALS}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop and save if a signal has arrived."""
        if args.world_size > 1:
            # The signal may reach only one process, or reach two processes in different steps: agree on the step.
            requested = torch.tensor(int(self.requested.is_set()), device=args.device)
            dist.all_reduce(requested, dist.ReduceOp.MAX)
            if requested:
                self.requested.set()
        if self.requested.is_set():
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the previous signal handlers back."""
        self._restore_handlers()

    def _request_stop(self, number: int, frame: FrameType | None):
        self.requested.set()
        logger.warning("stopping after this step with a checkpoint; interrupt again to stop at once")
        self._restore_handlers()

    def _restore_handlers(self):
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
        self.previous_handlers = {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`mrp train`: from one YAML to a trained head. Several devices: `torchrun ... -m mrp_trainer.train CONFIG.yaml`."""

import gc
import logging
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from modeling_mrp import MRPForDiffusionLM

from .argument_parsing import parse_arguments
from .arguments import DataArguments, ModelArguments, MRPTrainingArguments
from .checkpoints.head_files import load_head
from .checkpoints.loading import default_attention, load_tokenizer
from .checkpoints.lora import apply_backbone_adapter, is_fresh, lora_head, without_peft
from .checkpoints.resume import last_checkpoint
from .data.rows import is_streamed, load_source, prepare_dataset
from .memory import advice, estimate_memory, free_memory
from .mrp_trainer import MRPTrainer

logger = logging.getLogger("mrp_trainer.train")  # not by __name__: torchrun calls it __main__


def main(argv: list[str]) -> int:
    """`train`, and the end of what the processes had in common."""
    status = train(argv)
    part()
    return status


def part():
    """Leave the other processes; gloo's threads would abort one that ends while they still hold a tensor."""
    if dist.is_initialized():
        gc.collect()  # the trainer's cycles hold groups, whose threads end with the last that holds them
        PartialState().destroy_process_group()
        time.sleep(1.0)  # FSDP's caches keep its groups alive: their threads need a moment to let go


def train(argv: list[str]) -> int:
    """Train a head as `argv` (`CONFIG.yaml [--key value ...]`) says; returns the exit status.

    `output_dir` then holds the head alone, with a note of the backbone it belongs to.

    Raises:
        ValueError: for an option that is unknown, missing or out of range, or data that do not fit.
    """
    model_args, data_args, args = parse_arguments(argv)
    show_log_lines(logging.INFO if args.process_index == 0 else logging.WARNING)
    trainer = build_trainer(model_args, data_args, args)
    transformers_logging.set_verbosity_info()  # not before: it would print every config that is loaded
    report_memory(trainer, data_args.sequence_length)
    interrupt = SaveOnInterrupt()
    trainer.add_callback(interrupt)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(args))
    trainer.save_model()
    trainer.save_state()
    return 130 if interrupt.requested.is_set() else 0


def show_log_lines(level: int):
    """Print what this package logs: what became of the data, memory, checkpoints passed over."""
    ours = logging.getLogger("mrp_trainer")
    ours.setLevel(level)
    ours.handlers = [logging.StreamHandler()]


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: MRPTrainingArguments) -> MRPTrainer:
    """Model, tokenizer, data and trainer as the options say."""
    for name, value in (("base_model", model_args.base_model), ("train_data", data_args.train_data)):
        if value is None:
            raise ValueError(f"{name} is required: set it in the YAML or pass --{name}")
    if data_args.streaming and args.max_steps <= 0:
        raise ValueError("streaming needs max_steps: nobody knows how long a stream is")
    set_seed(args.seed)  # a fresh head is the same on every rank and in every run
    model = load_model(model_args, default_attention(args.device, args.bf16 or args.fp16))
    if model.config._attn_implementation == "flex_attention":
        # it is compiled anew for about a dozen kinds of shapes, and past the usual limit keeps every score in memory
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    tokenizer = load_tokenizer(model_args.base_model, model.config, revision=model_args.base_revision)
    with args.main_process_first(desc="tokenize"):
        train = load_rows(data_args.train_data, data_args.train_split, data_args, tokenizer, data_args.streaming)
        evaluation = data_args.eval_data and load_rows(data_args.eval_data, data_args.eval_split, data_args, tokenizer)
    if is_streamed(train) and data_args.shuffle_buffer:
        train = train.shuffle(seed=args.noise_seed, buffer_size=data_args.shuffle_buffer)
    if model_args.lora_rank is not None:
        model = lora_head(model, model_args.lora_rank, alpha=model_args.lora_alpha, dropout=model_args.lora_dropout)
    return MRPTrainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=evaluation or None,
        processing_class=tokenizer,
        # of one length: where a stream feeds several processes, their batches are put together
        sequence_length=data_args.sequence_length if data_args.packing or data_args.streaming else None,
    )


def load_model(model_args: ModelArguments, attention: str) -> MRPForDiffusionLM:
    """The backbone with its own, a fresh, or a given head; `attention` where the options name none."""
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
            model.copy_backbone_layers_to_head()
    if model_args.head is not None:
        load_head(model, model_args.head)
    return model


def load_rows(source: str, split: str, data_args: DataArguments, tokenizer, streaming: bool = False):
    """The prepared rows of one source."""
    dataset = load_source(source, name=data_args.data_config, split=split, streaming=streaming)
    return prepare_dataset(
        dataset,
        tokenizer,
        sequence_length=data_args.sequence_length,
        packing=data_args.packing,
        long_samples=data_args.long_samples,
        append_eos=data_args.append_eos,
        num_proc=data_args.preprocessing_processes,
    )


def checkpoint_to_resume(args: MRPTrainingArguments) -> str | None:
    """The checkpoint folder that `resume_from_checkpoint` names; "auto" and "true" mean the last complete one."""
    wanted = args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() in ("auto", "true"):
        return last_checkpoint(args.output_dir)
    if not Path(wanted).is_dir():
        raise ValueError(f"resume_from_checkpoint: {wanted} is no folder (or use auto for the last checkpoint)")
    return str(wanted)


def report_memory(trainer: MRPTrainer, sequence_length: int):
    """Log what a step will take, and what to change when it will not fit."""
    args = trainer.args
    estimate = estimate_memory(
        without_peft(trainer.model),
        max(args.per_device_train_batch_size, args.per_device_eval_batch_size if trainer.eval_dataset else 0),
        sequence_length,
        args.unroll_steps,
        bool(args.gradient_checkpointing),
        shards=args.world_size if trainer.is_fsdp_enabled else 1,
    )
    logger.info("memory: %s", estimate)
    available = free_memory(args.device)
    warning = available and advice(estimate, available)
    if warning:
        logger.warning("memory: %s", warning)


class SaveOnInterrupt(TrainerCallback):
    """The first ^C (or SIGTERM) saves a checkpoint after the step at hand and stops; the second stops at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested = threading.Event()
        self.usual = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if threading.current_thread() is threading.main_thread():
            self.usual = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1:  # a signal may reach one process alone, or this step of one and the next of another
            requested = torch.tensor(int(self.requested.is_set()), device=args.device)
            dist.all_reduce(requested, dist.ReduceOp.MAX)
            if requested:
                self.requested.set()
        if self.requested.is_set():
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self._restore()

    def _note(self, number, frame):
        self.requested.set()
        logger.warning("stopping after this step with a checkpoint; again to stop at once")
        self._restore()

    def _restore(self):
        for number, handler in self.usual.items():
            signal.signal(number, handler)
        self.usual = {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

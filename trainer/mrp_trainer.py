"""MRPTrainer: transformers' Trainer, training the residual head alone over a frozen backbone.

The objective is that of Multi-token Residual Prediction (arXiv 2605.18817). For each of K reveals it compares

    h_B        the backbone's hidden state on x_k, the state of the block after k reveals (the teacher), and
    h_A + h_C  the backbone's hidden state on x_t, corrected by k steps of the head (the student),

at the positions i that are still masked in x_k:

    loss_k = sum_i KL(softmax(W h_B / T) || softmax(W (h_A + h_C) / T)) T^2 / p_i  /  normaliser_k
    normaliser_k = number of answer tokens - sum of 1 / p_i over the positions revealed by steps 1..k

with the output embedding W and the probability p_i at which position i was masked. The loss is the mean over k.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.utils import ModelOutput, logging

from modeling_mrp import MRPForDiffusionLM

from .arguments import MRPTrainingArguments
from .checkpoints.head_files import backbone_identity
from .checkpoints.sharded import gathered, shard_optimizer_state
from .confident_reveal import NO_LOGITS, reveal_most_confident
from .console import HeadProgress, without_invitation
from .data.collator import MRPCollator
from .data.rows import is_streamed, length_of
from .data.streams import EndlessStream
from .evaluation.acceptance import acceptance_range, decode_figures
from .evaluation.head_metrics import HeadFigures, HeadMetrics, measure_head
from .finite_steps import FiniteSteps
from .held_out import HeldOutPrompts
from .losses.acceptance import chosen_position_loss, chosen_positions, linear_total_variation
from .losses.linear_kl import Choice, linear_kl, linear_kl_and_choice
from .muon import MuonWithAdamW
from .trainer_inputs import (
    check_fsdp,
    check_functions,
    check_trainable,
    collator_for,
    prepare_if_raw,
)

logger = logging.get_logger(__name__)

MODEL_INPUTS = ("input_ids", "revealed_ids", "clean_ids", "segment_ids")


class MRPTrainer(FiniteSteps, HeldOutPrompts):
    """Trains `model.mrp_head` to predict how the backbone's logits change when tokens are revealed.

    Args:
        model: an `MRPForDiffusionLM` with a head, or one wrapped by `lora_head`. Its backbone is frozen and stays in
            eval mode. A backbone in half precision keeps its dtype, and the head is trained in float32.
        args: the training arguments.
        data_collator: an `MRPCollator`; by default one made from `args` and the model's config.
        train_dataset: rows of `prepare_dataset`; or raw text, chat or prompt-completion data, which are then prepared
            with `processing_class` and `sequence_length` tokens per row.
        eval_dataset: the same for evaluation, or a dict of such data sets.
        processing_class: the tokenizer. Required for raw data.
        sequence_length: tokens per row. None pads each batch to its longest row (raw data: rows of up to 1024 tokens).
        callbacks: further callbacks.
        recorded_settings: further settings, by name, that shape the result of the run: with others it cannot be
            resumed.
        **kwargs: further arguments of `Trainer`.

    Checkpoints hold the head, the optimizer and the state of the training, never the backbone. Loading one onto
    another backbone raises a `ValueError`.

    Raises:
        ValueError: if the model has no head or its backbone is not frozen.
    """

    def __init__(
        self,
        model: MRPForDiffusionLM | PeftModel | None = None,
        args: MRPTrainingArguments | None = None,
        data_collator: MRPCollator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        sequence_length: int | None = None,
        callbacks: list[TrainerCallback] | None = None,
        recorded_settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        args = MRPTrainingArguments() if args is None else args
        args._n_gpu = min(1, args.n_gpu)  # one device per process (torchrun starts several), never DataParallel
        check_trainable(model)
        check_functions(kwargs)
        model.mrp_head.float()
        # Head checkpoints record the backbone's commit; transformers sets it only on configs that come from the Hub.
        model.config._commit_hash = getattr(model.config, "_commit_hash", None)
        if data_collator is not None and sequence_length is None:
            sequence_length = data_collator.sequence_length  # rows that it refuses are refused now
        train_dataset, eval_dataset = (
            prepare_if_raw(dataset, processing_class, sequence_length) for dataset in (train_dataset, eval_dataset)
        )
        if data_collator is None:
            data_collator = collator_for(model, args, sequence_length)
        own_callbacks = [_SetNoiseEpoch(data_collator)]
        if is_streamed(train_dataset):  # the rows of a stream carry their epoch themselves
            train_dataset, own_callbacks = EndlessStream(train_dataset), []
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[*own_callbacks, *(callbacks or [])],
            **kwargs,
        )
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(HeadProgress)
        self._recorded_settings = recorded_settings or {}
        self.model_accepts_loss_kwargs = True  # the loss is already divided by that of the whole optimizer step
        self._training_metrics = HeadMetrics.zeros(args.unroll_steps, args.device)
        self._evaluation: _EvaluationSums | None = None  # set while an evaluation runs
        self._backbone_identity = backbone_identity(self.model)  # reads all weights, so before FSDP shards them
        if self.is_fsdp_enabled:
            check_fsdp(self.accelerator.state.fsdp_plugin)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer over the head's parameters: Muon with AdamW if `muon_learning_rate` is set."""
        if self.optimizer is not None:
            return self.optimizer
        args = self.args
        if args.muon_learning_rate is None:
            optimizers = [super().create_optimizer(model)]
        else:
            self.optimizer = MuonWithAdamW(
                self.model, args.muon_learning_rate, args.learning_rate, weight_decay=args.weight_decay
            )
            optimizers = self.optimizer.parts
        for optimizer in optimizers:
            optimizer.register_load_state_dict_pre_hook(shard_optimizer_state)
        return self.optimizer

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train as `Trainer.train` does, then record in the model's config how many drafts held-out prompts accept.

        The head is written to `output_dir` before that is measured; `save_model` writes it again with the record.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the last whole one of the run in `output_dir`.
            **kwargs: further arguments of `Trainer.train`.

        Raises:
            ValueError: if the output folder holds another run; if the checkpoint is damaged, of another run or
                backbone, or of a run with other settings; or if a data set does not fill one batch and
                `dataloader_drop_last` is set.
            NonFiniteError: see `FiniteSteps.train`.
        """
        self.check_data()
        model = self.accelerator.unwrap_model(self.model)
        model.config.trained_acceptance = None
        with without_invitation():
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        if self.held_out_prompts():
            self.save_model(_internal_call=True)  # whatever happens while decoding, the head is on disk
            model.config.trained_acceptance = self.decode_held_out(acceptance_range)
        return output

    def _run_epoch(self, *args, **kwargs):
        """Skip the epoch of a finished run: transformers counts steps after taking them and would run one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    # --- the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Compute the mean over the K steps of sum(loss * weight) / normaliser.

        Args:
            model: the model, possibly wrapped by accelerate.
            inputs: a batch of `MRPCollator`.
            return_outputs: also return the model's output.
            num_items_in_batch: normaliser of the whole optimizer step over all ranks, [K]; None uses that of this
                batch.

        Returns:
            The loss, a scalar that has a gradient even if no position is supervised, so that every rank runs the same
            backward pass.
        """
        if num_items_in_batch is None:
            num_items_in_batch, ranks = _normaliser(_normaliser_and_rows(inputs)), 1
        else:
            # Gradients are averaged over the ranks, but each rank holds only its share of the sum.
            ranks = self.accelerator.num_processes
        losses, out = self._row_losses(model, inputs)
        loss = (losses.sum(0) / num_items_in_batch.to(losses.device)).mean() * ranks
        return (loss, out) if return_outputs else loss

    def nonfinite_rows(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return which rows have a loss or hidden states that are not finite, bool [R]."""
        losses, out = self._row_losses(model, inputs)
        return ~(losses.isfinite().all(-1) & out.corrected_hidden_states.isfinite().flatten(1).all(-1))

    def _row_losses(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ModelOutput]:
        """Return sum(loss * weight) of each row and each of the K steps, [R, K], and the model's output.

        The forward reads 2 + K streams. Of one sample with blocks of 4 (c: a clean token, m: a mask):

            clean_ids            c c c c   c c c c   c c c c    read once by backbone and head; keys and values cached
            input_ids     x_t    c m m c   m m m m   m c m m    backbone only: gives h_A
            revealed_ids  x_1    c c m c   m c m m   m c c m    backbone: h_B;  head step 1: h_A + h_C
                          x_2    c c c c   c c m m   c c c m    backbone: h_B;  head step 2, from the state of step 1

        A block of x_t or x_k attends to itself and to the earlier blocks of clean_ids; it never sees its own clean
        tokens, other states, or earlier noisy blocks. The loss looks at the masks left in x_1..x_K.
        """
        lm_head = gathered(self.accelerator.unwrap_model(self.model).lm_head.weight)  # [V, H]
        if self.args.reveal == "confident":
            bare = self.accelerator.unwrap_model(self.model)
            inputs = reveal_most_confident(bare, inputs, lm_head, self.args.unroll_steps)
        with self.accelerator.autocast():  # accelerate wraps the model in it, except under FSDP2
            out = model(**{name: inputs[name] for name in MODEL_INPUTS}, logits_to_keep=NO_LOGITS, teacher=True)
        weight = inputs["loss_weight"]  # [R, K, L], 0 where x_k shows the token
        # (row, step, position) of each of the N supervised positions. Finding them waits for the device: do it once.
        supervised = (weight > 0).nonzero(as_tuple=True)
        losses = self._losses(out, supervised, inputs, lm_head) * weight[supervised]  # [N]
        if self._wants_metrics():
            self._add_metrics(out, inputs, lm_head)
        # index_put into distinct places is deterministic; index_add into K sums is not, on a GPU.
        return torch.zeros_like(weight).index_put(supervised, losses.to(weight.dtype)).sum(2), out

    def _losses(
        self, out: ModelOutput, supervised: tuple[Tensor, ...], inputs: dict[str, Tensor], lm_head: Tensor
    ) -> Tensor:
        """Return the objective at each of the N supervised positions, [N]."""
        student, teacher = out.corrected_hidden_states[supervised], out.revealed_hidden_states[supervised]  # [N, H]
        losses, choice = self._divergence(student, teacher, lm_head)
        if choice is not None:
            row, step, position = supervised
            block_ids = inputs["block_ids"]  # [R, L], counted over each row
            # One number for each block of each state x_k of each row: every one of them has a position to choose.
            block = (row * inputs["loss_weight"].shape[1] + step) * (block_ids.max() + 1) + block_ids[row, position]
            chosen = chosen_positions(block, choice.score)
            losses = losses + self.args.choice_weight * chosen_position_loss(choice.log_prob, block, chosen)
        return losses

    def _divergence(self, student: Tensor, teacher: Tensor, lm_head: Tensor) -> tuple[Tensor, Choice | None]:
        """Return the divergence at each position, [N], and the teacher's choice if the loss has a term for it."""
        args = self.args
        if args.divergence == "total_variation":
            return linear_total_variation(student, teacher, lm_head), None
        options = {
            "temperature": args.kl_temperature,
            "chunk_rows": "auto" if args.kl_chunk_rows == "auto" else int(args.kl_chunk_rows),
            "backend": args.kl_backend,
        }
        if args.choice_weight:
            return linear_kl_and_choice(student, teacher, lm_head, self.model.config.mask_token_id, **options)
        return linear_kl(student, teacher, lm_head, **options), None

    def _get_num_items_in_batch(self, batch_samples: list[dict], device: torch.device) -> Tensor | None:
        """Return the normaliser [K] of one optimizer step: over all its batches and all ranks."""
        if not batch_samples:
            return None
        self._ignore_repeated_rows(batch_samples[-1], length_of(self.train_dataset), self.args.train_batch_size)
        counts = sum(_normaliser_and_rows(batch) for batch in batch_samples).to(device)
        return _normaliser(self.accelerator.reduce(counts, reduction="sum"))

    def _ignore_repeated_rows(self, batch: dict[str, Tensor], rows: int | None, batch_size: int):
        """Give no weight to the rows that accelerate repeats to fill the last batch of a pass over `rows` rows."""
        if rows is None or self.args.dataloader_drop_last or self.args.world_size == 1:
            return
        last = rows % (batch_size * self.args.world_size)  # rows of the last, incomplete batch over all ranks
        if last and self.accelerator.gradient_state.end_of_dataloader:
            own = max(0, last - batch_size * self.args.process_index)
            for name in ("reveal_step", "loss_weight", "normaliser"):
                batch[name][own:] = 0

    # --- figures

    def _wants_metrics(self) -> bool:
        """Measure the head in evaluations, and in the training steps that end with a log."""
        if self._evaluation is not None:
            return True
        every = self.state.logging_steps
        logs_after_step = bool(every) and (self.state.global_step + 1) % every == 0
        return self.model.training and self.args.head_metrics and logs_after_step

    def _add_metrics(self, out: ModelOutput, inputs: dict[str, Tensor], lm_head: Tensor):
        metrics = measure_head(
            out.last_hidden_state,
            out.corrected_hidden_states,
            out.revealed_hidden_states,
            lm_head,
            inputs["loss_weight"],
            inputs["block_ids"],
            self.model.config.mask_token_id,
        )
        if self._evaluation is None:
            self._training_metrics += metrics
        else:
            self._evaluation.metrics += metrics

    def _figures(self, metrics: HeadMetrics) -> HeadFigures:
        """Return the figures of all ranks together."""
        return HeadMetrics(*self.accelerator.reduce(metrics.stacked(), reduction="sum")).summary()

    def on_skipped_step(self) -> None:
        """Forget the figures of the step: the head is measured in the last step before a log alone."""
        self._training_metrics = HeadMetrics.zeros(self.args.unroll_steps, self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, adding the head's figures to the logs of training."""
        if "loss" in logs and self.args.head_metrics:
            logs.update(self._figures(self._training_metrics).log_entries())
            self._training_metrics = HeadMetrics.zeros(self.args.unroll_steps, self.args.device)
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Return the loss alone: there are no logits and labels to gather."""
        inputs = self._prepare_inputs(inputs)
        self._ignore_repeated_rows(inputs, self._evaluation.rows, self.args.eval_batch_size)
        counts = _normaliser_and_rows(inputs)
        with torch.no_grad():
            sums = self._row_losses(model, inputs)[0].sum(0)
        self._evaluation.losses += torch.cat([sums[None].to(counts), counts])
        return (sums / _normaliser(counts)).mean(), None, None

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate loss and head over the whole data set, and decode some of its prompts.

        The loss is the mean over the whole set, however it is cut into batches.
        """
        steps, device = self.args.unroll_steps, self.args.device
        self._evaluation = _EvaluationSums(
            rows=length_of(dataloader.dataset),
            losses=torch.zeros(3, steps, device=device),
            metrics=HeadMetrics.zeros(steps, device),
        )
        try:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            evaluation = self._evaluation
        finally:
            self._evaluation = None
        sums, *counts = self.accelerator.reduce(evaluation.losses, reduction="sum")
        loss = (sums / _normaliser(torch.stack(counts))).mean().item()
        decoded = self.decode_held_out(decode_figures) or {}
        figures = {"loss": loss} | self._figures(evaluation.metrics).log_entries() | decoded
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        best = f"eval_{(self.args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        if best.startswith(f"{metric_key_prefix}_"):  # without it, as after a failure to decode, the run would end
            output.metrics.setdefault(best, math.nan)
        return output

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the data loader of an evaluation; its noise is that of epoch 0 every time."""
        with self._using_collator(replace(self.data_collator, _epoch=torch.zeros(1, dtype=torch.long))):
            return super().get_eval_dataloader(eval_dataset)

    @contextmanager
    def _using_collator(self, collator: MRPCollator) -> Iterator[None]:
        previous, self.data_collator = self.data_collator, collator
        try:
            yield
        finally:
            self.data_collator = previous


@dataclass
class _EvaluationSums:
    """What one evaluation adds up over its batches.

    Attributes:
        rows: number of rows in the data set; None for a stream.
        losses: [3, K]: weighted losses, normalisers, numbers of supervised positions.
        metrics: sums for the head's figures.
    """

    rows: int | None
    losses: Tensor
    metrics: HeadMetrics


class _SetNoiseEpoch(TrainerCallback):
    """Makes the collator draw other noise in every epoch."""

    def __init__(self, collator: MRPCollator):
        self.collator = collator

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.collator.set_epoch(int(state.epoch or 0))


def _normaliser_and_rows(batch: dict[str, Tensor]) -> Tensor:
    """Return [2, K]: the sum of the rows' normalisers, and the number of supervised positions."""
    return torch.stack([batch["normaliser"].sum(0), (batch["loss_weight"] > 0).sum((0, 2)).float()])


def _normaliser(counts: Tensor) -> Tensor:
    """Return the normaliser [K], at least the number of supervised positions and at least 1.

    The raw normaliser subtracts 1 / p for each revealed position. In a small batch with early reveals at a low p it
    may come out near zero or negative.
    """
    return counts.amax(0).clamp(min=1)

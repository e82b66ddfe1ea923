"""No optimizer step with a loss or gradient that is not finite: such a step ends the run, or is skipped and counted.

One NaN in one gradient makes every weight of the head NaN. transformers would log such a loss as 0 and go on.
"""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from .arguments import MRPTrainingArguments
from .data.collator import PADDING
from .data.rows import NUMBER_BITS, length_of
from .data.wording import counted
from .head_checkpoints import HeadCheckpoints

logger = logging.get_logger(__name__)

NAMED = 20  # samples that a message lists at most


class NonFiniteError(ValueError):
    """The loss or the gradient of an optimizer step is not finite."""


class FiniteSteps(HeadCheckpoints):
    """A `Trainer` that checks the loss and the gradient before each optimizer step.

    Subclasses define `nonfinite_rows`. A check costs one host synchronisation. On several ranks it also costs one
    reduction of a single number, by which all ranks come to the same decision.
    """

    args: MRPTrainingArguments

    def __init__(self, *args: Any, **kwargs: Any):
        self._step_batches: list[tuple[dict[str, Tensor], Tensor]] = []  # of the current step, with their losses
        self._taken = self._skipped = 0  # steps since the last log
        self._taken_in_run = self._skipped_in_run = 0
        self._just_skipped = False
        super().__init__(*args, **kwargs)

    def nonfinite_rows(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return which rows of a batch have a loss or hidden states that are not finite, bool [R]."""
        raise NotImplementedError

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as `Trainer.train` does.

        Raises:
            NonFiniteError: if a loss or gradient is not finite and `skip_nonfinite_batches` is not set, or if every
                step had to be skipped. A checkpoint of the last good step is written first.
        """
        self._step_batches = []
        self._taken = self._skipped = self._taken_in_run = self._skipped_in_run = 0
        output = super().train(*args, **kwargs)
        if not self._skipped_in_run:
            return output
        steps = self._taken_in_run + self._skipped_in_run
        skipped = f"skipped {self._skipped_in_run} of {counted(steps, 'step')}, whose loss or gradient was not finite"
        if not self._taken_in_run:
            raise NonFiniteError(f"nothing was trained: {skipped}")
        logger.warning(skipped)
        return output._replace(training_loss=output.training_loss * steps / self._taken_in_run)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Run forward and backward of one batch; after the last batch of a step, check the whole step.

        Returns:
            The loss of the whole step with its last batch, and zero with the others: a step that is skipped adds
            nothing to the logged loss.

        Raises:
            NonFiniteError: if the step is not finite and must not be skipped.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_batches.append((inputs, loss))
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        batches, self._step_batches = self._step_batches, []
        losses = torch.stack([loss for _, loss in batches])
        bad = ~losses.isfinite().all()
        # With fp16 an overflow is part of finding the loss scale, and the scaler skips the step itself.
        scaled = self.accelerator.scaler is not None
        if not scaled:
            bad |= ~_gradient_norm(self.model).isfinite()
        if not self.accelerator.reduce(bad.float(), reduction="sum").item():
            self._taken, self._taken_in_run, self._just_skipped = self._taken + 1, self._taken_in_run + 1, False
            return losses.sum()
        what = f"step {self.state.global_step + 1}: {self._describe(model, batches)}"
        if not self.args.skip_nonfinite_batches:
            self._stop(model, what)
        self._skipped, self._skipped_in_run, self._just_skipped = self._skipped + 1, self._skipped_in_run + 1, True
        logger.warning("%s; the step is skipped", what)
        if not scaled:
            # Optimizers pass over parameters without a gradient. Those of the model may be unsharded copies by now.
            self.optimizer.zero_grad(set_to_none=True)
        self.on_skipped_step()
        return torch.zeros_like(loss)

    def on_skipped_step(self) -> None:
        """Forget what was measured in a step that is skipped; called on every rank."""

    @property
    def steps_without_loss(self) -> int:
        """Number of steps that were skipped."""
        return self._skipped_in_run

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log. Means of the loss are over the steps that were taken; `skipped_steps` counts the others."""
        if "loss" in logs and self._skipped:
            logs["skipped_steps"] = self._skipped
            if self._just_skipped:
                logs.pop("grad_norm", None)
            if self._taken:
                logs["loss"] *= (self._taken + self._skipped) / self._taken
            else:  # there is no loss to report
                del logs["loss"]
        if "loss" in logs or "skipped_steps" in logs:
            self._taken = self._skipped = 0
        if "train_loss" in logs and self._skipped_in_run:
            logs["skipped_steps_in_run"] = self._skipped_in_run
        super().log(logs, start_time)

    def _describe(self, model: nn.Module, batches: list[tuple[dict[str, Tensor], Tensor]]) -> str:
        """Say what is not finite, and in which samples of which rank. Every rank must call this."""
        bad, samples = [], []
        for inputs, _ in batches:  # all of them, since under FSDP every rank must run as many forwards
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                bad += _samples(inputs["sample_ids"][self.nonfinite_rows(model, inputs)])
            samples += _samples(inputs["sample_ids"])
        loss_is_finite = all(loss.isfinite() for _, loss in batches)
        ranks = gather_object([(self.args.process_index, loss_is_finite, bad, samples)])
        kind = "gradient" if all(finite for _, finite, _, _ in ranks) else "loss"
        found = any(bad for _, _, bad, _ in ranks)  # if not, the backward pass alone overflows: name the whole step
        streamed = length_of(self.train_dataset) is None
        named = [
            (f"rank {rank}: " if len(ranks) > 1 else "") + _listed(bad if found else samples, streamed)
            for rank, _, bad, samples in ranks
            if bad or not found
        ]
        return f"the {kind} is not finite in the samples with sample_ids {'; '.join(named)}"

    def _stop(self, model: nn.Module, what: str):
        """Save the weights as they were before this step, and raise."""
        kept = "nothing was trained before it"
        if self.state.global_step > 0:
            self._save_checkpoint(model, trial=None)
            kept = f"the weights before it are in {self.args.output_dir}/checkpoint-{self.state.global_step}"
        raise NonFiniteError(
            f"{what}. Training stopped before this step; {kept}. Check these samples, lower the learning rate, or set "
            "skip_nonfinite_batches: true"
        )


def _gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients, over all shards."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _samples(sample_ids: Tensor) -> list[int]:
    """Return the samples of some rows of `sample_ids` [rows, L], in order."""
    return [number for number in dict.fromkeys(sample_ids.flatten().tolist()) if number != PADDING]


def _listed(sample_ids: list[int], streamed: bool) -> str:
    """List samples, with the row of the data that `prepare_dataset` numbered them by."""
    rows = [number >> 2 * NUMBER_BITS for number in sample_ids[:NAMED]]
    named = [
        f"{number} (row {row} of the data)" if row and not streamed else str(number)
        for number, row in zip(sample_ids, rows, strict=False)
    ]
    more = len(sample_ids) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")

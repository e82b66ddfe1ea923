"""The held-out prompts of a run: checked before the first step, and decoded so that no failure costs the run."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from transformers import Trainer
from transformers.utils import logging

from .arguments import MRPTrainingArguments
from .data.collator import MRPCollator
from .data.wording import counted
from .evaluation.acceptance import decodable, prompts_of
from .failing_together import failing_together
from .trainer_inputs import check_fills_a_batch, warn_of_far_positions

logger = logging.get_logger(__name__)


class HeldOutPrompts(Trainer):
    """A `Trainer` that decodes prompts of its held-out data."""

    args: MRPTrainingArguments
    data_collator: MRPCollator

    def __init__(self, *args: Any, **kwargs: Any):
        self._refused_prompts: Counter[str] = Counter()  # those that a warning has named
        super().__init__(*args, **kwargs)

    def check_data(self) -> None:
        """Check before the first step what would otherwise end or spoil the run later.

        Raises:
            ValueError: if a data set gives not a single batch.
        """
        args = self.args
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        named = {"train_dataset": (self.train_dataset, args.train_batch_size)}
        named |= {f"eval_dataset {name}".strip(): (part, args.eval_batch_size) for name, part in evaluated.items()}
        for name, (dataset, batch_size) in named.items():
            check_fills_a_batch(name, dataset, batch_size, args)
            limit = self.model.config.max_position_embeddings
            warn_of_far_positions(name, dataset, self.data_collator.sequence_length, limit)
        self.held_out_prompts()

    def held_out_prompts(self) -> list[list[int]]:
        """Return the held-out prompts that can be decoded, and warn once if there are others."""
        rows, config = self.eval_dataset, self.model.config
        if isinstance(rows, dict):
            rows = next(iter(rows.values()))
        if rows is None:
            return []
        prompts, refused = decodable(prompts_of(rows, self.args.decode_prompts, config.block_size), config)
        if refused != self._refused_prompts:
            for reason, count in refused.items():
                prompts_are = counted(count, "held-out prompt is", "held-out prompts are")
                logger.warning("%s not decoded: %s", prompts_are, reason)
        self._refused_prompts = refused
        return prompts

    def decode_held_out(self, measure: Callable[..., dict | None]) -> dict | None:
        """Return what a function measures on the held-out prompts, decoded with the head in chains of K head steps.

        Whatever goes wrong is a warning, on all processes if it goes wrong on one: figures are not worth the loss of a
        run.

        Args:
            measure: called with model, prompts, number of drafts and number of new tokens.

        Returns:
            Its result; None if there are no prompts or it failed.
        """
        args, model = self.args, self.accelerator.unwrap_model(self.model)
        prompts, training = self.held_out_prompts(), model.training
        if not prompts:
            return None
        model.eval()
        try:
            with failing_together(model, args.device):
                return measure(model, prompts, args.unroll_steps + 1, args.decode_new_tokens)
        except Exception as error:
            logger.warning("held-out prompts could not be decoded, and their figures are missing: %r", error)
            return None
        finally:
            model.train(training)

"""Evaluate a model on held-out samples of an embedded task (hub_cards/tasks), without a results folder."""

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM

from .modes import DEMO_MODES, mode_options
from .runs import Settings, evaluate
from .scorers import Scorer
from .summary import ModeFigures, summarise

# Keys of a row in the demo's JSON output and in its result file, and the fields of `ModeFigures` that they show.
DEMO_KEYS = {
    "name": "mode",
    "accuracy": "accuracy",
    "tokens_per_forward": "tokens_per_forward",
    "backbone_forwards": "forwards",
    "wall_clock_ratio": "time_ratio",
    "identical": "identical",
}


class Task(Protocol):
    """What an evaluation reads of one of `hub_cards.tasks.tasks.TASKS`.

    Attributes:
        tokenizer: the tokenizer of prompts and answers.
        answer_tokens: largest length of an answer.
        right_when: when an answer is right, in words; None if the task has no such rule.
    """

    tokenizer: PreTrainedTokenizerBase
    answer_tokens: int
    right_when: str | None

    def right(self, sample: object, text: str) -> bool:
        """Return whether `text` is a right answer to the sample."""


def evaluate_task(
    model: MRPForDiffusionLM,
    task: Task,
    samples: Sequence,
    modes: dict[str, dict] | None = None,
    batch_size: int = 100,
) -> list[ModeFigures]:
    """Decode every sample in every mode, greedily, and return the figures of each mode.

    Args:
        model: the model, in eval mode on its device.
        task: the task.
        samples: samples of its `held_out`, each with a `prompt`.
        modes: options of `generate` by name (default: `DEMO_MODES`); the first mode is the reference of `time_ratio`
            and `identical`.
        batch_size: samples decoded together.
    """
    modes = modes or {name: mode_options(name, model.config.block_size) for name in DEMO_MODES}
    rows = [{"prompt": sample.prompt, "number": number} for number, sample in enumerate(samples)]
    settings = Settings(modes, task.right_when or "none", task.answer_tokens, batch_size, raw=True)
    records = evaluate(model, task.tokenizer, rows, task_scorer(task, samples), settings)
    return [ModeFigures(**row) for row in summarise(records, list(modes))["rows"]]


def demo_rows(figures: Sequence[ModeFigures]) -> list[dict]:
    """Return the rows of the demo's JSON output, one for each mode."""
    return [{key: getattr(row, name) for key, name in DEMO_KEYS.items()} for row in figures]


def task_scorer(task: Task, samples: Sequence) -> Scorer | None:
    """Return the scorer of rows whose `number` is the index of their sample; None without `right_when`."""
    if task.right_when is None:
        return None
    return lambda text, row: task.right(samples[row["number"]], text)

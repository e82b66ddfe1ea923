"""How each embedded checkpoint is built: sizes, training lengths, training samples, and its part of the card."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from modeling_mrp import MRPForDiffusionLM

from ..tasks.python_functions import Function
from ..tasks.references import References
from ..tasks.tasks import TASKS, PythonFunctions, Sample, WordProblems, shuffled
from ..tasks.word_problems import Problem, problem, statement
from .tiny_backbone import BackboneRecipe, bits_per_token, encode_sample

HELD_OUT_SAMPLES = 200  # of each split that a checkpoint keeps references to


@dataclass(frozen=True)
class WordsRecipe:
    """Builds the checkpoint of the word problems.

    The first samples of the backbone's training are statements: they teach it to copy names and things.

    Attributes:
        task: the task that the checkpoint solves.
        shape: sizes of the backbone, as fields of `MRPConfig`.
        backbone: recipe of the backbone's training.
        head_steps: training steps of the head on random states.
        refine_steps: training steps of the head on the states that decoding visits.
        refine_samples: number of prompts whose decoding provides those states.
        statements: how many of the backbone's samples are statements.
    """

    task: WordProblems
    shape: dict[str, int]
    backbone: BackboneRecipe
    head_steps: int
    refine_steps: int
    refine_samples: int
    statements: int
    description: ClassVar[str] = (
        "The task: grade-school word problems with two to six worked steps (`hub_cards/tasks/word_problems.py`). An "
        "answer is right when every step, the name, the thing and the number are."
    )

    def backbone_sample(self, number: int) -> Problem:
        """Sample of the backbone's training, by number."""
        return statement(number) if number < self.statements else problem("train", number)

    def head_sample(self, number: int) -> Problem:
        """Sample of the head's training, by number: problems that the backbone was not trained on."""
        return problem("train", number, seed=1)

    def quality(self, model: MRPForDiffusionLM, samples: Sequence[Sample]) -> str:
        """A sentence for the card about the backbone's quality; empty, since the table holds accuracies."""
        return ""

    def extra_files(self) -> dict[str, str]:
        """Further files of the checkpoint's folder, text by name: none, since the problems are the same everywhere."""
        return {}


@dataclass(frozen=True)
class CodeRecipe:
    """Builds the checkpoint of the Python functions, training on the same functions in one pass after another.

    The attributes are those of `WordsRecipe`; there are no statements.
    """

    task: PythonFunctions
    shape: dict[str, int]
    backbone: BackboneRecipe
    head_steps: int
    refine_steps: int
    refine_samples: int
    description: ClassVar[str] = (
        "The task: bodies of functions of Python's standard library, from their line of `def` "
        "(`hub_cards/tasks/python_functions.py`): without docstrings and comments, written in one style, 300 "
        "characters at most. The files of the test functions are held out."
    )

    def backbone_sample(self, number: int) -> Function:
        """Sample of the backbone's training, by number; every pass has another order."""
        epoch, place = divmod(number, len(self.task.training))
        return self.task.training[shuffled(len(self.task.training), epoch)[place]]

    def head_sample(self, number: int) -> Function:
        """Sample of the head's training, by number: the same functions in orders of their own."""
        epoch, place = divmod(number, len(self.task.training))
        return self.task.training[shuffled(len(self.task.training), -1 - epoch)[place]]

    def quality(self, model: MRPForDiffusionLM, samples: Sequence[Sample]) -> str:
        """A sentence for the card: bits per token, and the share of completions that parse."""
        tokenizer = self.task.tokenizer
        rows = [encode_sample(tokenizer, sample, model.config.block_size) for sample in samples]
        bits = bits_per_token(model, tokenizer, rows)
        inputs = tokenizer([sample.prompt for sample in samples], return_tensors="pt", padding=True)
        ids = model.generate(**inputs, mrp_mode=None, max_new_tokens=self.task.answer_tokens)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return (
            f"The backbone needs at most {bits:.2f} bits per token of the held-out functions (the mean over all "
            f"orders of revealing a block, an upper bound), and {self.task.parsing_share(samples, texts):.1%} of its "
            "completions parse as one whole function with their prompt."
        )

    def extra_files(self) -> dict[str, str]:
        """Further files of the checkpoint's folder, text by name: references to the held-out functions."""
        splits = {split: self.task.draw_held_out(split, HELD_OUT_SAMPLES) for split in ("validation", "test")}
        return {"held_out.json": References.of(splits).to_json()}


Recipe = WordsRecipe | CodeRecipe

RECIPES: dict[str, Recipe] = {
    "words": WordsRecipe(
        task=TASKS["words"],
        shape={"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12, "head_dim": 32},
        backbone=BackboneRecipe(steps=1700),
        head_steps=600,
        refine_steps=900,
        refine_samples=4800,
        statements=4864,
    ),
    "code": CodeRecipe(
        task=TASKS["code"],
        shape={"hidden_size": 160, "intermediate_size": 384, "num_hidden_layers": 8, "head_dim": 40},
        backbone=BackboneRecipe(steps=2400, pool_batches=16),
        head_steps=400,
        refine_steps=400,
        refine_samples=2400,
    ),
}

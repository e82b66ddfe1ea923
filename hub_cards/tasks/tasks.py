"""What the embedded checkpoints are trained on and shown with: one task for each."""

import json
import random
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from transformers import AutoTokenizer

from . import code_tokenizer, word_tokenizer
from .python_functions import Function, functions, parses
from ..build.tiny_backbone import Recipe, bits_per_token, encode_sample
from .word_problems import Problem, problem, problems, score, statement

CARDS = Path(__file__).parents[1]


class WordProblems:
    """Grade-school word problems with worked steps; there is no end of different ones.

    The first samples are statements: they teach the backbone to copy names and things.
    """

    name = "words"
    folder = CARDS / "sdar-tiny-mrp"
    description = (
        "The task: grade-school word problems with two to six worked steps (`hub_cards/tasks/word_problems.py`). An answer "
        "is right when every step, the name, the thing and the number are."
    )
    answer_tokens = 48
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12, "head_dim": 32}
    recipe = Recipe(steps=1700)
    head_steps = 600
    refine_steps = 900
    refine_samples = 4800
    statements = 4864
    right_when = "every step, name, thing and number right"

    @cached_property
    def tokenizer(self):
        return word_tokenizer.build_tokenizer()

    def backbone_sample(self, number: int) -> Problem:
        """Sample of the backbone's training, by number."""
        return statement(number) if number < self.statements else problem("train", number)

    def head_sample(self, number: int) -> Problem:
        """Sample of the head's training: problems new to the backbone."""
        return problem("train", number, seed=1)

    def held_out(self, split: str, n: int) -> list[Problem]:
        """The first samples of `validation` or `test`."""
        return list(problems(split, n))

    def right(self, sample: Problem, text: str) -> bool:
        """Whether the text that a model wrote is a right answer, in all its parts."""
        return score(sample, text).worked

    def quality(self, model, samples) -> str:
        """Nothing beside the accuracies."""
        return ""

    def extra_files(self) -> dict[str, str]:
        """None: the samples can be drawn anywhere."""
        return {}


class PythonFunctions:
    """Bodies of the standard library's functions, from their line of `def`; pass after pass over the same ones.

    The tokenizer and the held-out functions of the published figures lie in the checkpoint's folder and are taken from
    there once it exists: the library differs from one interpreter to the next.
    """

    name = "code"
    folder = CARDS / "sdar-tiny-code-mrp"
    description = (
        "The task: bodies of functions of Python's standard library, from their line of `def` "
        "(`hub_cards/tasks/python_functions.py`): without docstrings and comments, written in one style, 300 characters at "
        "most. The files of the test functions are held out."
    )
    answer_tokens = 96
    prompt_tokens = 24
    shape = {"hidden_size": 160, "intermediate_size": 384, "num_hidden_layers": 8, "head_dim": 40}
    recipe = Recipe(steps=2400, pool_batches=16)
    head_steps = 400
    refine_steps = 400
    refine_samples = 2400
    right_when = None  # a body can be right in too many ways

    @cached_property
    def tokenizer(self):
        if (self.folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(self.folder)
        return code_tokenizer.build_tokenizer(f.prompt + f.answer for f in functions("train"))

    @cached_property
    def training(self) -> list[Function]:
        """All training functions that fit."""
        return self._fitting(functions("train"))

    def backbone_sample(self, number: int) -> Function:
        """Sample of the backbone's training, by number; every pass has another order."""
        epoch, place = divmod(number, len(self.training))
        return self.training[_shuffled(len(self.training), epoch)[place]]

    def head_sample(self, number: int) -> Function:
        """Sample of the head's training: the same functions in an order of their own."""
        epoch, place = divmod(number, len(self.training))
        return self.training[_shuffled(len(self.training), -1 - epoch)[place]]

    def held_out(self, split: str, n: int) -> list[Function]:
        """The first samples of `validation` or `test`: the checkpoint's, else of this interpreter's library."""
        file = self.folder / "held_out.json"
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))[split]
            return [Function(**one) for one in stored[:n]]
        return self.draw_held_out(split, n)

    def draw_held_out(self, split: str, n: int) -> list[Function]:
        """Held-out functions of this interpreter's library, drawn at random."""
        fitting = self._fitting(functions(split))
        return [fitting[place] for place in _shuffled(len(fitting), 0)[:n]]

    def quality(self, model, samples: Sequence[Function]) -> str:
        """Bits per token and the share of completions that parse."""
        rows = [encode_sample(self.tokenizer, sample, model.config.block_size) for sample in samples]
        bits = bits_per_token(model, self.tokenizer, rows)
        inputs = self.tokenizer([sample.prompt for sample in samples], return_tensors="pt", padding=True)
        ids = model.generate(**inputs, mrp_mode=None, max_new_tokens=self.answer_tokens)
        texts = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return (
            f"The backbone needs at most {bits:.2f} bits per token of the held-out functions (the mean over all "
            f"orders of revealing a block, an upper bound), and {self.parsing_share(samples, texts):.1%} of its "
            "completions parse as one whole function with their prompt."
        )

    def extra_files(self) -> dict[str, str]:
        """The held-out functions, by split."""
        splits = {split: [vars(f) for f in self.draw_held_out(split, 200)] for split in ("validation", "test")}
        return {"held_out.json": json.dumps(splits, indent=0)}

    def parsing_share(self, samples: Sequence[Function], texts: Sequence[str]) -> float:
        """Share of completions that parse as one whole function with their prompt."""
        return sum(parses(s.prompt, text) for s, text in zip(samples, texts, strict=True)) / len(samples)

    def _fitting(self, candidates: Sequence[Function]) -> list[Function]:
        prompts = self.tokenizer([f.prompt for f in candidates])["input_ids"]
        answers = self.tokenizer([f.answer for f in candidates])["input_ids"]
        return [
            function
            for function, prompt, answer in zip(candidates, prompts, answers, strict=True)
            if len(prompt) <= self.prompt_tokens and len(answer) < self.answer_tokens
        ]


@cache
def _shuffled(n: int, seed: int) -> list[int]:
    return random.Random(f"order {seed}").sample(range(n), n)


TASKS = {"words": WordProblems(), "code": PythonFunctions()}

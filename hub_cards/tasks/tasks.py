"""The tasks of the embedded checkpoints: tokenizer, samples, splits and scoring of each."""

import platform
import random
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from . import code_tokenizer, word_tokenizer
from .python_functions import Function, functions, parses
from .references import Reference, References
from .word_problems import Problem, problems, score

CARDS = Path(__file__).parents[1]


class WordProblems:
    """Grade-school word problems with worked steps.

    Attributes:
        name: short name of the task, which also names its checkpoint on the command line.
        folder: folder of the embedded checkpoint.
        answer_tokens: number of new tokens that every answer fits into.
        right_when: what makes an answer right, in words; None if the task cannot tell.
    """

    name = "words"
    folder = CARDS / "sdar-tiny-mrp"
    answer_tokens = 48
    right_when = "every step, name, thing and number right"

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer.build_tokenizer()

    def held_out(self, split: str, n: int) -> list[Problem]:
        """The first n problems of the `validation` or `test` split."""
        return list(problems(split, n))

    def note(self, split: str, n: int) -> str:
        """Always empty: the problems are the same everywhere."""
        return ""

    def right(self, sample: Problem, text: str) -> bool:
        """Whether every step, the name, the thing and the number are right."""
        return score(sample, text).worked


class PythonFunctions:
    """Bodies of the standard library's functions, given their `def` lines.

    The standard library differs from one Python version to the next. The checkpoint's folder therefore holds the
    tokenizer, and references to the held-out functions on which its figures were measured. Those that the running
    interpreter lacks, or has in another version, are left out. Without such a folder, as during the first build, the
    held-out functions are drawn from the running interpreter's library.

    Attributes:
        name, folder, answer_tokens, right_when: as in `WordProblems`.
        prompt_tokens: the most tokens that the prompt of a function in use may have.
    """

    name = "code"
    folder = CARDS / "sdar-tiny-code-mrp"
    answer_tokens = 96
    prompt_tokens = 24
    right_when = None  # the same behaviour can be written in too many ways

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        if (self.folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(self.folder)
        return code_tokenizer.build_tokenizer(f.prompt + f.answer for f in functions("train"))

    @cached_property
    def references(self) -> References | None:
        """The checkpoint's references to its held-out functions; None if the folder holds none."""
        file = self.folder / "held_out.json"
        return References.read(file) if file.is_file() else None

    @cached_property
    def training(self) -> list[Function]:
        """All training functions whose prompt and answer are short enough."""
        return self._fitting(functions("train"))

    def held_out(self, split: str, n: int) -> list[Function]:
        """The first n functions of the `validation` or `test` split, without those that this Python does not have.

        Raises:
            ValueError: if this Python has none of them.
        """
        if self.references is None:
            return self.draw_held_out(split, n)
        found = [function for function in map(Reference.find, self.references.splits[split][:n]) if function]
        if n > 0 and not found:
            raise ValueError(
                f"none of the first {n} {split} functions is in the standard library of Python "
                f"{platform.python_version()} as it is in that of {self.references.python}; use Python "
                f"{self.references.python} with its complete standard library, tests included"
            )
        return found

    def left_out(self, split: str, n: int) -> int:
        """How many of the first n references `held_out` leaves out, because this Python lacks or differs in them."""
        if self.references is None:
            return 0
        return sum(reference.find() is None for reference in self.references.splits[split][:n])

    def note(self, split: str, n: int) -> str:
        """How many of the first n functions are left out under this Python; empty if none is."""
        left_out = self.left_out(split, n)
        if not left_out:
            return ""
        total, verb = len(self.references.splits[split][:n]), "is" if left_out == 1 else "are"
        return (
            f"{left_out} of {total} held-out functions {verb} missing or different in Python "
            f"{platform.python_version()} and {verb} left out (the full set is that of {self.references.python})"
        )

    def draw_held_out(self, split: str, n: int) -> list[Function]:
        """Held-out functions of the running interpreter's library, drawn at random with a fixed seed."""
        fitting = self._fitting(functions(split))
        return [fitting[place] for place in shuffled(len(fitting), 0)[:n]]

    def parsing_share(self, samples: Sequence[Function], texts: Sequence[str]) -> float:
        """Share of the texts that are one complete function together with their sample's prompt."""
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
def shuffled(n: int, seed: int) -> list[int]:
    """The numbers 0 to n - 1 in a random order that depends on n and the seed alone."""
    return random.Random(f"order {seed}").sample(range(n), n)


Task = WordProblems | PythonFunctions
Sample = Problem | Function

TASKS: dict[str, Task] = {"words": WordProblems(), "code": PythonFunctions()}

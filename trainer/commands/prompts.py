"""Prompts of a command: those that the user gives, or built-in ones."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hub_cards.tasks.word_problems import problems

from ..data.json_lines import text_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost?",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name four large rivers of Europe and say where each of them ends.",
    "List the first ten prime numbers.",
)


def read_prompts(given: Sequence[str] | None, file: str | None = None, required: bool = True) -> list[str]:
    """Collect the prompts of `--prompt` and `--prompt-file`, without blank ones.

    Args:
        given: values of `--prompt`.
        file: path of a file with one prompt per line, "-" for standard input, or None.
        required: whether it is an error to give neither.

    Returns:
        The prompts; an empty list when neither was given and none is required.

    Raises:
        ValueError: when what was given holds no prompt or is not UTF-8, or nothing was given and a prompt is required.
    """
    lines = list(given or [])
    if file == "-":
        lines += [line for _, line in text_lines(sys.stdin.buffer, "standard input")]
    elif file is not None:
        with open(file, "rb") as stream:
            lines += [line for _, line in text_lines(stream, file)]
    prompts = [line for line in lines if line.strip()]
    if prompts:
        return prompts
    if given or file is not None:
        where = {None: "--prompt", "-": "standard input"}.get(file, f"--prompt-file {file}")
        raise ValueError(f"{where} holds no prompt: give one per line")
    if required:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompt-file FILE")
    return []


def built_in_prompts(tokenizer: "PreTrainedTokenizerBase", count: int = len(QUESTIONS)) -> Sequence[str]:
    """General questions, or `count` word problems when the tokenizer does not know the words of the questions."""
    unknown = tokenizer.unk_token_id
    ids = [token for row in tokenizer(list(QUESTIONS))["input_ids"] for token in row]
    if unknown is None or unknown not in ids:
        return QUESTIONS
    return [problem.prompt for problem in problems("test", count)]

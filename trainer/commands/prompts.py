"""Prompts of a command: those that the user gives, or built-in ones."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hub_cards.tasks.word_problems import problems

QUESTIONS = (
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost?",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name four large rivers of Europe and say where each of them ends.",
    "List the first ten prime numbers.",
)


def read_prompts(arguments, required: bool = True) -> list[str]:
    """The prompts of `--prompt` and `--prompt-file`; none when neither was given and none are required.

    Raises:
        ValueError: when there is no prompt in what was given, or none at all where one is required.
    """
    given, file = list(arguments.prompt), arguments.prompt_file
    if file == "-":
        given += sys.stdin.read().splitlines()
    elif file is not None:
        given += Path(file).read_text(encoding="utf-8").splitlines()
    prompts = [prompt for prompt in given if prompt.strip()]
    if prompts or not (required or arguments.prompt or file is not None):
        return prompts
    where = {None: "--prompt", "-": "standard input"}.get(file, f"--prompt-file {file}")
    if arguments.prompt or file is not None:
        raise ValueError(f"{where} holds no prompt: give one per line")
    raise ValueError("there is no prompt: give --prompt TEXT or --prompt-file FILE")


def built_in_prompts(tokenizer, count: int = len(QUESTIONS)) -> Sequence[str]:
    """General questions, or word problems for the embedded tokenizer, which knows no other words."""
    unknown = tokenizer.unk_token_id
    ids = [token for row in tokenizer(list(QUESTIONS))["input_ids"] for token in row]
    if unknown is None or unknown not in ids:
        return QUESTIONS
    return [problem.prompt for problem in problems("test", count)]

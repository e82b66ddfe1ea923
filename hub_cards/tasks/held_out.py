"""Held-out samples of the embedded tasks as a data file for `mrp eval`, and the scorer that judges them.

python -m hub_cards.tasks.held_out words > problems.jsonl
mrp eval sdar-tiny-mrp --data problems.jsonl --scorer hub_cards.tasks.held_out:right --raw --max-new-tokens 48
"""

import argparse
import json

from .python_functions import parses
from .tasks import TASKS
from .word_problems import problem, score


def right(text: str, row: dict) -> bool:
    """A word problem: every step, name, thing and number right. A function: prompt and completion parse as one."""
    if row["task"] == "code":
        return parses(row["prompt"], text)
    return score(problem(row["split"], row["number"]), text).worked


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="default: test")
    parser.add_argument("--samples", type=int, default=200, help="default: 200")
    options = parser.parse_args(arguments)
    for number, sample in enumerate(TASKS[options.task].held_out(options.split, options.samples)):
        row = {"prompt": sample.prompt, "answer": sample.answer}
        print(json.dumps(row | {"task": options.task, "split": options.split, "number": number}))


if __name__ == "__main__":
    main()

"""Write held-out samples of an embedded task as a data file for `mrp eval`; `right` is the scorer for it.

python -m hub_cards.tasks.held_out words > words-test.jsonl
mrp eval sdar-tiny-mrp --data words-test.jsonl --scorer hub_cards.tasks.held_out:right --raw --max-new-tokens 48
"""

import argparse
import json
import sys

from .python_functions import parses
from .tasks import TASKS
from .word_problems import problem, score


def right(text: str, row: dict) -> bool:
    """Whether an answer is right.

    A word problem is right when every step, name, thing and number is. A function counts as right when prompt and
    answer parse as one complete function.

    Args:
        text: the answer that a model wrote.
        row: the line of the data file that holds its prompt.
    """
    if row["task"] == "code":
        return parses(row["prompt"], text)
    return score(problem(row["split"], row["number"]), text).worked


def main(arguments: list[str] | None = None) -> None:
    """Print the samples, one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="default: test")
    parser.add_argument("--samples", type=int, default=200, help="default: 200")
    options = parser.parse_args(arguments)
    task = TASKS[options.task]
    for number, sample in enumerate(task.held_out(options.split, options.samples)):
        row = {"prompt": sample.prompt, "answer": sample.answer}
        print(json.dumps(row | {"task": options.task, "split": options.split, "number": number}))
    note = task.note(options.split, options.samples)
    if note:
        print(note, file=sys.stderr)


if __name__ == "__main__":
    main()

"""`mrp demo`: what `mrp eval` does, preset for held-out samples of an embedded checkpoint in every decoding mode."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from .options import Record
from .recording import Measurement

if TYPE_CHECKING:  # importing them takes seconds
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hub_cards.tasks.tasks import PythonFunctions, WordProblems
    from modeling_mrp import MRPForDiffusionLM

SHOWN = "graph-8"  # the mode of the answer that is shown as it is decoded, and of the closing sentence
COLUMNS = ("mode", "accuracy", "tokens/forward", "forwards", "time ratio", "identical")


def demo(
    model: Annotated[str, typer.Option(help="An embedded checkpoint: words or code, or the name of its folder.")] = (
        "words"
    ),
    samples: Annotated[int, typer.Option(metavar="N", help="Decode at most N held-out samples.")] = 200,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Number of samples that are decoded together.")] = 100,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Answer this prompt instead of measuring. It must be of the kind that the model was trained on: a "
            "problem of two to six steps, or the `def` line of a function."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    record: Record = None,
) -> Measurement | None:
    """Decode held-out samples of an embedded checkpoint in every mode, show one table, and decode one answer slowly.

    Example: mrp demo --prompt "Tom has 23 apples, buys 14, doubles them. How many?"
    """
    for name, value in {"samples": samples, "batch-size": batch_size}.items():
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")

    from dataclasses import asdict
    from json import dumps

    from ..evaluation.modes import mode_options
    from ..evaluation.summary import rows_table
    from ..evaluation.task_evaluation import demo_rows, evaluate_task

    task = task_of(model)
    loaded = _load(task)
    options = mode_options(SHOWN, loaded.config.block_size)
    if prompt is not None:
        if record is not None:
            raise ValueError("--prompt answers one prompt and measures nothing: leave --record out")
        show_answer(loaded, task, prompt, options)
        return None
    held_out, note = task.held_out("test", samples), task.note("test", samples)
    if not json:
        print(_heading(task, len(held_out), batch_size, note), flush=True)
    measured = evaluate_task(loaded, task, held_out, batch_size=batch_size)
    rows = [asdict(row) for row in measured]
    figures = {"rows": demo_rows(measured), "note": note or None}
    if json:
        print(dumps(figures))
    else:
        print(rows_table(rows, COLUMNS))
        print(f"\n{conclusion(rows)}\n\none answer, decoded in mode {SHOWN}")
        show_answer(loaded, task, held_out[0].prompt, options)
    return Measurement(figures, {"samples": len(held_out), "max_new_tokens": task.answer_tokens, "decoding": "greedy"})


def _heading(task, samples: int, batch_size: int, note: str) -> str:
    import torch

    from ..data.wording import counted

    machine = f"{counted(torch.get_num_threads(), 'CPU thread')}, float32, torch {torch.__version__}"
    accuracy = f"accuracy: {task.right_when}; " if task.right_when else ""
    return (
        f"{task.folder.name}: {counted(samples, 'held-out sample')}, greedy, batches of {batch_size}, {machine}\n"
        + (f"{note}\n" if note else "")
        + f"{accuracy}forwards: of the backbone, every one counted; time ratio: static's time over the mode's; "
        "identical: answers equal to static's\n"
    )


def conclusion(rows: Sequence[dict]) -> str:
    """Return the sentence that says what the table shows: text, forwards and time of `SHOWN` against `static`.

    Args:
        rows: rows of `summarise`; `static` and `SHOWN` must be among them.
    """
    by_mode = {row["mode"]: row for row in rows}
    static, shown = by_mode["static"], by_mode[SHOWN]
    ratio = static["forwards"] / shown["forwards"]
    forwards = f"{ratio:.2f}x fewer" if ratio >= 1 else f"{1 / ratio:.2f}x as many"
    text = (
        f"{SHOWN} returned static's text in {_share(shown['identical'])} of the answers with {forwards} forwards of "
        f"the backbone; on this CPU it took {1 / shown['time_ratio']:.2f}x the time."
    )
    if auto := by_mode.get("auto"):
        text += f" auto, the default, which drafts only as far as it pays, took {1 / auto['time_ratio']:.2f}x."
    return text


def _share(share: float) -> str:
    """A percentage that reads 100% only if nothing is missing."""
    return f"{share:.0%}" if share in (0, 1) else f"{min(share, 0.999):.1%}"


class DraftPrinter:
    """A streamer that prints the states of a block as it is denoised, masked tokens as dots, then the finished text.

    On a terminal the states overwrite one another; elsewhere each gets a line of its own.
    """

    ANSWER = "answer  "

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", file: TextIO | None = None):
        self.tokenizer = tokenizer
        self.file = sys.stdout if file is None else file
        self.overwrites = self.file.isatty()
        self.prompt_seen = False
        self.finished: list[int] = []

    def put(self, value: "Tensor") -> None:
        """Keep finished tokens; the first call gets the prompt."""
        if self.prompt_seen:
            self.finished += value.flatten().tolist()
        self.prompt_seen = True

    def put_draft(self, value: "Tensor") -> None:
        """Print the finished tokens and the unfinished block after them."""
        self._show(self.finished + value.flatten().tolist(), "drafts  ")

    def end(self) -> None:
        """Print the finished text."""
        self._show(self.finished, self.ANSWER)
        if self.overwrites:
            self.file.write("\n")

    def _show(self, ids, label):
        dots = self.tokenizer.decode(ids).replace(self.tokenizer.mask_token, "·")
        text = dots.replace(self.tokenizer.eos_token, "").replace(self.tokenizer.pad_token, "").rstrip()
        if label != self.ANSWER:
            text = text.replace("\n", "⏎")  # a state takes one line
        self.file.write(f"\r\033[K{label}{text}" if self.overwrites else f"{label}{text}\n")
        self.file.flush()


def show_answer(
    model: "MRPForDiffusionLM", task: "WordProblems | PythonFunctions", prompt: str, options: dict
) -> None:
    """Print a prompt and its answer as it is decoded.

    Args:
        model: the model.
        task: its task.
        prompt: the prompt.
        options: options of `generate`.

    Raises:
        ValueError: if the prompt holds a word that the tokenizer does not know.
    """
    from ..data.wording import counted

    tokenizer = task.tokenizer
    inputs = tokenizer(prompt, return_tensors="pt")
    unknown = []
    if tokenizer.unk_token is not None:
        unknown = (inputs["input_ids"][0] == tokenizer.unk_token_id).nonzero()[:, 0].tolist()
    if unknown:
        words = [prompt[slice(*inputs.token_to_chars(at))] for at in unknown]
        raise ValueError(
            f"--prompt holds words that the model does not know: {', '.join(words)}. "
            f"It knows problems like: {task.held_out('test', 1)[0].prompt}"
        )
    print(f"prompt  {prompt}")
    output = model.generate(
        **inputs,
        max_new_tokens=task.answer_tokens,
        streamer=DraftPrinter(tokenizer),
        return_dict_in_generate=True,
        **options,
    )
    stats = output.stats
    tokens, forwards = counted(int(stats.lengths), "token"), counted(int(stats.backbone_forwards), "forward")
    print(f"        {tokens} in {forwards} of the backbone")


def task_of(name: str) -> "WordProblems | PythonFunctions":
    """Return the task of an embedded checkpoint, by the task's name or that of the checkpoint's folder.

    Raises:
        ValueError: if there is none.
    """
    from hub_cards.tasks.tasks import TASKS

    found = next((task for key, task in TASKS.items() if name in (key, task.folder.name)), None)
    if found is None:
        known = ", ".join(f"{key} ({task.folder.name})" for key, task in TASKS.items())
        raise ValueError(f"--model {name!r} is not an embedded checkpoint; expected one of {known}")
    return found


def _load(task):
    """The embedded checkpoint of a task, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    import modeling_mrp  # noqa: F401  registers the model's classes

    return AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)

"""`mrp demo`: every decoding mode on held-out samples of an embedded checkpoint, in one table."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, BatchSize, check_at_least

if TYPE_CHECKING:
    from modeling_mrp import MRPForDiffusionLM

DEFAULT_MODEL = "words"
MODES = (
    *("static", "static-2", "static-4", "spec-2", "spec-3", "spec-4", "spec-4-self", "spec-4-token", "spec-8-token"),
    *("direct-1", "direct-2", "direct-3", "dynamic-0.9", "dynamic-0.7", "dynamic-0.5"),
    *("remask-leave_one_out", "remask-confidence", "remask-residual"),
)
SHOWN = "spec-4"  # the mode of the one answer that is shown as it comes into being


@dataclass(frozen=True)
class Row:
    """One mode's figures.

    Attributes:
        name: of the mode.
        accuracy: share of answers that are right, by the task's own measure; None where it has none.
        tokens_per_forward: new tokens per forward of the backbone, all forwards counted.
        backbone_forwards: of all prompts together, a forward counted once for every row that takes part in it.
        wall_clock_ratio: time of backbone-only decoding (the row `static`) over this mode's; above 1 is faster.
        identical: share of answers that are token for token those of `static`.
    """

    name: str
    accuracy: float | None
    tokens_per_forward: float
    backbone_forwards: int
    wall_clock_ratio: float
    identical: float


@dataclass
class _Decoded:
    answers: list[list[int]]
    forwards: int
    seconds: float


def run_demo(
    model: "MRPForDiffusionLM",
    task,
    samples: Sequence,
    modes: dict[str, dict] | None = None,
    batch_size: int = 100,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Decode every sample in every mode, greedily and in batches.

    Args:
        task: one of `hub_cards.tasks.tasks.TASKS`; samples: of its `held_out`.
        modes: options of `generate` by name (default: those of MODES); the first one is the reference of the time
            ratio and of `identical`.
        on_row: called with every row as soon as it is measured.
    """
    from ..evaluation.modes import mode_options

    modes = modes or {name: mode_options(name, model.config.block_size) for name in MODES}
    prompts = [sample.prompt for sample in samples]
    decode = partial(decode_all, model, task.tokenizer, batch_size=batch_size, max_new_tokens=task.answer_tokens)
    decode(prompts[:batch_size], options=next(iter(modes.values())))  # warms up
    rows, reference = [], None
    for name, options in modes.items():
        decoded = decode(prompts, options=options)
        reference = reference or decoded
        same = sum(ours == theirs for ours, theirs in zip(decoded.answers, reference.answers, strict=True))
        rows.append(
            Row(
                name=name,
                accuracy=task_accuracy(task, samples, decoded.answers),
                tokens_per_forward=sum(map(len, decoded.answers)) / decoded.forwards,
                backbone_forwards=decoded.forwards,
                wall_clock_ratio=reference.seconds / decoded.seconds,
                identical=same / len(samples),
            )
        )
        on_row(rows[-1])
    return rows


def task_accuracy(task, samples: Sequence, answers: list[list[int]]) -> float | None:
    """Share of right answers, given as token ids; None for a task that cannot tell."""
    if task.right_when is None:
        return None
    texts = task.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(task.right(sample, text) for sample, text in zip(samples, texts, strict=True)) / len(samples)


def decode_all(
    model, tokenizer, prompts: list[str], *, options: dict, batch_size: int, max_new_tokens: int
) -> _Decoded:
    """New tokens of every prompt, end of text included and padding cut off."""
    result = _Decoded([], 0, 0.0)
    for start in range(0, len(prompts), batch_size):
        inputs = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True)
        began = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **options)
        result.seconds += time.perf_counter() - began
        stats = output.stats
        lengths = stats.tokens_by_backbone + stats.tokens_by_head
        new = output.sequences[:, inputs["input_ids"].shape[1] :]
        result.answers += [row[:length] for row, length in zip(new.tolist(), lengths.tolist(), strict=True)]
        result.forwards += int(stats.backbone_forwards.sum())
    return result


class DraftPrinter:
    """A streamer that shows a block's states as it is denoised, masked tokens as dots, then the finished text.

    On a terminal the states overwrite one another; elsewhere each gets a line.
    """

    ANSWER = "answer  "

    def __init__(self, tokenizer, file=None):
        self.tokenizer = tokenizer
        self.file = sys.stdout if file is None else file
        self.overwrites = self.file.isatty()
        self.prompt_seen = False
        self.finished: list[int] = []

    def put(self, value):
        if self.prompt_seen:
            self.finished += value.flatten().tolist()
        self.prompt_seen = True

    def put_draft(self, value):
        self._show(self.finished + value.flatten().tolist(), "drafts  ")

    def end(self):
        self._show(self.finished, self.ANSWER)
        if self.overwrites:
            self.file.write("\n")

    def _show(self, ids, label):
        dots = self.tokenizer.decode(ids).replace(self.tokenizer.mask_token, "·")
        text = dots.replace(self.tokenizer.eos_token, "").replace(self.tokenizer.pad_token, "").rstrip()
        if label != self.ANSWER:
            text = text.replace("\n", "⏎")  # one line for a state
        self.file.write(f"\r\033[K{label}{text}" if self.overwrites else f"{label}{text}\n")
        self.file.flush()


def stream_answer(model, task, prompt: str, options: dict):
    """Print one prompt and its answer as it comes into being.

    Raises:
        ValueError: for a word that the tokenizer does not know.
    """
    tokenizer = task.tokenizer
    inputs = tokenizer(prompt, return_tensors="pt")
    unknown = (
        (inputs["input_ids"][0] == tokenizer.unk_token_id).nonzero()[:, 0].tolist() if tokenizer.unk_token else []
    )
    if unknown:
        words = [prompt[slice(*inputs.token_to_chars(at))] for at in unknown]
        raise ValueError(
            f"--prompt holds words that the model does not know: {', '.join(words)}. "
            f"It knows problems like: {task.held_out('test', 1)[0].prompt}"
        )
    print(f"prompt  {prompt}")
    streamer = DraftPrinter(tokenizer)
    output = model.generate(
        **inputs, max_new_tokens=task.answer_tokens, streamer=streamer, return_dict_in_generate=True, **options
    )
    forwards = int(output.stats.backbone_forwards)
    tokens = int(output.stats.tokens_by_backbone + output.stats.tokens_by_head)
    print(f"        {tokens} tokens in {forwards} forwards of the backbone")


def table_head(scored: bool) -> str:
    accuracy = f"{'accuracy':>9}" if scored else ""
    return f"{'mode':22}{accuracy}{'tokens/forward':>16}{'forwards':>10}{'time ratio':>12}{'identical':>11}"


def table_line(row: Row) -> str:
    accuracy = "" if row.accuracy is None else f"{row.accuracy:9.3f}"
    return (
        f"{row.name:22}{accuracy}{row.tokens_per_forward:16.2f}{row.backbone_forwards:10d}"
        f"{row.wall_clock_ratio:11.2f}x{row.identical:11.1%}"
    )


def task_of(name: str):
    """The task of an embedded checkpoint, by its own name or that of the checkpoint.

    Raises:
        ValueError: when there is none.
    """
    from hub_cards.tasks.tasks import TASKS

    found = next((task for key, task in TASKS.items() if name in (key, task.folder.name)), None)
    if found is None:
        known = ", ".join(f"{key} ({task.folder.name})" for key, task in TASKS.items())
        raise ValueError(f"--model {name!r} is no embedded checkpoint: there are {known}")
    return found


def load(task) -> "MRPForDiffusionLM":
    """The embedded checkpoint of a task, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)


def demo(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Embedded checkpoint: words or code, or the name of its folder.")
    ] = DEFAULT_MODEL,
    samples: Annotated[int, typer.Option(metavar="N", help="Number of held-out samples to decode.")] = 200,
    batch_size: BatchSize = 100,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Answer this prompt instead of measuring. It must be of the kind that the model was trained on: a "
            "problem of two to six steps, or a function's line of def.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Decode held-out samples in every mode."""
    check_at_least(1, samples=samples, batch_size=batch_size)

    from ..evaluation.modes import mode_options

    task = task_of(model)
    loaded = load(task)
    spec = mode_options(SHOWN, loaded.config.block_size)
    if prompt is not None:
        stream_answer(loaded, task, prompt, spec)
        return
    held_out = task.held_out("test", samples)
    if json:
        rows = run_demo(loaded, task, held_out, batch_size=batch_size)
        print(dumps({"rows": [asdict(row) for row in rows]}))
        return
    print(f"{len(held_out)} held-out samples, greedy, batches of {batch_size}, {_machine()}")
    right = f"accuracy: {task.right_when}; " if task.right_when else ""
    print(f"{right}forwards: of the backbone, all counted; time ratio: static's time over the mode's\n")
    print(table_head(task.right_when is not None))
    run_demo(loaded, task, held_out, batch_size=batch_size, on_row=lambda row: print(table_line(row), flush=True))
    print(f"\none answer, decoded in mode {SHOWN}")
    stream_answer(loaded, task, held_out[0].prompt, spec)


def _machine() -> str:
    import torch

    return f"{torch.get_num_threads()} CPU threads, float32, torch {torch.__version__}"

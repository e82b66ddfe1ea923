"""`mrp demo`: every decoding mode on held-out problems of an embedded checkpoint, in one table."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hub_cards
from hub_cards.word_problems import Problem, problems, score
from modeling_mrp import MRPForDiffusionLM

MODELS = Path(hub_cards.__file__).parent
DEFAULT_MODEL = "sdar-tiny-mrp"
ANSWER_TOKENS = 48
SPEC = {"mrp_mode": "spec"}
REMASK = {"mrp_mode": "remask", "confidence_threshold": 0.5}
STATIC = {"mrp_mode": None}
DYNAMIC = STATIC | {"remasking_strategy": "low_confidence_dynamic"}


def mode_options(block_size: int) -> dict[str, dict]:
    """Options of `generate` for every row of the table, by its name."""
    return {
        "static": STATIC,
        "static-2": STATIC | {"denoising_steps": block_size // 2},
        "static-4": STATIC | {"denoising_steps": block_size // 4},
        "spec-2": SPEC | {"mrp_steps": 2},
        "spec-3": SPEC | {"mrp_steps": 3},
        "spec-4": SPEC | {"mrp_steps": 4},
        "spec-4-self": SPEC | {"mrp_steps": 4, "mrp_draft": "self"},
        "spec-4-token": SPEC | {"mrp_steps": 4, "mrp_acceptance": "token"},
        "spec-8-token": SPEC | {"mrp_steps": 8, "mrp_acceptance": "token"},
        "direct-1": {"mrp_mode": "direct", "mrp_steps": 1},
        "direct-2": {"mrp_mode": "direct", "mrp_steps": 2},
        "direct-3": {"mrp_mode": "direct", "mrp_steps": 3},
        "dynamic-0.9": DYNAMIC | {"confidence_threshold": 0.9},
        "dynamic-0.7": DYNAMIC | {"confidence_threshold": 0.7},
        "dynamic-0.5": DYNAMIC | {"confidence_threshold": 0.5},
        "remask-leave_one_out": REMASK | {"remask_criterion": "leave_one_out"},
        "remask-confidence": REMASK | {"remask_criterion": "confidence"},
        "remask-residual": REMASK | {"remask_criterion": "residual"},
    }


@dataclass(frozen=True)
class Row:
    """One mode's figures.

    Attributes:
        name: of the mode.
        accuracy: share of answers that are right in every step, name, thing and number.
        tokens_per_forward: new tokens per forward of the backbone, all forwards counted.
        backbone_forwards: of all prompts together, a forward counted once for every row that takes part in it.
        wall_clock_ratio: time of backbone-only decoding (the row `static`) over this mode's; above 1 is faster.
        identical: share of answers that are token for token those of `static`.
    """

    name: str
    accuracy: float
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
    model: MRPForDiffusionLM,
    tokenizer,
    tasks: Sequence[Problem],
    modes: dict[str, dict] | None = None,
    batch_size: int = 100,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Decode every problem in every mode, greedily and in batches.

    Args:
        modes: options of `generate` by name (default: all of `mode_options`); the first one is the reference of the
            time ratio and of `identical`.
        on_row: called with every row as soon as it is measured.
    """
    modes = mode_options(model.config.block_size) if modes is None else modes
    prompts = [task.prompt for task in tasks]
    decode_all(model, tokenizer, prompts[:batch_size], next(iter(modes.values())), batch_size)  # warms up
    rows, reference = [], None
    for name, options in modes.items():
        decoded = decode_all(model, tokenizer, prompts, options, batch_size)
        reference = reference or decoded
        texts = tokenizer.batch_decode(decoded.answers, skip_special_tokens=True)
        right = sum(score(task, text).worked for task, text in zip(tasks, texts, strict=True))
        same = sum(ours == theirs for ours, theirs in zip(decoded.answers, reference.answers, strict=True))
        rows.append(
            Row(
                name=name,
                accuracy=right / len(tasks),
                tokens_per_forward=sum(map(len, decoded.answers)) / decoded.forwards,
                backbone_forwards=decoded.forwards,
                wall_clock_ratio=reference.seconds / decoded.seconds,
                identical=same / len(tasks),
            )
        )
        on_row(rows[-1])
    return rows


def decode_all(model, tokenizer, prompts: list[str], options: dict, batch_size: int) -> _Decoded:
    """New tokens of every prompt, end of text included and padding cut off."""
    result = _Decoded([], 0, 0.0)
    for start in range(0, len(prompts), batch_size):
        inputs = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True)
        began = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, return_dict_in_generate=True, **options)
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
        self._show(self.finished, "answer  ")
        if self.overwrites:
            self.file.write("\n")

    def _show(self, ids, label):
        dots = self.tokenizer.decode(ids).replace(self.tokenizer.mask_token, "·")
        text = dots.replace(self.tokenizer.eos_token, "").replace(self.tokenizer.pad_token, "").rstrip()
        self.file.write(f"\r\033[K{label}{text}" if self.overwrites else f"{label}{text}\n")
        self.file.flush()


def stream_answer(model, tokenizer, prompt: str, options: dict):
    """Print one prompt and its answer as it comes into being.

    Raises:
        ValueError: for a word that the tokenizer does not know.
    """
    inputs = tokenizer(prompt, return_tensors="pt")
    unknown = (inputs["input_ids"][0] == tokenizer.unk_token_id).nonzero()[:, 0].tolist()
    if unknown:
        words = [prompt[slice(*inputs.token_to_chars(at))] for at in unknown]
        raise ValueError(
            f"--prompt holds words that the model does not know: {', '.join(words)}. "
            f"It knows problems like: {next(problems('test')).prompt}"
        )
    print(f"problem {prompt}")
    streamer = DraftPrinter(tokenizer)
    output = model.generate(
        **inputs, max_new_tokens=ANSWER_TOKENS, streamer=streamer, return_dict_in_generate=True, **options
    )
    forwards = int(output.stats.backbone_forwards)
    tokens = int(output.stats.tokens_by_backbone + output.stats.tokens_by_head)
    print(f"        {tokens} tokens in {forwards} forwards of the backbone")


def table_head() -> str:
    return f"{'mode':22}{'accuracy':>9}{'tokens/forward':>16}{'forwards':>10}{'time ratio':>12}{'identical':>11}"


def table_line(row: Row) -> str:
    return (
        f"{row.name:22}{row.accuracy:9.3f}{row.tokens_per_forward:16.2f}{row.backbone_forwards:10d}"
        f"{row.wall_clock_ratio:11.2f}x{row.identical:11.1%}"
    )


def load(name: str):
    """(model, tokenizer) of an embedded checkpoint by name, or of a folder.

    Raises:
        ValueError: when there is neither.
    """
    folder = next((path for path in (MODELS / name, Path(name)) if (path / "config.json").is_file()), None)
    if folder is None:
        known = ", ".join(sorted(path.parent.name for path in MODELS.glob("*/config.json")))
        raise ValueError(f"--model {name!r} is neither an embedded checkpoint ({known}) nor a folder with one")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="mrp demo",
        description=__doc__.split(": ", 1)[1],
        epilog='example: mrp demo --prompt "Tom has 23 apples, buys 14, doubles them. How many?"',
    )
    made.add_argument("--model", default=DEFAULT_MODEL, help="embedded checkpoint or folder (default: %(default)s)")
    made.add_argument("--problems", type=int, default=200, help="held-out problems to decode (default: %(default)s)")
    made.add_argument("--batch-size", type=int, default=100, help="rows decoded together (default: %(default)s)")
    made.add_argument(
        "--prompt", help="answer this problem (two to six steps, as it was trained) instead of measuring"
    )
    made.add_argument("--json", action="store_true", help="print the rows as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    for name in ("problems", "batch_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    model, tokenizer = load(arguments.model)
    spec = SPEC | {"mrp_steps": 4}
    if arguments.prompt is not None:
        stream_answer(model, tokenizer, arguments.prompt, spec)
        return 0
    tasks = list(problems("test", arguments.problems))
    if arguments.json:
        rows = run_demo(model, tokenizer, tasks, batch_size=arguments.batch_size)
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    print(f"{len(tasks)} held-out problems, greedy, batches of {arguments.batch_size}, {_machine()}")
    print("accuracy: every step, name, thing and number right; forwards: of the backbone, all counted; "
          "time ratio: static's time over the mode's\n")  # fmt: skip
    print(table_head())
    run_demo(
        model, tokenizer, tasks, batch_size=arguments.batch_size, on_row=lambda row: print(table_line(row), flush=True)
    )
    print("\none answer, decoded with mrp_mode='spec', mrp_steps=4")
    stream_answer(model, tokenizer, tasks[0].prompt, spec)
    return 0


def _machine() -> str:
    return f"{torch.get_num_threads()} CPU threads, float32, torch {torch.__version__}"

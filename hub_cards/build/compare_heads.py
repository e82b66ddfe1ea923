"""Continue the training of a finished head in several variants, and compare how many forwards each saves.

    python -m hub_cards.build.compare_heads words
    python -m hub_cards.build.compare_heads code

Every variant starts from the head in the scratch folder, where `build_tiny` leaves it before it is refined, or from
the embedded head if there is none. All are trained on the same number of samples of the same prompts. Variants that
need another kind of head start from a newly initialised one, and some continue from such a head. Finished heads stay
in the scratch folder, in `heads/VARIANT/head`, and are not trained again.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.head_files import load_head
from mrp_trainer.evaluation.modes import mode_options, needs_head
from mrp_trainer.evaluation.results import command_line, write_result
from mrp_trainer.evaluation.task_evaluation import evaluate_task

from ..tasks.tasks import Sample, Task
from .build_tiny import (
    build_backbone,
    build_command,
    default_scratch,
    forwards_saved,
    head_arguments,
    sample_rows,
    train_or_load,
    visited_rows,
    with_fresh_head,
)
from .recipes import RECIPES, Recipe
from .result_tables import markdown

STEPS = 150
FRESH_STEPS = 300
ROWS = 16
VALIDATION_SAMPLES = 60
MODES = ("static", "spec-2", "spec-4", "spec-8", "spec-4-token", "spec-8-token")
WITHOUT_HEAD, STARTED_FROM = "without a head", "the head that all start from"


@dataclass(frozen=True)
class Variant:
    """One way to train the head.

    Attributes:
        changes: options of `MRPTrainingArguments` that differ from the embedded head's.
        visited: train on the states that decoding visits instead of random states.
        fresh: start from a newly initialised head, and train for `FRESH_STEPS`.
        layers: number of layers of the newly initialised head.
        residual: whether the newly initialised head predicts a residual rather than the full distribution.
        after: name of the fresh variant whose finished head this one continues from, instead of the common start.
    """

    changes: dict = field(default_factory=dict)
    visited: bool = False
    fresh: bool = False
    layers: int = 1
    residual: bool = True
    after: str | None = None


VISITED_AND_CHOSEN = {"changes": {"choice_weight": 0.1}, "visited": True}
VARIANTS = {
    "random states, KL, K = 3": Variant(),
    "one p per sample": Variant({"noise_per_block": False}),
    "confident reveals": Variant({"reveal": "confident"}),
    "visited states": Variant(visited=True),
    "visited states, K = 7": Variant({"unroll_steps": 7}, visited=True),
    "visited states, total variation": Variant({"divergence": "total_variation"}, visited=True),
    "visited states, KL and chosen position": Variant(**VISITED_AND_CHOSEN),
    "visited states, KL and chosen position x 5": Variant({"choice_weight": 0.5}, visited=True),
    "random states, KL and chosen position": Variant({"choice_weight": 0.1}),
    "fresh": Variant(fresh=True),
    "fresh, K = 1": Variant({"unroll_steps": 1}, fresh=True),
    "fresh, 2 layers": Variant(fresh=True, layers=2),
    "fresh, 3 layers": Variant(fresh=True, layers=3),
    "fresh, full distribution": Variant(fresh=True, residual=False),
    "fresh, then visited states and chosen position": Variant(**VISITED_AND_CHOSEN, after="fresh"),
    "fresh, 2 layers, then the same": Variant(**VISITED_AND_CHOSEN, after="fresh, 2 layers"),
    "fresh, 3 layers, then the same": Variant(**VISITED_AND_CHOSEN, after="fresh, 3 layers"),
}


def load_model(recipe: Recipe, scratch: Path) -> MRPForDiffusionLM:
    """The model that the variants start from: that of the scratch folder if finished, else the embedded checkpoint."""
    if not (scratch / "head").exists():
        return MRPForDiffusionLM.from_pretrained(recipe.task.folder)
    model = with_fresh_head(build_backbone(recipe, scratch), recipe)
    load_head(model, scratch / "head")
    return model


def train_variant(
    name: str, start: MRPForDiffusionLM, recipe: Recipe, rows: Callable[[bool], Dataset], heads: Path
) -> MRPForDiffusionLM:
    """Train a variant, or load its head if the folder `heads` already holds it.

    Args:
        name: key of `VARIANTS`.
        start: model that the variants start from.
        recipe: recipe of the embedded checkpoint.
        rows: returns the training rows: those of the states that decoding visits if its argument is true, else those
            of random states.
        heads: folder of the finished heads.
    """
    variant, folder = VARIANTS[name], heads / name.replace(" ", "-")
    changes = {"max_steps": FRESH_STEPS, "per_device_train_batch_size": ROWS}
    if variant.fresh:
        model = with_fresh_head(start, recipe, variant.layers, variant.residual)
    else:
        changes |= {"max_steps": STEPS, "muon_learning_rate": 0.01, "learning_rate": 1.5e-3}
        model = deepcopy(start) if variant.after is None else train_variant(variant.after, start, recipe, rows, heads)
    arguments = head_arguments(folder / "training", **changes | variant.changes)
    train_or_load(model, partial(rows, variant.visited), arguments, folder / "head")
    return model.eval()


def measure(model: MRPForDiffusionLM, task: Task, samples: Sequence[Sample], **options: Any) -> dict[str, float]:
    """Ratio of static decoding's backbone forwards to those of every other mode of `MODES`, by mode.

    Args:
        model: model to decode with.
        task: task that the samples belong to.
        samples: samples to decode.
        options: further options of `generate` for the modes that draft.
    """
    modes = {name: mode_options(name, model.config.block_size) for name in MODES}
    modes = {name: mode | (options if needs_head(mode) else {}) for name, mode in modes.items()}
    rows = evaluate_task(model, task, samples, modes)
    return forwards_saved(rows)


def compare(recipe: Recipe, scratch: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """Train and measure variants, with a line about each as soon as it is measured, and print the table.

    Args:
        recipe: recipe of the embedded checkpoint.
        scratch: folder of backbones and heads.
        names: keys of `VARIANTS`.

    Returns:
        For every head, the result of `measure`.
    """
    task = recipe.task
    scratch.mkdir(parents=True, exist_ok=True)
    start = load_model(recipe, scratch)
    samples = task.held_out("validation", VALIDATION_SAMPLES)

    @cache  # visited rows take minutes to decode, and not every variant needs them
    def rows(visited: bool) -> Dataset:
        if visited:
            return visited_rows(start, recipe, scratch, STEPS * ROWS)
        return sample_rows(task.tokenizer, map(recipe.head_sample, range(FRESH_STEPS * ROWS)))

    results = {}
    for name in [WITHOUT_HEAD, STARTED_FROM, *names]:
        print(f"{name} ...", flush=True)
        if name == WITHOUT_HEAD:
            found = measure(start, task, samples, mrp_draft="self")
        elif name == STARTED_FROM:
            found = measure(start, task, samples)
        else:
            found = measure(train_variant(name, start, recipe, rows, scratch / "heads"), task, samples)
        results[name] = found
        print(f"{name}: {', '.join(f'{mode} {saved:.2f}' for mode, saved in found.items())}", flush=True)
    lines = [[name, *(f"{saved[mode]:.2f}" for mode in MODES[1:])] for name, saved in results.items()]
    print(
        f"\n{STEPS} steps of {ROWS} samples, fresh heads {FRESH_STEPS}; forwards saved (static's over the mode's) on "
        f"{len(samples)} validation samples, greedy\n\n{markdown(['head', *MODES[1:]], lines)}"
    )
    return results


def record(file: Path, task: str, commands: Sequence[str], results: dict[str, dict[str, float]]) -> None:
    """Write a result file.

    Args:
        file: file to write.
        task: name of the task.
        commands: command lines that repeat the comparison.
        results: the result of `compare`.
    """
    rows = [
        {"head": name, "recipe": asdict(VARIANTS[name]) if name in VARIANTS else None, "forwards_saved": saved}
        for name, saved in results.items()
    ]
    settings = {
        "task": task,
        "samples": f"{VALIDATION_SAMPLES} of the validation split",
        "steps": STEPS,
        "fresh_steps": FRESH_STEPS,
        "samples_per_step": ROWS,
        "decoding": "greedy",
        "dtype": "float32",
    }
    write_result(file, name="compare_heads", command=commands, settings=settings, figures={"rows": rows})


def main(arguments: list[str] | None = None) -> None:
    """Compare the variants that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=RECIPES)
    parser.add_argument("--scratch", type=Path, help="folder of backbones and heads (default: build/TASK)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    parser.add_argument("--record", type=Path, help="also write the figures to this result file")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.task]
    scratch = options.scratch or default_scratch(recipe)
    commands = [command_line("python -m hub_cards.build.compare_heads", words)]
    if (scratch / "head").exists():
        commands.insert(0, build_command(recipe, scratch, scratch / "checkpoint"))
    results = compare(recipe, scratch, options.only)
    if options.record is not None:
        record(options.record, options.task, commands, results)


if __name__ == "__main__":
    main()

"""Train a finished head on by different recipes and compare what its drafts are worth.

    python -m hub_cards.build.compare_heads words
    python -m hub_cards.build.compare_heads code

All start from the embedded head, or the one of `build_tiny`'s scratch folder, and see as many samples of the same
prompts; those that need another kind of head start afresh, and some go on from those. A finished head is kept and not
trained again.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.head_files import load_head
from mrp_trainer.evaluation.modes import mode_options, needs_head
from mrp_trainer.evaluation.task_evaluation import evaluate_task

from .build_tiny import build_backbone, head_arguments, sample_rows, train_or_load, visited_rows, with_fresh_head
from ..tasks.tasks import TASKS

STEPS = 150
FRESH_STEPS = 300
ROWS = 16
VALIDATION_SAMPLES = 60
MODES = ("static", "spec-2", "spec-4", "spec-8", "spec-4-token", "spec-8-token")
WITHOUT_HEAD, STARTED_FROM = "without a head", "the head that all start from"


@dataclass(frozen=True)
class Variant:
    """One recipe.

    Attributes:
        changes: options of `MRPTrainingArguments` that differ from the embedded head's recipe.
        visited: train on the states that decoding visits instead of random ones.
        fresh: start afresh, and train for `FRESH_STEPS`.
        layers, residual: of a fresh head.
        after: the fresh variant whose finished head this one goes on from, instead of the one that all start from.
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


def load_model(task, scratch: Path) -> MRPForDiffusionLM:
    """Backbone and head to start from: finished ones of the scratch folder, else the embedded checkpoint's."""
    if not (scratch / "head").exists():
        return MRPForDiffusionLM.from_pretrained(task.folder)
    model = with_fresh_head(build_backbone(task, scratch), task)
    load_head(model, scratch / "head")
    return model


def train_variant(name: str, start, task, rows: dict[bool, Dataset], heads: Path) -> MRPForDiffusionLM:
    """The variant's model, trained when the folder `heads` does not hold its head yet."""
    variant, folder = VARIANTS[name], heads / name.replace(" ", "-")
    changes = {"max_steps": FRESH_STEPS, "per_device_train_batch_size": ROWS}
    if variant.fresh:
        model = with_fresh_head(start, task, variant.layers, variant.residual)
    else:
        changes |= {"max_steps": STEPS, "muon_learning_rate": 0.01, "learning_rate": 1.5e-3}
        model = deepcopy(start) if variant.after is None else train_variant(variant.after, start, task, rows, heads)
    arguments = head_arguments(folder / "training", **changes | variant.changes)
    train_or_load(model, lambda: rows[variant.visited], arguments, folder / "head")
    return model.eval()


def forwards_saved(model, task, samples, **options) -> dict[str, float]:
    """Static's forwards over those of every mode of `MODES`."""
    modes = {name: mode_options(name, model.config.block_size) for name in MODES}
    modes = {name: mode | (options if needs_head(mode) else {}) for name, mode in modes.items()}
    rows = evaluate_task(model, task, samples, modes)
    return {row.mode: rows[0].forwards / row.forwards for row in rows[1:]}


def compare(task, scratch: Path, names: list[str]) -> dict[str, dict[str, float]]:
    scratch.mkdir(parents=True, exist_ok=True)
    start = load_model(task, scratch)
    samples = task.held_out("validation", VALIDATION_SAMPLES)
    rows = {False: sample_rows(task.tokenizer, map(task.head_sample, range(FRESH_STEPS * ROWS)))}
    rows[True] = visited_rows(start, task, scratch, STEPS * ROWS)
    print(
        f"{STEPS} steps of {ROWS} samples, fresh heads {FRESH_STEPS}; "
        f"forwards saved on {len(samples)} validation samples, greedy\n"
    )
    columns = MODES[1:]
    print("| head | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|", flush=True)
    results = {}
    for name in [WITHOUT_HEAD, STARTED_FROM, *names]:
        if name == WITHOUT_HEAD:
            found = forwards_saved(start, task, samples, mrp_draft="self")
        elif name == STARTED_FROM:
            found = forwards_saved(start, task, samples)
        else:
            found = forwards_saved(train_variant(name, start, task, rows, scratch / "heads"), task, samples)
        results[name] = found
        print(f"| {name} | " + " | ".join(f"{found[column]:.2f}" for column in columns) + " |", flush=True)
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--scratch", type=Path, help="where backbones and heads are kept (build/TASK)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="recipes to compare (all)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    scratch = options.scratch or Path("build") / options.task
    file = scratch / "comparison.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results = known | compare(TASKS[options.task], scratch, options.only)
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

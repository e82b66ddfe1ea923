"""Train heads by different recipes on one embedded backbone and compare what their drafts are worth.

    python -m hub_cards.compare_heads words
    python -m hub_cards.compare_heads code

Every head sees as many samples of the same prompts. A finished head is kept in the scratch folder and not trained
again.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset

from modeling_mrp import MRPForDiffusionLM
from trainer import MRPTrainer
from trainer.demo import STATIC, run_demo
from trainer.head_files import load_head, save_head

from .build_tiny import build_backbone, head_arguments, sample_rows, visited_rows, with_fresh_head
from .tiny_tasks import TASKS

STEPS = 150
ROWS = 16
VALIDATION_SAMPLES = 60
SPEC = {"mrp_mode": "spec"}
MODES = {"static": STATIC}
MODES |= {f"{k}": SPEC | {"mrp_steps": k} for k in (2, 4, 8)}
MODES |= {f"{k} token": SPEC | {"mrp_steps": k, "mrp_acceptance": "token"} for k in (4, 8)}
WITHOUT_HEAD = "without a head"


@dataclass(frozen=True)
class Variant:
    """One recipe: what differs from the first one of `VARIANTS`.

    Attributes:
        changes: options of `MRPTrainingArguments`.
        visited: train on the states that decoding visits instead of random ones.
        layers, residual: of the head.
    """

    changes: dict = field(default_factory=dict)
    visited: bool = False
    layers: int = 1
    residual: bool = True


VARIANTS = {
    "random states, KL, K = 3": Variant(),
    "one p per sample": Variant({"noise_per_block": False}),
    "confident reveals": Variant({"reveal": "confident"}),
    "visited states": Variant(visited=True),
    "visited states, K = 1": Variant({"unroll_steps": 1}, visited=True),
    "visited states, K = 7": Variant({"unroll_steps": 7}, visited=True),
    "visited states, total variation": Variant({"divergence": "total_variation"}, visited=True),
    "visited states, KL and chosen position": Variant({"choice_weight": 0.1}, visited=True),
    "visited states, 2 layers": Variant(visited=True, layers=2),
    "visited states, full distribution": Variant(visited=True, residual=False),
}


def load_backbone(task, scratch: Path) -> MRPForDiffusionLM:
    """The task's backbone: a finished one of the scratch folder, else of the embedded checkpoint."""
    if (scratch / "backbone.pt").exists():
        return build_backbone(task, scratch)
    return MRPForDiffusionLM.from_pretrained(task.folder)


def train_variant(variant: Variant, backbone, task, rows: dict[bool, Dataset], folder: Path) -> MRPForDiffusionLM:
    """The variant's model, trained when `folder` does not hold its head yet."""
    model = with_fresh_head(backbone, task, variant.layers, variant.residual)
    if (folder / "head").exists():
        load_head(model, folder / "head")
        return model.eval()
    changes = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "save_strategy": "no"}
    arguments = head_arguments(folder / "training", **changes | variant.changes)
    MRPTrainer(model, arguments, train_dataset=rows[variant.visited], processing_class=task.tokenizer).train()
    save_head(model.eval(), folder / "head")
    return model


def forwards_saved(model, task, samples, **options) -> dict[str, float]:
    """Static's forwards over those of every mode of `MODES`."""
    modes = {name: mode | (options if name != "static" else {}) for name, mode in MODES.items()}
    rows = run_demo(model, task, samples, modes)
    return {row.name: rows[0].backbone_forwards / row.backbone_forwards for row in rows[1:]}


def compare(task, scratch: Path, names: list[str]) -> dict[str, dict[str, float]]:
    scratch.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(task, scratch)
    samples = task.held_out("validation", VALIDATION_SAMPLES)
    count = STEPS * ROWS
    rows = {False: sample_rows(task.tokenizer, map(task.head_sample, range(count)))}
    rows[True] = visited_rows(backbone, task, scratch, count)
    print(f"{STEPS} steps of {ROWS} samples; forwards saved on {len(samples)} validation samples, greedy\n")
    columns = list(MODES)[1:]
    print("| head | " + " | ".join(f"K = {name}" for name in columns) + " |")
    print("|---" * (len(columns) + 1) + "|", flush=True)
    results = {}
    for name in [WITHOUT_HEAD, *names]:
        if name == WITHOUT_HEAD:
            found = forwards_saved(with_fresh_head(backbone, task), task, samples, mrp_draft="self")
        else:
            folder = scratch / "heads" / name.replace(" ", "-")
            found = forwards_saved(train_variant(VARIANTS[name], backbone, task, rows, folder), task, samples)
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
    results = compare(TASKS[options.task], scratch, options.only)
    (scratch / "comparison.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

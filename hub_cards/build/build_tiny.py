"""Build an embedded checkpoint from nothing but this package: tokenizer, backbone, head, threshold, figures, card.

    python -m hub_cards.build.build_tiny            # word problems
    python -m hub_cards.build.build_tiny code       # functions of Python's standard library

Everything is seeded. A run that was killed goes on where it was when it is started again with the same scratch folder.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.checkpoints.cards import render_card
from mrp_trainer.evaluation.acceptance import acceptance_range
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.evaluation.modes import mode_options
from mrp_trainer.evaluation.summary import ModeFigures
from mrp_trainer.evaluation.task_evaluation import evaluate_task
from mrp_trainer.checkpoints.resume import last_checkpoint
from mrp_trainer.evaluation.trajectories import packed, trajectories
from mrp_trainer.checkpoints.weight_files import backbone_hash

from .tiny_backbone import encode_sample, train_backbone
from ..tasks.tasks import TASKS

SEED = 0
BLOCK_SIZE = 8
HEAD_ROWS = 32
REFINEMENT = {
    "choice_weight": 0.1,
    "muon_learning_rate": 0.01,
    "learning_rate": 1.5e-3,
    "per_device_train_batch_size": 16,
}
HEAD_NORM = 0.1  # from a norm of zero the layers get next to no gradient for hundreds of steps
DRAFTS = 4
TEST_SAMPLES = 200
VALIDATION_SAMPLES = 200
RESIDUAL_THRESHOLDS = (0.25, 0.5, 1.0, 2.0, 4.0)
TOKENS_PER_FORWARD_WANTED = 2.5  # of remasking, when its threshold is chosen


def tiny_config(task, num_mrp_layers: int) -> MRPConfig:
    tokenizer = task.tokenizer
    return MRPConfig(
        **task.shape,
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        block_size=BLOCK_SIZE,
        mask_token_id=tokenizer.mask_token_id,
        num_mrp_layers=num_mrp_layers,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        base_model=task.folder.name.removesuffix("-mrp"),
    )


def build_backbone(task, scratch: Path) -> MRPForDiffusionLM:
    """The trained backbone, without a head; trains what the scratch folder does not hold yet."""
    torch.manual_seed(SEED)
    model = MRPForDiffusionLM(tiny_config(task, num_mrp_layers=0))
    train_backbone(model, task.tokenizer, task.backbone_sample, task.recipe, scratch / "backbone.pt")
    return model


def with_fresh_head(
    backbone: MRPForDiffusionLM, task, num_mrp_layers: int = 1, residual: bool = True
) -> MRPForDiffusionLM:
    torch.manual_seed(SEED)
    config = tiny_config(task, num_mrp_layers)
    config.mrp_residual = residual
    model = MRPForDiffusionLM(config)
    frozen = {name: value for name, value in backbone.state_dict().items() if not name.startswith("mrp_head.")}
    model.load_state_dict(model.state_dict() | frozen)
    torch.nn.init.constant_(model.mrp_head.norm.weight, HEAD_NORM if residual else 1.0)
    model.generation_config.eos_token_id = task.tokenizer.eos_token_id
    return model.eval()


def sample_rows(tokenizer, samples: Iterable) -> Dataset:
    """Rows for `MRPTrainer`, as `prepare_dataset` makes them, except that the last block is filled with eos.

    The backbone learned to fill it, and in decoding the head sees it masked.
    """
    encoded = [encode_sample(tokenizer, sample, BLOCK_SIZE) for sample in samples]
    return Dataset.from_list(
        [
            {
                "input_ids": ids,
                "answer_mask": [0] * prompt + [1] * (len(ids) - prompt),
                "lengths": [len(ids)],
                "sample_ids": [number],
            }
            for number, (ids, prompt) in enumerate(encoded)
        ]
    )


def visited_rows(backbone, task, scratch: Path, count: int) -> Dataset:
    """The backbone's own answers to the prompts of the head's samples, kept in the scratch folder."""
    file = scratch / f"trajectories-{count}.parquet"
    if not file.exists():
        backbone.generation_config.eos_token_id = task.tokenizer.eos_token_id
        prompts = task.tokenizer([task.head_sample(n).prompt for n in range(count)])["input_ids"]
        rows = Dataset.from_list(list(trajectories(backbone, prompts, max_new_tokens=task.answer_tokens)))
        rows.to_parquet(str(file.with_suffix(".new")))
        file.with_suffix(".new").replace(file)
    return Dataset.from_parquet(str(file))


def train_head(model: MRPForDiffusionLM, task, scratch: Path) -> None:
    """Train the head in place on random states, or load it when the scratch folder holds it finished."""
    rows = partial(sample_rows, task.tokenizer, map(task.head_sample, range(task.head_steps * HEAD_ROWS)))
    train_or_load(model, rows, head_arguments(scratch / "head-training", max_steps=task.head_steps), scratch / "head")


def refine_head(model: MRPForDiffusionLM, task, scratch: Path) -> None:
    """Train the head on, on the states that decoding visits: what `compare_heads` found best."""

    def rows():
        visited = visited_rows(model, task, scratch, task.refine_samples)
        return Dataset.from_list(packed(list(visited), max(sum(row["lengths"]) for row in visited)))

    arguments = head_arguments(scratch / "refinement", max_steps=task.refine_steps, **REFINEMENT)
    train_or_load(model, rows, arguments, scratch / "refined-head")


def train_or_load(model, make_rows: Callable[[], Dataset], arguments: MRPTrainingArguments, finished: Path) -> None:
    """Train the head in place, or load it when the folder `finished` holds it; an interrupted training goes on."""
    if finished.exists():
        load_head(model, finished)
        return
    trainer = MRPTrainer(model, arguments, train_dataset=make_rows())
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))
    save_head(model.eval(), finished)


def head_arguments(output: Path, **changes) -> MRPTrainingArguments:
    """The recipe of the embedded heads."""
    recipe = {
        "per_device_train_batch_size": HEAD_ROWS,
        "learning_rate": 3e-3,
        "muon_learning_rate": 0.02,
        "warmup_steps": 10,
        "unroll_steps": 3,
        "noise_per_block": True,
        "seed": SEED,
        "save_steps": 100,
        "save_total_limit": 1,
        "logging_steps": 25,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return MRPTrainingArguments(str(output), **recipe | changes)


def measure_acceptance(model: MRPForDiffusionLM, task) -> dict | None:
    """How many drafts the validation samples accept, for `mrp verify` to compare with."""
    prompts = [sample.prompt for sample in task.held_out("validation", VALIDATION_SAMPLES)]
    return acceptance_range(model, task.tokenizer(prompts)["input_ids"], DRAFTS, task.answer_tokens)


def choose_residual_threshold(model: MRPForDiffusionLM, task) -> float:
    """The |C| for `remask_criterion="residual"`, by validation samples.

    The best one that keeps the wanted tokens per forward, by right answers or, where the task knows none, by those
    equal to static's; the fastest when none does.
    """
    static, options = (mode_options(name, model.config.block_size) for name in ("static", "remask-residual"))
    modes = {"static": static} | {str(delta): options | {"remask_threshold": delta} for delta in RESIDUAL_THRESHOLDS}
    _, *rows = evaluate_task(model, task, task.held_out("validation", VALIDATION_SAMPLES), modes)
    for row in rows:
        print(f"  |C| <= {row.mode}: {_merit(row):.3f}, {row.tokens_per_forward:.2f} tokens per forward")
    fast_enough = [row for row in rows if row.tokens_per_forward >= TOKENS_PER_FORWARD_WANTED]
    best = max(fast_enough, key=_merit, default=max(rows, key=lambda row: row.tokens_per_forward))
    return float(best.mode)


def _merit(row: ModeFigures) -> float:
    return row.identical if row.accuracy is None else row.accuracy


def figures_text(task, rows: list[ModeFigures], seconds: dict[str, float], quality: str = "") -> str:
    """The measured part of the card."""
    steps = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    command = "python -m hub_cards.build.build_tiny" + ("" if task.name == "words" else f" {task.name}")
    return "\n".join(
        [
            task.description,
            "",
            f"Measured on {TEST_SAMPLES} held-out samples, greedy, float32, on a CPU (threads: "
            f"{torch.get_num_threads()}); forwards of the backbone all counted, time ratio: static's time over the "
            "mode's.",
            "",
            *markdown_table(rows),
            "",
            *([quality, ""] if quality else []),
            f"Built by `{command}`, seed {SEED}: {steps}.",
        ]
    )


def markdown_table(rows: list[ModeFigures]) -> list[str]:
    """The demo's table in Markdown; without the accuracies where there are none."""
    scored = rows[0].accuracy is not None
    names = ["mode", *(["accuracy"] if scored else []), "tokens per forward", "forwards", "time ratio"]
    lines = ["| " + " | ".join([*names, "same answer as static"]) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [row.mode, *([f"{row.accuracy:.3f}"] if scored else []), f"{row.tokens_per_forward:.2f}"]
        cells += [f"{row.forwards}", f"{row.time_ratio:.2f}", f"{row.identical:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_checkpoint(model: MRPForDiffusionLM, task, destination: Path) -> None:
    """Weights, config, generation defaults, tokenizer and remote code."""
    generation, tokenizer = model.generation_config, task.tokenizer
    generation.mrp_mode = "spec"
    generation.max_new_tokens = 8 * -(-task.answer_tokens // 8) + 16
    generation.eos_token_id, generation.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config.base_hash = backbone_hash(model)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    for name, content in task.extra_files().items():
        (destination / name).write_text(content, encoding="utf-8")


class Steps:
    """Runs steps by name, prints the time of each, and keeps the times of a build that was interrupted."""

    def __init__(self, file: Path):
        self.file = file
        self.seconds: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def run(self, name: str, work: Callable, *arguments):
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        result = work(*arguments)
        # a finished step only loads its result when it runs again: its own time is the longer one
        self.seconds[name] = max(self.seconds.get(name, 0.0), time.monotonic() - began)
        self.file.write_text(json.dumps(self.seconds), encoding="utf-8")
        print(f"{name}: {self.seconds[name]:.0f} s", flush=True)
        return result


def build(task, scratch: Path, destination: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    steps = Steps(scratch / "seconds.json")
    backbone = steps.run("backbone", build_backbone, task, scratch)
    steps.seconds["backbone"] = torch.load(scratch / "backbone.pt", weights_only=True)["seconds"]
    model = with_fresh_head(backbone, task)
    steps.run("head", train_head, model, task, scratch)
    finish(model, task, steps, scratch, destination)


def finish(model: MRPForDiffusionLM, task, steps: Steps, scratch: Path, destination: Path) -> None:
    """All behind the head's first training: refinement, figures, and the folder."""
    steps.run("refinement", refine_head, model, task, scratch)
    model.config.calibrated_remask_threshold = steps.run("threshold", choose_residual_threshold, model, task)
    model.config.trained_acceptance = steps.run("acceptance", measure_acceptance, model, task)
    samples = task.held_out("test", TEST_SAMPLES)
    rows = steps.run("evaluation", evaluate_task, model, task, samples)
    quality = task.quality(model, samples)
    write_checkpoint(model, task, destination)
    figures = figures_text(task, rows, steps.seconds, quality)
    card = render_card(
        model,
        name=destination.name,
        repository=f"hub_cards/{destination.name}",
        license="apache-2.0",
        figures=figures,
    )
    (destination / "README.md").write_text(card, encoding="utf-8")
    print(figures)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", choices=TASKS, default="words", help="what it is trained on (words)")
    parser.add_argument("--scratch", type=Path, help="where unfinished work is kept (build/TASK)")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint (the embedded one)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    task = TASKS[options.task]
    build(task, options.scratch or Path("build") / task.name, options.out or task.folder)


if __name__ == "__main__":
    main()

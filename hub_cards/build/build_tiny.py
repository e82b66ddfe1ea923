"""Build an embedded checkpoint from nothing but this package: tokenizer, backbone, head, threshold, figures, card.

    python -m hub_cards.build.build_tiny            # word problems
    python -m hub_cards.build.build_tiny code       # functions of Python's standard library

Everything is seeded. To resume a build that was killed, start it again with the same scratch folder.
"""

import argparse
import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.checkpoints.cards import render_card
from mrp_trainer.checkpoints.durable import write_text
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.checkpoints.resume import last_checkpoint
from mrp_trainer.checkpoints.weight_files import backbone_hash
from mrp_trainer.evaluation.acceptance import acceptance_range
from mrp_trainer.evaluation.draft_profile import measure_profile
from mrp_trainer.evaluation.modes import mode_options
from mrp_trainer.evaluation.results import Result, new_result, save_result
from mrp_trainer.evaluation.summary import ModeFigures
from mrp_trainer.evaluation.task_evaluation import demo_rows, evaluate_task
from mrp_trainer.evaluation.trajectories import packed, trajectories

from ..tasks.tasks import Sample, Task
from .recipes import RECIPES, Recipe
from .result_tables import card_figures
from .results import block
from .tiny_backbone import encode_sample, train_backbone

SEED = 0
BLOCK_SIZE = 8
HEAD_ROWS = 32
REFINEMENT = {
    "choice_weight": 0.1,
    "muon_learning_rate": 0.01,
    "learning_rate": 1.5e-3,
    "per_device_train_batch_size": 16,
}
HEAD_NORM = 0.1  # starting from zero, the layers would get almost no gradient for hundreds of steps
DRAFTS = 4
TEST_SAMPLES = 200
VALIDATION_SAMPLES = 200
PROFILE_SAMPLES = 16
RESIDUAL_THRESHOLDS = (0.25, 0.5, 1.0, 2.0, 4.0)
TOKENS_PER_FORWARD_WANTED = 2.5  # minimum for remasking when its threshold is chosen

Returned = TypeVar("Returned")


def tiny_config(recipe: Recipe, num_mrp_layers: int) -> MRPConfig:
    """Configuration of an embedded checkpoint with a head of `num_mrp_layers` layers (0: without a head)."""
    tokenizer = recipe.task.tokenizer
    return MRPConfig(
        **recipe.shape,
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
        base_model=recipe.task.folder.name.removesuffix("-mrp"),
    )


def build_backbone(recipe: Recipe, scratch: Path) -> MRPForDiffusionLM:
    """Return the trained backbone, without a head; training resumes from the state in the scratch folder."""
    torch.manual_seed(SEED)
    model = MRPForDiffusionLM(tiny_config(recipe, num_mrp_layers=0))
    state_file = scratch / "backbone.pt"
    train_backbone(model, recipe.task.tokenizer, recipe.backbone_sample, recipe.backbone, state_file)
    return model


def with_fresh_head(
    backbone: MRPForDiffusionLM, recipe: Recipe, num_mrp_layers: int = 1, residual: bool = True
) -> MRPForDiffusionLM:
    """Return a model with the weights of `backbone` and a newly initialised head.

    Args:
        backbone: model to copy the backbone from; its own head, if any, is ignored.
        recipe: recipe of the checkpoint.
        num_mrp_layers: number of layers of the head.
        residual: whether the head predicts a residual rather than the full distribution.
    """
    torch.manual_seed(SEED)
    config = tiny_config(recipe, num_mrp_layers)
    config.mrp_residual = residual
    model = MRPForDiffusionLM(config)
    frozen = {name: value for name, value in backbone.state_dict().items() if not name.startswith("mrp_head.")}
    model.load_state_dict(model.state_dict() | frozen)
    torch.nn.init.constant_(model.mrp_head.norm.weight, HEAD_NORM if residual else 1.0)
    model.generation_config.eos_token_id = recipe.task.tokenizer.eos_token_id
    return model.eval()


def sample_rows(tokenizer: PreTrainedTokenizerBase, samples: Iterable[Sample]) -> Dataset:
    """Rows for `MRPTrainer`, as `prepare_dataset` makes them, except that the last block is filled up with eos.

    The backbone was trained to fill it, and the head sees it masked in decoding.
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


def visited_rows(backbone: MRPForDiffusionLM, recipe: Recipe, scratch: Path, count: int) -> Dataset:
    """Training rows of the states that decoding visits: the backbone's own answers to `count` prompts of the head.

    They are stored in the scratch folder and read from there the next time.
    """
    file = scratch / f"trajectories-{count}.parquet"
    if not file.exists():
        task = recipe.task
        backbone.generation_config.eos_token_id = task.tokenizer.eos_token_id
        prompts = task.tokenizer([recipe.head_sample(n).prompt for n in range(count)])["input_ids"]
        rows = Dataset.from_list(list(trajectories(backbone, prompts, max_new_tokens=task.answer_tokens)))
        rows.to_parquet(str(file.with_suffix(".new")))
        file.with_suffix(".new").replace(file)
    return Dataset.from_parquet(str(file))


def train_head(model: MRPForDiffusionLM, recipe: Recipe, scratch: Path) -> None:
    """Train the head in place on random states, or load it if the scratch folder holds the finished head."""
    samples = map(recipe.head_sample, range(recipe.head_steps * HEAD_ROWS))
    rows = partial(sample_rows, recipe.task.tokenizer, samples)
    arguments = head_arguments(scratch / "head-training", max_steps=recipe.head_steps)
    train_or_load(model, rows, arguments, scratch / "head")


def refine_head(model: MRPForDiffusionLM, recipe: Recipe, scratch: Path) -> None:
    """Continue training the head on the states that decoding visits, with the settings `compare_heads` found best."""

    def rows() -> Dataset:
        visited = visited_rows(model, recipe, scratch, recipe.refine_samples)
        return Dataset.from_list(packed(list(visited), max(sum(row["lengths"]) for row in visited)))

    arguments = head_arguments(scratch / "refinement", max_steps=recipe.refine_steps, **REFINEMENT)
    train_or_load(model, rows, arguments, scratch / "refined-head")


def train_or_load(
    model: MRPForDiffusionLM, make_rows: Callable[[], Dataset], arguments: MRPTrainingArguments, finished: Path
) -> None:
    """Train the head in place and save it, or load it if it has been saved before.

    Args:
        model: model whose head is trained.
        make_rows: called for the training rows if they are needed.
        arguments: training arguments; an interrupted training resumes from their output folder.
        finished: folder of the finished head.
    """
    if finished.exists():
        load_head(model, finished)
        return
    trainer = MRPTrainer(model, arguments, train_dataset=make_rows())
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))
    save_head(model.eval(), finished)


def head_arguments(output: Path, **changes: Any) -> MRPTrainingArguments:
    """Training arguments of the embedded heads, with the given changes."""
    defaults = {
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
    return MRPTrainingArguments(str(output), **defaults | changes)


def measure_acceptance(model: MRPForDiffusionLM, task: Task) -> dict | None:
    """Range of the accepted drafts on validation samples, which `mrp verify` compares with."""
    prompts = [sample.prompt for sample in task.held_out("validation", VALIDATION_SAMPLES)]
    return acceptance_range(model, task.tokenizer(prompts)["input_ids"], DRAFTS, task.answer_tokens)


def measure_draft_profile(model: MRPForDiffusionLM, task: Task) -> dict[str, list[dict]]:
    """Measure what drafting gains on validation samples, with the head and without, for `mrp_steps="auto"`."""
    prompts = [sample.prompt for sample in task.held_out("validation", PROFILE_SAMPLES)]
    ids = task.tokenizer(prompts)["input_ids"]
    return {
        draft: [asdict(gain) for gain in measure_profile(model, ids, draft, task.answer_tokens)]
        for draft in ("head", "self")
    }


def choose_residual_threshold(model: MRPForDiffusionLM, task: Task) -> float:
    """Choose the threshold of |C| for `remask_criterion="residual"` on validation samples.

    Among the thresholds that reach `TOKENS_PER_FORWARD_WANTED`, the one with the most right answers is chosen, or with
    the most answers equal to static decoding's if the task has no accuracy. If none is that fast, the fastest is.
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


def default_scratch(recipe: Recipe) -> Path:
    """The folder for unfinished work unless another one is given, relative to the current folder."""
    return Path("build") / recipe.task.name


def build_command(recipe: Recipe, scratch: Path, destination: Path) -> str:
    """The command line that builds a checkpoint, without options at their default.

    Args:
        recipe: recipe of the checkpoint.
        scratch: folder for unfinished work.
        destination: folder of the checkpoint.
    """
    words = ["python", "-m", "hub_cards.build.build_tiny", recipe.task.name]
    if scratch != default_scratch(recipe):
        words += ["--scratch", str(scratch)]
    if destination != recipe.task.folder:
        words += ["--out", str(destination)]
    return shlex.join(words)


def figures_text(recipe: Recipe, demo: Result, built: Result) -> str:
    """The card's description of the task and its figures, in a block that `hub_cards.build.results` can renew.

    Args:
        recipe: recipe of the checkpoint.
        demo: result of decoding held-out samples in every mode.
        built: result of the build: the time of every step, and the backbone's quality.
    """
    return f"{recipe.description}\n\n{block(f'card-{recipe.task.name}', card_figures(demo, built))}"


def forwards_saved(rows: Sequence[ModeFigures]) -> dict[str, float]:
    """Backbone forwards of the first mode over those of every other mode, by mode."""
    return {row.mode: rows[0].forwards / row.forwards for row in rows[1:]}


def write_checkpoint(model: MRPForDiffusionLM, recipe: Recipe, destination: Path) -> None:
    """Write weights, configuration, generation defaults, tokenizer, remote code and the recipe's extra files."""
    generation, tokenizer = model.generation_config, recipe.task.tokenizer
    generation.mrp_mode = "spec"
    generation.max_new_tokens = 8 * -(-recipe.task.answer_tokens // 8) + 16
    generation.eos_token_id, generation.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config.base_hash = backbone_hash(model)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    for name, content in recipe.extra_files().items():
        write_text(destination / name, content)


class Steps:
    """Runs the steps of a build and measures them.

    Attributes:
        seconds: time of every step, by name. They are kept in `file`, so that they survive an interrupted build.
    """

    def __init__(self, file: Path):
        self.file = file
        self.seconds: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def run(self, name: str, work: Callable[..., Returned], *arguments: Any) -> Returned:
        """Call `work` with the arguments, print how long it took, and return its result."""
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        result = work(*arguments)
        # A step that was finished in an earlier run only loads its result now: keep the longer time.
        self.seconds[name] = max(self.seconds.get(name, 0.0), time.monotonic() - began)
        write_text(self.file, json.dumps(self.seconds))
        print(f"{name}: {self.seconds[name]:.0f} s", flush=True)
        return result


def build(recipe: Recipe, scratch: Path, destination: Path) -> Result:
    """Build a checkpoint from scratch, or resume building it.

    Args:
        recipe: recipe of the checkpoint.
        scratch: folder for unfinished work.
        destination: folder of the checkpoint.

    Returns:
        The result of the build: the time of every step, the backbone's quality, and the forwards saved by mode.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    steps = Steps(scratch / "seconds.json")
    backbone = steps.run("backbone", build_backbone, recipe, scratch)
    steps.seconds["backbone"] = torch.load(scratch / "backbone.pt", weights_only=True)["seconds"]
    model = with_fresh_head(backbone, recipe)
    steps.run("head", train_head, model, recipe, scratch)
    return finish(model, recipe, steps, scratch, destination)


def finish(model: MRPForDiffusionLM, recipe: Recipe, steps: Steps, scratch: Path, destination: Path) -> Result:
    """Run everything that follows the head's first training: refinement, measurements, and writing the folder.

    Returns:
        See `build`.
    """
    task = recipe.task
    steps.run("refinement", refine_head, model, recipe, scratch)
    model.config.calibrated_remask_threshold = steps.run("threshold", choose_residual_threshold, model, task)
    model.config.trained_acceptance = steps.run("acceptance", measure_acceptance, model, task)
    model.config.draft_profile = steps.run("draft profile", measure_draft_profile, model, task)
    samples = task.held_out("test", TEST_SAMPLES)
    rows = steps.run("evaluation", evaluate_task, model, task, samples)
    times = [{"step": name, "seconds": spent} for name, spent in steps.seconds.items()]
    built = new_result(
        "build_tiny",
        command=build_command(recipe, scratch, destination),
        settings={"task": task.name, "seed": SEED},
        figures={
            "rows": times,
            "quality": recipe.quality(model, samples),
            "forwards_saved": forwards_saved(rows),
        },
    )
    demo = new_result(
        "demo",
        command=f"mrp demo --model {task.name}",
        settings={"model": task.folder.name, "samples": len(samples), "batch_size": 100},
        figures={"rows": demo_rows(rows)},
    )
    write_checkpoint(model, recipe, destination)
    figures = figures_text(recipe, demo, built)
    card = render_card(
        model,
        name=destination.name,
        repository=f"hub_cards/{destination.name}",
        license="apache-2.0",
        figures=figures,
    )
    write_text(destination / "README.md", card)
    print(figures)
    return built


def main(arguments: list[str] | None = None) -> None:
    """Build the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", choices=RECIPES, default="words", help="task to train on (default: words)")
    parser.add_argument("--scratch", type=Path, help="folder for unfinished work (default: build/TASK)")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint (default: the embedded one)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    parser.add_argument("--record", type=Path, help="also write the figures to this result file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.task]
    scratch = options.scratch or default_scratch(recipe)
    result = build(recipe, scratch, options.out or recipe.task.folder)
    if options.record is not None:
        save_result(options.record, result)


if __name__ == "__main__":
    main()

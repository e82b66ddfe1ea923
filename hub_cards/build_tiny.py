"""Build the embedded checkpoint from nothing but this package: tokenizer, backbone, head, threshold, figures, card.

    python -m hub_cards.build_tiny --scratch build/tiny

Everything is seeded. A run that was killed goes on where it was when it is started again with the same scratch folder.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from trainer import MRPTrainer, MRPTrainingArguments
from trainer.cards import render_card
from trainer.demo import REMASK, Row, run_demo
from trainer.head_files import load_head, save_head

from .tiny_backbone import Recipe, encode_problem, train_backbone
from .word_problems import problems
from .word_tokenizer import build_tokenizer

SEED = 0
BLOCK_SIZE = 8
HEAD_STEPS = 600
HEAD_ROWS = 32
HEAD_NORM = 0.1  # from a norm of zero the layers get next to no gradient for hundreds of steps
TEST_PROBLEMS = 200
VALIDATION_PROBLEMS = 200
RESIDUAL_THRESHOLDS = (0.25, 0.5, 1.0, 2.0, 4.0)
TOKENS_PER_FORWARD_WANTED = 2.5  # of remasking, when its threshold is chosen
DESTINATION = Path(__file__).parent / "sdar-tiny-mrp"


def tiny_config(tokenizer, num_mrp_layers: int) -> MRPConfig:
    return MRPConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        block_size=BLOCK_SIZE,
        mask_token_id=tokenizer.mask_token_id,
        num_mrp_layers=num_mrp_layers,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        base_model="sdar-tiny",
    )


def build_backbone(tokenizer, scratch: Path) -> MRPForDiffusionLM:
    """The trained backbone, without a head; trains what the scratch folder does not hold yet."""
    torch.manual_seed(SEED)
    model = MRPForDiffusionLM(tiny_config(tokenizer, num_mrp_layers=0))
    train_backbone(model, tokenizer, Recipe(seed=SEED), scratch / "backbone.pt")
    return model


def with_fresh_head(backbone: MRPForDiffusionLM, tokenizer) -> MRPForDiffusionLM:
    torch.manual_seed(SEED)
    model = MRPForDiffusionLM(tiny_config(tokenizer, num_mrp_layers=1))
    model.load_state_dict(model.state_dict() | backbone.state_dict())
    torch.nn.init.constant_(model.mrp_head.norm.weight, HEAD_NORM)
    return model.eval()


def head_rows(tokenizer, split: str, n: int, seed: int) -> Dataset:
    """Rows for `MRPTrainer`, as `prepare_dataset` makes them, except that the last block is filled with eos.

    The backbone learned to fill it, and in decoding the head sees it masked.
    """
    encoded = [encode_problem(tokenizer, one, BLOCK_SIZE) for one in problems(split, n, seed)]
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


def train_head(model: MRPForDiffusionLM, tokenizer, scratch: Path) -> None:
    """Train the head in place, or load it when the scratch folder holds it finished."""
    finished = scratch / "head"
    if finished.exists():
        load_head(model, finished)
        return
    arguments = MRPTrainingArguments(
        str(scratch / "head-training"),
        max_steps=HEAD_STEPS,
        per_device_train_batch_size=HEAD_ROWS,
        learning_rate=3e-3,
        muon_learning_rate=0.02,
        warmup_steps=10,
        unroll_steps=3,
        noise_per_block=True,
        seed=SEED,
        save_steps=100,
        save_total_limit=1,
        logging_steps=25,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = head_rows(tokenizer, "train", HEAD_STEPS * HEAD_ROWS, seed=SEED + 1)  # problems new to the backbone
    trainer = MRPTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    interrupted = Path(arguments.output_dir).is_dir() and get_last_checkpoint(arguments.output_dir)
    trainer.train(resume_from_checkpoint=interrupted or None)
    save_head(model.eval(), finished)


def choose_residual_threshold(model: MRPForDiffusionLM, tokenizer) -> float:
    """The |C| for `remask_criterion="residual"`, by validation problems.

    The most accurate one that keeps the wanted tokens per forward; the fastest when none does.
    """
    options = REMASK | {"remask_criterion": "residual"}
    modes = {str(delta): options | {"remask_threshold": delta} for delta in RESIDUAL_THRESHOLDS}
    rows = run_demo(model, tokenizer, list(problems("validation", VALIDATION_PROBLEMS)), modes)
    for row in rows:
        print(f"  |C| <= {row.name}: accuracy {row.accuracy:.3f}, {row.tokens_per_forward:.2f} tokens per forward")
    fast_enough = [row for row in rows if row.tokens_per_forward >= TOKENS_PER_FORWARD_WANTED]
    best = max(fast_enough, key=lambda row: row.accuracy, default=max(rows, key=lambda row: row.tokens_per_forward))
    return float(best.name)


def figures_text(rows: list[Row], seconds: dict[str, float]) -> str:
    """The measured part of the card."""
    lines = [
        "The task: grade-school word problems with two to six worked steps (`hub_cards/word_problems.py`). An answer "
        "is right when every step, the name, the thing and the number are.",
        "",
        f"Measured on {TEST_PROBLEMS} held-out problems, greedy, float32, {torch.get_num_threads()} CPU threads; "
        "forwards of the backbone all counted, time ratio: static's time over the mode's.",
        "",
        "| mode | accuracy | tokens per forward | forwards | time ratio | same answer as static |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.accuracy:.3f} | {r.tokens_per_forward:.2f} | {r.backbone_forwards} "
        f"| {r.wall_clock_ratio:.2f} | {r.identical:.1%} |"
        for r in rows
    ]
    steps = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    return "\n".join([*lines, "", f"Built by `python -m hub_cards.build_tiny`, seed {SEED}: {steps}."])


def write_checkpoint(model: MRPForDiffusionLM, tokenizer, destination: Path) -> None:
    """Weights, config, generation defaults, tokenizer and remote code."""
    generation = model.generation_config
    generation.mrp_mode = "spec"
    generation.max_new_tokens = 64
    generation.eos_token_id, generation.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


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


def build(scratch: Path, destination: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    steps = Steps(scratch / "seconds.json")
    tokenizer = build_tokenizer()
    backbone = steps.run("backbone", build_backbone, tokenizer, scratch)
    steps.seconds["backbone"] = torch.load(scratch / "backbone.pt", weights_only=True)["seconds"]
    model = with_fresh_head(backbone, tokenizer)
    steps.run("head", train_head, model, tokenizer, scratch)
    model.config.calibrated_remask_threshold = steps.run("threshold", choose_residual_threshold, model, tokenizer)
    rows = steps.run("evaluation", run_demo, model, tokenizer, list(problems("test", TEST_PROBLEMS)))
    write_checkpoint(model, tokenizer, destination)
    figures = figures_text(rows, steps.seconds)
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
    parser.add_argument("--scratch", type=Path, default=Path("build/tiny"), help="where unfinished work is kept")
    parser.add_argument("--out", type=Path, default=DESTINATION, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    build(options.scratch, options.out)


if __name__ == "__main__":
    main()

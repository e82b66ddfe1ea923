"""What an evaluation asks of the head beyond decoding: KL by depth, and the |C| that separates doubtful reveals."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from ..data.collator import MRPCollator
from .frontier import accuracy_weight
from .head_metrics import HeadMetrics, measure_head
from .modes import BACKBONE_ONLY
from .runs import Settings, decode_batch, prompt_ids, write_json
from .scorers import Scorer

CANDIDATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # |C|, in logits
PROPOSALS = {"mrp_mode": "remask", "remask_criterion": "residual", "confidence_threshold": 0.5}


@torch.no_grad()
def kl_by_depth(
    model, samples: list[tuple[list[int], list[int]]], steps: int, batch_size: int = 16, seed: int = 0
) -> dict[str, list[float]]:
    """KL(B || A) and KL(B || A + C) where k = 1..K tokens of a block were revealed since A.

    Noise and reveals are those of training (a random share of the answer masked, one random token of each block
    revealed a step), so the figures compare with a training log.

    Args:
        samples: (prompt, answer) token ids; those with an empty answer are left out.
        steps: K.
        seed: of the noise.

    Returns:
        `before` and `after`, [K] (shorter where nothing was left to compare), in nats per masked token.
    """
    config = model.config
    collate = MRPCollator(config.block_size, config.mask_token_id, steps, config.pad_token_id or 0, seed=seed)
    rows = [
        {
            "input_ids": prompt + answer,
            "answer_mask": [0] * len(prompt) + [1] * len(answer),
            "lengths": [len(prompt) + len(answer)],
            "sample_ids": [number],
        }
        for number, (prompt, answer) in enumerate(samples)
        if answer
    ]
    metrics = HeadMetrics.zeros(steps, model.device)
    for start in range(0, len(rows), batch_size):
        batch = {name: value.to(model.device) for name, value in collate(rows[start : start + batch_size]).items()}
        inputs = {name: batch[name] for name in ("input_ids", "revealed_ids", "clean_ids", "segment_ids")}
        out = model(**inputs, logits_to_keep=torch.empty(0, dtype=torch.long, device=model.device), teacher=True)
        metrics += measure_head(
            out.last_hidden_state,
            out.corrected_hidden_states,
            out.revealed_hidden_states,
            model.lm_head.weight,
            batch["loss_weight"],
            batch["block_ids"],
            config.mask_token_id,
        )
    figures = metrics.summary()
    return {"before": figures.kl_before, "after": figures.kl_after}


def calibrate(
    model,
    tokenizer,
    rows: list[dict],
    scorer: Scorer,
    settings: Settings,
    candidates=CANDIDATES,
    on_candidate: Callable[[dict], None] = lambda figures: None,
) -> float:
    """The |C| above which `remask_criterion="residual"` should mask a token again, on these prompts.

    Each candidate decodes all prompts at `confidence_threshold` 0.5. The best has the highest
    accuracy * W(accuracy) * tokens per forward, where W is the weight of AUP against backbone-only decoding; of
    equals the smallest.

    Args:
        rows: a handful of prompts, others than those that will be reported.
        on_candidate: called with the figures of each: remask_threshold, accuracy, tokens_per_forward, value.

    Raises:
        ValueError: when no candidate gets any answer right: there is nothing to tell them apart by.
    """
    prompts = [prompt_ids(tokenizer, row, settings.raw) for row in rows]
    reference, _ = _accuracy_and_speed(model, tokenizer, prompts, rows, scorer, settings, BACKBONE_ONLY)
    best = None
    for threshold in sorted(candidates):
        options = PROPOSALS | {"remask_threshold": threshold}
        accuracy, speed = _accuracy_and_speed(model, tokenizer, prompts, rows, scorer, settings, options)
        value = accuracy * accuracy_weight(accuracy, reference) * speed
        figures = {
            "remask_threshold": threshold,
            "accuracy": accuracy,
            "tokens_per_forward": speed,
            "value": value,
        }
        on_candidate(figures)
        if best is None or value > best["value"]:
            best = figures
    if not best["value"]:
        raise ValueError(
            f"no answer to {len(rows)} prompts was right with any remask_threshold: calibrate on more or easier ones"
        )
    return best["remask_threshold"]


def _accuracy_and_speed(model, tokenizer, prompts, rows, scorer, settings: Settings, options: dict):
    score, tokens, forwards = 0.0, 0, 0
    for start in range(0, len(rows), settings.batch_size):
        at = slice(start, start + settings.batch_size)
        decoded = decode_batch(model, prompts[at], settings.options | options, settings.max_new_tokens, settings.seed)
        for row, result in zip(rows[at], decoded, strict=True):
            score += scorer(tokenizer.decode(result["token_ids"], skip_special_tokens=True), row)
            tokens += len(result["token_ids"])
            forwards += result["forwards"]
    return score / len(rows), tokens / forwards


def store_threshold(folder, threshold: float):
    """Write `calibrated_remask_threshold` into the config.json of one of our checkpoints.

    Raises:
        ValueError: when the folder holds none.
    """
    check_folder(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, config | {"calibrated_remask_threshold": threshold})


def check_folder(folder):
    """Raise a ValueError unless the folder holds one of our checkpoints, which can keep a threshold."""
    path = Path(folder) / "config.json"
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8")).get("model_type") != "sdar_mrp":
        raise ValueError(
            f"{folder} is no folder of a converted checkpoint, so the threshold cannot be stored: "
            "make one with `mrp convert` first"
        )

"""Find and store the remask threshold: the |C| above which `remask_criterion="residual"` masks a token again."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM

from ..checkpoints.weight_files import local_source
from ..data.wording import counted
from .decoding import Totals, decode_prompts, prompt_ids
from .frontier import accuracy_weight
from .modes import BACKBONE_ONLY
from .runs import Settings, write_json
from .scorers import Scorer

CANDIDATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # |C|, in logits
PROPOSALS = {"mrp_mode": "remask", "remask_criterion": "residual", "confidence_threshold": 0.5}


def calibrate(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    scorer: Scorer,
    settings: Settings,
    candidates: Sequence[float] = CANDIDATES,
    on_candidate: Callable[[dict], None] = lambda figures: None,
) -> float:
    """Return the candidate that decodes these prompts best.

    Each candidate decodes all prompts at `confidence_threshold` 0.5. The best has the highest
    accuracy * W(accuracy) * tokens per forward, where W is the weight of `area_under_parallelism` against
    backbone-only decoding. If several are equally good, the smallest is chosen.

    Args:
        model: the model, with a residual head.
        tokenizer: its tokenizer.
        rows: a few rows of data, different from those that results will be reported on.
        scorer: function of (completion, row).
        settings: how to decode; its modes are not used.
        candidates: thresholds to compare.
        on_candidate: called with the figures of each: remask_threshold, accuracy, tokens_per_forward, value.

    Raises:
        ValueError: if no candidate gets any answer right, so that nothing tells them apart.
    """
    prompts = [prompt_ids(tokenizer, row, settings.raw) for row in rows]

    def accuracy_and_speed(options: dict) -> tuple[float, float]:
        options = settings.options | options | {"tokenizer": tokenizer}  # for stop_strings
        answers = list(
            decode_prompts(model, prompts, options, settings.max_new_tokens, settings.batch_size, seed=settings.seed)
        )
        texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
        score = sum(scorer(text, row) for text, row in zip(texts, rows, strict=True))
        return score / len(rows), Totals.of(answers).tokens_per_forward

    reference, _ = accuracy_and_speed(BACKBONE_ONLY)
    best = None
    for threshold in sorted(candidates):
        accuracy, speed = accuracy_and_speed(PROPOSALS | {"remask_threshold": threshold})
        figures = {
            "remask_threshold": threshold,
            "accuracy": accuracy,
            "tokens_per_forward": speed,
            "value": accuracy * accuracy_weight(accuracy, reference) * speed,
        }
        on_candidate(figures)
        if best is None or figures["value"] > best["value"]:
            best = figures
    if not best["value"]:
        raise ValueError(
            f"no answer to {counted(len(rows), 'prompt')} was right with any remask_threshold: calibrate on more or "
            "easier ones"
        )
    return best["remask_threshold"]


def store_in_config(source: str | Path, **values: Any) -> Path:
    """Write values into the config.json of a converted checkpoint, atomically, and return the file.

    Raises:
        ValueError: if the source is not the folder of one.
    """
    path = config_file(source)
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, config | values)
    return path


def config_file(source: str | Path) -> Path:
    """Return the config.json of a converted checkpoint, which can keep what a calibration finds.

    Args:
        source: folder of the checkpoint, or the name of an embedded one.

    Raises:
        ValueError: if it is neither.
    """
    path = Path(local_source(source)) / "config.json"
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8")).get("model_type") != "sdar_mrp":
        raise ValueError(
            f"{source} is not the folder of a converted checkpoint, so nothing can be stored: "
            "make one with `mrp convert` first"
        )
    return path

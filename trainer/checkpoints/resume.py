"""Which checkpoints a run can resume from, bit for bit."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS

logger = logging.get_logger(__name__)

RUN_FILE = "mrp_run.json"


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest complete checkpoint in a folder, or None. Incomplete ones are skipped with a warning."""
    for path in reversed(sort_checkpoints(folder)):
        missing = missing_files(path)
        if not missing:
            return path
        logger.warning("%s is incomplete and skipped: it lacks %s", path, ", ".join(missing))
    return None


def missing_files(checkpoint: str | Path) -> list[str]:
    """Return the names of the files that a checkpoint lacks.

    The trainer's state is written last, so a checkpoint in which it can be read has its other files whole.
    """
    folder = Path(checkpoint)
    weights = ADAPTER_WEIGHTS if (folder / ADAPTER_WEIGHTS).exists() else HEAD_WEIGHTS
    needed = (weights, HEAD_CONFIG, RUN_FILE, OPTIMIZER_NAME, SCHEDULER_NAME)
    missing = [name for name in needed if not (folder / name).is_file()]
    if not any(folder.glob("rng_state*.pth")):
        missing.append("rng_state.pth")
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        missing.append(TRAINER_STATE_NAME)
    return missing


def run_settings(args: TrainingArguments, dataset_rows: int | None) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed, under names that fit an error message.

    With others a run would continue at another place in its data, or with another optimizer.

    Args:
        args: the training arguments (`MRPTrainingArguments`).
        dataset_rows: number of rows of the training data; None for a stream.
    """
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {
        "rows per step (per_device_train_batch_size * gradient_accumulation_steps * processes)": rows_per_step,
        "rows of train_data": dataset_rows,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "Muon (muon_learning_rate)": args.muon_learning_rate is not None,
    }


def check_resumable(checkpoint: str | Path, settings: dict[str, Any]) -> None:
    """Check that a checkpoint is complete and of a run with the same settings.

    Args:
        checkpoint: the checkpoint's folder.
        settings: `run_settings` of the run that is to resume from it.

    Raises:
        ValueError: naming the missing files, or the settings that have changed.
    """
    missing = missing_files(checkpoint)
    remedy = (
        f"resume from another checkpoint, or start a new run from its head with head: {checkpoint} and another "
        "output_dir"
    )
    if missing:
        raise ValueError(f"resume_from_checkpoint: {checkpoint} lacks {', '.join(missing)}: {remedy}")
    stored = json.loads((Path(checkpoint) / RUN_FILE).read_text(encoding="utf-8"))
    changed = [
        f"{name} was {stored.get(name)} and is {value}"
        for name, value in settings.items()
        if stored.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} belongs to a run with other settings: {'; '.join(changed)}. "
            f"Restore them, {remedy}"
        )

"""Which checkpoint a run can go on from, bit for bit."""

import json
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS

logger = logging.get_logger(__name__)

RUN_FILE = "mrp_run.json"


def last_checkpoint(folder) -> str | None:
    """The newest checkpoint in a folder that holds everything; newer ones that a kill cut short are named."""
    for path in reversed(sort_checkpoints(folder)):
        missing = missing_files(path)
        if not missing:
            return path
        logger.warning("%s is incomplete and passed over: it lacks %s", path, ", ".join(missing))
    return None


def missing_files(checkpoint) -> list[str]:
    """What a checkpoint lacks to be resumed. The trainer's state is written last: it vouches for the others."""
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


def run_settings(args, dataset_rows: int | None) -> dict:
    """What a run must keep, by the words of an error message, or it loses its place in the data or its optimizer.

    Args:
        args: `MRPTrainingArguments`.
        dataset_rows: of the training data; None for a stream.
    """
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {
        "rows per step (per_device_train_batch_size * gradient_accumulation_steps * processes)": rows_per_step,
        "rows of train_data": dataset_rows,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "Muon (muon_learning_rate)": args.muon_learning_rate is not None,
    }


def check_resumable(checkpoint, settings: dict) -> None:
    """Refuse a checkpoint that is incomplete or of a run with other settings.

    Raises:
        ValueError: naming what is missing, or what has changed from what to what.
    """
    missing = missing_files(checkpoint)
    remedy = f"resume from another checkpoint, or start in another output_dir from its head, head: {checkpoint}"
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
            f"resume_from_checkpoint: {checkpoint} is of a run with other settings: {'; '.join(changed)}. Set them as "
            f"they were, {remedy}"
        )

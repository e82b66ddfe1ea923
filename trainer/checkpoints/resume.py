"""Which checkpoints a run can resume from, bit for bit, and when it may start in a folder."""

import json
import math
import re
from pathlib import Path
from typing import Any

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from .durable import MANIFEST, damaged_files, unseal
from .head_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS
from .run_record import HEAD_FILES, RUN_FILE, RunRecord, read_record
from .run_settings import CHANGEABLE, METRIC_SCHEDULES, OPTIMIZER_SETTINGS, differences, listed

logger = logging.get_logger(__name__)

LOG_WINDOW = "mrp_log_window.json"


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest checkpoint of the run in a folder that is whole, or None.

    Others are passed over with a warning that says why: incomplete or damaged ones, and those of another run.
    """
    record = read_record(folder)
    for path in reversed(sort_checkpoints(folder)):
        fault = fault_of(path)
        if not fault and record is not None and not owned(record, path):
            fault = "belongs to another run"
        if not fault:
            return path
        logger.warning("%s %s: it is passed over", path, fault)
    return None


def fault_of(checkpoint: str | Path) -> str | None:
    """Return in words which files a checkpoint lacks or which are damaged, or None if it is whole."""
    folder = Path(checkpoint)
    weights = ADAPTER_WEIGHTS if (folder / ADAPTER_WEIGHTS).exists() else HEAD_WEIGHTS
    needed = (weights, HEAD_CONFIG, RUN_FILE, OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, LOG_WINDOW, MANIFEST)
    missing = [name for name in needed if not (folder / name).is_file()]
    if not any(folder.glob("rng_state*.pth")):
        missing.append("rng_state.pth")
    if missing:
        return f"is incomplete (it lacks {', '.join(missing)})"
    damaged = damaged_files(folder)
    return f"is damaged ({', '.join(damaged)} differs from what was written)" if damaged else None


def step_of(checkpoint: str | Path) -> int:
    """Return the number of steps that had been taken when a whole checkpoint was written."""
    return _state_of(checkpoint)["global_step"]


def _state_of(checkpoint: str | Path) -> dict[str, Any]:
    return json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))


def owned(record: RunRecord, checkpoint: str | Path) -> bool:
    """Return whether a whole checkpoint belongs to a run."""
    stored = read_record(checkpoint)
    return stored is not None and record.owns(stored.run_id, step_of(checkpoint))


def start_run(folder: str | Path, settings: dict[str, Any], *, overwrite: bool = False) -> RunRecord:
    """Record a new run in its output folder, before its first step.

    Args:
        folder: the output folder.
        settings: `run_settings` of the run.
        overwrite: remove checkpoints and head of the run that is there.

    Raises:
        ValueError: if the folder holds checkpoints or a head, and `overwrite` is False.
    """
    found = _kept_files(Path(folder))
    if found and not overwrite:
        raise ValueError(
            f"output_dir {folder} holds {found[0].name} of another run: choose another output_dir, resume that run "
            "with resume_from_checkpoint: auto, or pass overwrite_output_dir to delete its checkpoints and its head"
        )
    record = RunRecord(settings)
    record.write(folder)  # first: from now on the checkpoints that are deleted next belong to another run
    _remove_run(Path(folder), found)
    return record


def resume_run(
    folder: str | Path, checkpoint: str | Path, settings: dict[str, Any], *, changes: bool, overwrite: bool
) -> RunRecord:
    """Check that a run may resume from a checkpoint, and record it in its output folder.

    Args:
        folder: the output folder; the checkpoint may be in it or elsewhere.
        checkpoint: the checkpoint's folder.
        settings: `run_settings` of the run that is to resume.
        changes: whether settings that can change may differ from those of the checkpoint.
        overwrite: remove checkpoints and head of another run that is in the output folder.

    Raises:
        ValueError: if the checkpoint is not whole or belongs to an older run, if a setting differs that may not, or
            if the folder holds another run.
    """
    folder, checkpoint = Path(folder), Path(checkpoint)
    if fault := fault_of(checkpoint):
        raise ValueError(f"resume_from_checkpoint: {checkpoint} {fault}: {_remedy(checkpoint)}")
    inside = checkpoint.resolve().parent == folder.resolve()
    stored, own = read_record(checkpoint), read_record(folder)
    if own is not None and not owned(own, checkpoint):
        if inside:
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint} belongs to an older run than the one in {folder}: "
                f"{_remedy(checkpoint)}"
            )
        own = None
    found = _kept_files(folder) if own is None and not inside else []
    if found and not overwrite:
        raise ValueError(
            f"output_dir {folder} holds {found[0].name} of another run than {checkpoint}: choose another output_dir, "
            "or pass overwrite_output_dir to delete its checkpoints and its head"
        )
    check_settings(checkpoint, (own or stored).settings, settings, changes)
    _check_length(checkpoint, settings)
    same_run = own is not None and own.settings == settings
    record = (own if same_run else stored).continued_with(settings, step_of(checkpoint))
    record.write(folder)
    if own is None and not inside:
        _remove_run(folder, found)
    return record


def check_settings(source: str | Path, old: dict[str, Any], new: dict[str, Any], changes: bool) -> None:
    """Check that a run continues with the settings that it was started with.

    Args:
        source: the checkpoint or output folder, for the message.
        old: settings of the run that was recorded.
        new: settings of the run that is to continue it.
        changes: whether those in `CHANGEABLE` may differ.

    Raises:
        ValueError: naming each setting that differs and may not, with both values.
    """
    changed = differences(old, new)
    fixed = {name: values for name, values in changed.items() if name not in CHANGEABLE}
    if fixed and changes:
        raise ValueError(
            f"resume_with_changes does not allow these changes, since {source} was trained with the old value: "
            f"{listed(fixed)}. Restore them, or {_new_run(source)}"
        )
    schedule = new["lr_scheduler_type"]
    if changes and schedule in METRIC_SCHEDULES and changed.keys() & set(OPTIMIZER_SETTINGS):
        raise ValueError(
            f"resume_with_changes cannot change the optimizer under lr_scheduler_type {schedule}, whose learning rate "
            f"follows the loss: {listed(changed)}. Restore them, or {_new_run(source)}"
        )
    if changed and not changes:
        advice = "" if fixed else "pass resume_with_changes to apply the new values, "
        raise ValueError(
            f"resume_from_checkpoint: {source} belongs to a run with other settings (old -> new): {listed(changed)}. "
            f"Restore them, {advice}or {_new_run(source)}"
        )


def _check_length(checkpoint: Path, settings: dict[str, Any]):
    """Refuse a run that would end before the checkpoint."""
    state, name, steps = _state_of(checkpoint), "max_steps", settings["max_steps"]
    if steps <= 0 and state["epoch"]:
        steps_per_epoch = round(state["global_step"] / state["epoch"])
        name, steps = "num_train_epochs", math.ceil(settings["num_train_epochs"] * steps_per_epoch)
    if 0 < steps < state["global_step"]:
        raise ValueError(
            f"{name} {settings[name]} ends after step {steps}, but {checkpoint} is at step {state['global_step']}: "
            "resume from an earlier checkpoint"
        )


def _new_run(source: str | Path) -> str:
    return f"start a new run from its head with head: {source} and another output_dir"


def _remedy(checkpoint: Path) -> str:
    return f"resume from another checkpoint, or {_new_run(checkpoint)}"


def _kept_files(folder: Path) -> list[Path]:
    """Return the checkpoints and the files of a head in an output folder, without what a killed save left there."""
    checkpoints = [path for path in _checkpoints(folder) if not _is_unfinished(path)]
    return checkpoints + [folder / name for name in HEAD_FILES if (folder / name).exists()]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))


def _is_unfinished(checkpoint: Path) -> bool:
    """Return whether a checkpoint was never written to the end: its record is written first, its manifest last."""
    if (checkpoint / MANIFEST).exists():
        return False
    return read_record(checkpoint) is not None or not any(checkpoint.iterdir())


def _remove_run(folder: Path, found: list[Path]):
    """Remove unfinished checkpoints; if `_kept_files` found a run, all checkpoints and the head too."""
    for checkpoint in _checkpoints(folder):
        unseal(checkpoint)
    if found:
        for name in (*HEAD_FILES, ADAPTER_CONFIG, TRAINER_STATE_NAME):
            (folder / name).unlink(missing_ok=True)

"""Checkpoints of a training run: the head instead of the whole model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoints.head_files import HEAD_CONFIG, HEAD_WEIGHTS, load_head, save_head
from .checkpoints.resume import RUN_FILE, run_settings
from .checkpoints.sharded import whole_state
from .data.rows import length_of


class HeadCheckpoints(Trainer):
    """A `Trainer` whose checkpoints hold the head, the optimizer and the state of the training, never the backbone.

    Attributes:
        _backbone_identity: `backbone_identity(model)`, which is saved with every head and checked when one is loaded.
            Subclasses set it before FSDP shards the model.
    """

    _backbone_identity: dict[str, str | None]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the head. Every rank must call this, since the head's weights may be sharded."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        model = self.accelerator.unwrap_model(self.model)
        save_head(model, folder, self._backbone_identity, write=self.args.should_save)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        load_head(model, resume_from_checkpoint, self._backbone_identity)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, the trainer's state last: a checkpoint that has it is complete (see resume.py)."""
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        settings = run_settings(self.args, length_of(self.train_dataset))
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            # An earlier run may have left one here; while files are replaced the checkpoint must count as incomplete.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            (folder / RUN_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # all ranks have written theirs before the trainer's state is written

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the last checkpoint, head included: transformers copies only the files that it knows."""
        if self.args.should_save:
            for name in (HEAD_WEIGHTS, HEAD_CONFIG):
                if (Path(checkpoint_folder) / name).is_file():
                    shutil.copy(Path(checkpoint_folder) / name, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write whole tensors under FSDP2 too, so that any number of processes can resume, sharded or not."""
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole_state(self.optimizer.state_dict(), keep=self.args.should_save)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        for target, name in ((self.optimizer, OPTIMIZER_NAME), (self.lr_scheduler, SCHEDULER_NAME)):
            target.load_state_dict(torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True))

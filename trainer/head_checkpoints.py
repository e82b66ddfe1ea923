"""Checkpoints of a training run: the head instead of the whole model, and a record of the run."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, rotate_checkpoints

from .checkpoints.durable import seal, staged, unseal, write_text, writing
from .checkpoints.head_files import HEAD_CONFIG, check_head_fits, load_head, save_head
from .checkpoints.resume import LOG_WINDOW, check_settings, fault_of, last_checkpoint, owned, resume_run, start_run
from .checkpoints.run_record import RunRecord, read_record
from .checkpoints.run_settings import OPTIMIZER_SETTINGS, differences, run_settings
from .checkpoints.sharded import whole_state
from .data.content_hash import content_hash
from .data.rows import is_streamed, length_of
from .data.streams import EndlessStream
from .hub_uploads import HubUploads


class HeadCheckpoints(HubUploads):
    """A `Trainer` whose checkpoints hold the head, the optimizer and the state of the training, never the backbone.

    A run is recorded in its output folder and in every checkpoint, and a checkpoint is resumed from only by the run
    that wrote it, with the settings that were recorded.

    Attributes:
        _backbone_identity: `backbone_identity(model)`, which is saved with every head and checked when one is loaded.
            Subclasses set it before FSDP shards the model.
        _recorded_settings: further settings that shape the run's result, such as options of a command line.
    """

    _backbone_identity: dict[str, str | None]
    _recorded_settings: dict[str, Any]
    _run: RunRecord | None = None
    _changes: frozenset[str] = frozenset()  # settings that differ from those of the checkpoint that was resumed from

    # --- the run

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train as `Trainer.train` does, after checking that the run may start or resume in its output folder.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the last whole one of the run in `output_dir`.
            **kwargs: further arguments of `Trainer.train`.

        Raises:
            ValueError: if the output folder holds another run, or the checkpoint is damaged, of another run or
                backbone, or of a run with other settings.
        """
        self._run, checkpoint, self._changes = self._on_main_process(lambda: self._begin_run(resume_from_checkpoint))
        progress = _ResumeProgress(self, checkpoint)
        self.add_callback(progress)
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            self.remove_callback(progress)

    def is_finished(self, checkpoint: str | None = None) -> bool:
        """Return whether the output folder holds the finished head of this very run.

        Args:
            checkpoint: the checkpoint that the run is to resume from. If it is damaged or of another run, the answer
                is no, and `train` will say so.

        Raises:
            ValueError: if it holds the head of a run with other settings, or of another backbone.
        """
        return self._on_main_process(lambda: self._finds_finished_run(checkpoint))

    def finish_run(self) -> None:
        """Record that the run has finished. Call it after the final head was saved to the output folder."""
        if self.args.should_save and self._run is not None:
            self._run.write_finished(self.args.output_dir)

    def _finds_finished_run(self, checkpoint: str | None) -> bool:
        folder = self.args.output_dir
        record = read_record(folder)
        if self.args.overwrite_output_dir or record is None or not record.is_finished_in(folder):
            return False
        if checkpoint is not None and (fault_of(checkpoint) or not owned(record, checkpoint)):
            return False
        settings = self._settings()
        check_head_fits(self.model, folder, self._backbone_identity)
        check_settings(folder, record.settings, settings, self.args.resume_with_changes)
        return not differences(record.settings, settings)

    def _begin_run(self, resume: str | Path | bool | None) -> tuple[RunRecord, str | None, frozenset[str]]:
        """Return the run's record, the checkpoint to resume from, and the settings that differ from it."""
        args = self.args
        if resume is True:
            resume = last_checkpoint(args.output_dir)
            if resume is None:
                raise ValueError(f"resume_from_checkpoint: output_dir {args.output_dir} holds no checkpoint of a run")
        settings = self._settings()
        if not resume:
            return start_run(args.output_dir, settings, overwrite=args.overwrite_output_dir), None, frozenset()
        if (Path(resume) / HEAD_CONFIG).is_file():
            check_head_fits(self.model, resume, self._backbone_identity)
        record = resume_run(
            args.output_dir, resume, settings, changes=args.resume_with_changes, overwrite=args.overwrite_output_dir
        )
        return record, str(resume), frozenset(differences(read_record(resume).settings, settings))

    def _settings(self) -> dict[str, Any]:
        """Return the settings of this run. Reads all rows of the data sets, to hash them."""
        rows, held_out = self.train_dataset, self.eval_dataset
        streamed = is_streamed(rows) or isinstance(rows, EndlessStream)
        data = {
            "rows of train_data": length_of(rows),
            "contents of train_data": None if streamed or rows is None else content_hash(rows),
            # the workers share out the parts of a stream, which decides the order of its rows
            "dataloader_num_workers of a stream": self.args.dataloader_num_workers if streamed else None,
            "eval_data": None if held_out is None else content_hash(held_out),
        }
        return run_settings(self.args, data | self._recorded_settings)

    def _on_main_process(self, decide: Callable[[], Any]) -> Any:
        """Return on every rank what `decide` returns on the main process, or raise what it raises there."""
        outcome = [None, None]
        if self.args.process_index == 0:
            try:
                outcome[0] = decide()
            except (OSError, ValueError) as error:
                outcome[1] = error
        result, error = broadcast_object_list(outcome)
        if error is not None:
            raise error
        return result

    # --- writing

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
            with staged(folder) as staging:
                self.processing_class.save_pretrained(staging)

    def save_state(self) -> None:
        """Write the state of the training to the output folder."""
        if self.args.should_save:
            with staged(self.args.output_dir) as staging:
                self.state.save_to_json(staging / TRAINER_STATE_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint: the run's record first, then the files, and last their checksums.

        What a kill leaves has no checksums and counts as incomplete. Earlier checkpoints are deleted afterwards.
        """
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        window = {
            "losses": self.accelerator.gather(self._tr_loss).reshape(-1).tolist(),  # one of each process
            "logged_step": self._globalstep_last_logged,
            "total_loss": self._total_loss_scalar,
        }
        with writing(folder):
            self._write_checkpoint(folder, window, model, trial)

    def _write_checkpoint(self, folder: Path, window: dict[str, Any], model: nn.Module, trial: Any):
        if self.args.should_save:
            unseal(folder)  # left by an earlier run, or by a save that was killed
            folder.mkdir(parents=True)
            self._run.write(folder)
            write_text(folder / LOG_WINDOW, json.dumps(window) + "\n")
        self.accelerator.wait_for_everyone()  # no rank writes into the old folder
        with self._keeping_all_checkpoints() as limit:
            super()._save_checkpoint(model, trial)
        if self.args.should_save:
            seal(folder)
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    @contextmanager
    def _keeping_all_checkpoints(self) -> Iterator[int | None]:
        """Keep `Trainer` from deleting checkpoints; yields the number of them that it would keep."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield limit
        finally:
            self.args.save_total_limit = limit

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # the checksums are taken when all ranks have written theirs

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write whole tensors under FSDP2 too, so that any number of processes can resume, sharded or not."""
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole_state(self.optimizer.state_dict(), keep=self.args.should_save)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    # --- reading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        load_head(model, resume_from_checkpoint, self._backbone_identity)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both; where settings of theirs have changed, keep the new ones and only the optimizer's moments."""
        if checkpoint is None:
            return
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if self.is_fsdp_enabled:
            for target, name in ((self.optimizer, OPTIMIZER_NAME), (self.lr_scheduler, SCHEDULER_NAME)):
                target.load_state_dict(torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if self._changes.intersection(OPTIMIZER_SETTINGS):
            for group, values in zip(self.optimizer.param_groups, options, strict=True):
                group.update(values)
            self._restart_schedule(self.lr_scheduler.last_epoch)

    def _restart_schedule(self, step: int):
        """Make the schedule of the current settings, and go to the place where it is after `step` steps."""
        self.lr_scheduler = None
        scheduler = self.create_scheduler(num_training_steps=self.state.max_steps)
        scheduler.last_epoch = step - 1
        with warnings.catch_warnings():  # torch expects a step of the optimizer before one of the scheduler
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)`")
            scheduler.step()

    def _finalize_training(self, *args: Any) -> TrainOutput:
        """Average the losses since the last log over the processes: `Trainer` would add those of its own process."""
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args)

    @property
    def steps_without_loss(self) -> int:
        """Number of steps of this run that were counted, but added nothing to the logged loss."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as `Trainer` does; the mean loss at the end is that of the whole run, also after it was resumed."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step - self.steps_without_loss, 1)
        super().log(logs, start_time)


class _ResumeProgress(TrainerCallback):
    """Restores what transformers' own state of the training lacks: the losses since the last log.

    Without them the first log after a resume would be the mean over fewer steps.
    """

    def __init__(self, trainer: HeadCheckpoints, checkpoint: str | None):
        self.trainer = trainer
        self.checkpoint = checkpoint

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if self.checkpoint is None:
            return
        # transformers takes the steps between logs, evaluations and checkpoints from the checkpoint
        state.compute_steps(args, state.max_steps)
        trainer = self.trainer
        window = json.loads((Path(self.checkpoint) / LOG_WINDOW).read_text(encoding="utf-8"))
        losses = window["losses"]
        # Logs average over the processes. Another number of processes gets the mean, which averages to the same.
        same = len(losses) == args.world_size
        loss = losses[args.process_index] if same else sum(losses) / len(losses)
        trainer._tr_loss = torch.tensor(loss, device=args.device)
        trainer._globalstep_last_logged = window["logged_step"]
        trainer._total_loss_scalar = window["total_loss"]

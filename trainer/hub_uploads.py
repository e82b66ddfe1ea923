"""Uploads of a training run to the Hub: the files of the head alone, printed, and failures reported."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import logging

from modeling_mrp.checkpoint_files import HUB_ERRORS, hub_reason

from .checkpoints.durable import staged
from .checkpoints.push import check_token, push, selected_files

logger = logging.get_logger(__name__)


def check_hub_options(args: TrainingArguments) -> None:
    """Check the options of uploads without asking the Hub. Call it before a model is loaded.

    Args:
        args: the training arguments.

    Raises:
        ValueError: if the head is to be uploaded, and the repository's name cannot be one or there is no token.
    """
    if not args.push_to_hub:
        return
    try:
        validate_repo_id(_repository(args))
    except HFValidationError as error:
        raise ValueError(
            f"hub_model_id must be owner/name (default: the name of output_dir), got {_repository(args)!r}: {error}"
        ) from error
    check_token(args.hub_token)


def _repository(args: TrainingArguments) -> str:
    return args.hub_model_id or Path(args.output_dir).absolute().name


class HubUploads(Trainer):
    """A `Trainer` that uploads known files only: a head's weights and config, its tokenizer, its card and images.

    Checkpoints with their optimizer states never leave the machine: see `selected_files` of `checkpoints.push`.
    """

    _upload: Future | None = None  # one that runs in the background

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository if it is missing.

        Args:
            token: access token; None means `hub_token`.
            private: whether a new repository is private; None means `hub_private_repo`.

        Raises:
            OSError: if the Hub cannot be reached or refuses.
        """
        try:
            super().init_hf_repo(token=token, private=private)
        except HUB_ERRORS as error:
            raise OSError(f"creating the repository {_repository(self.args)} failed: {hub_reason(error)}") from error

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> str | Future | None:
        """Save the head and a card in `output_dir`, and upload them.

        Args:
            commit_message: message of the commit.
            blocking: wait for the upload.
            token: access token; None means `hub_token`.
            revision: branch to commit to; None means `hub_revision`.
            private: whether a new repository is private; None means `hub_private_repo`.
            **kwargs: arguments of `create_model_card`.

        Returns:
            The commit's URL, or its future if `blocking` is False. None on other processes than the main one.

        Raises:
            OSError: if the upload fails. The head is saved then.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**{"model_name": _repository(self.args).split("/")[-1]} | kwargs)
        self._finish_current_push()
        self._start_upload(commit_message, token=token, revision=revision)
        if not blocking:
            return self._upload
        upload, self._upload = self._upload, None
        try:
            return upload.result()
        except OSError as error:
            folder = self.args.output_dir
            raise OSError(f"{error} (the head is saved: mrp push {folder} {self.hub_model_id})") from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the head of the last checkpoint in the background.

        It is copied to the output folder first, since the checkpoint may be deleted while the upload runs.
        """
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if self._upload is not None and not self._upload.done() and not args.hub_always_push:
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(args, self.state, self.control)
        with staged(args.output_dir) as staging:
            for name in selected_files(checkpoint_folder).files:
                shutil.copy(Path(checkpoint_folder) / name, staging)
        by_step = args.save_strategy == SaveStrategy.STEPS
        progress = f"step {self.state.global_step}" if by_step else f"epoch {int(self.state.epoch)}"
        self._start_upload(f"Training in progress, {progress}")

    def _start_upload(self, message: str | None, token: str | None = None, revision: str | None = None) -> None:
        """Start to upload the known files of the output folder, after printing their names."""
        args = self.args
        logger.info("uploading to %s: %s", self.hub_model_id, ", ".join(selected_files(args.output_dir).files))
        self._upload = HfApi().run_as_future(
            push,
            args.output_dir,
            self.hub_model_id,
            revision=revision or args.hub_revision,
            token=token or args.hub_token,
            message=message or "Upload the head",
            replace=False,
        )

    def _finish_current_push(self) -> None:
        """Wait for the upload in the background. Its failure is a warning: the run is not to be lost."""
        upload, self._upload = self._upload, None
        if upload is not None:
            try:
                upload.result()
            except (OSError, ValueError) as error:
                logger.warning("an upload failed, and training continues: %s", error)

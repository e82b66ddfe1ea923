"""The record of a training run, in its output folder and in each of its checkpoints."""

import json
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .durable import checksum, write_text, wrong_files
from .head_files import ADAPTER_WEIGHTS, HEAD_CONFIG, HEAD_WEIGHTS

RUN_FILE = "mrp_run.json"
HEAD_FILES = (HEAD_WEIGHTS, ADAPTER_WEIGHTS, HEAD_CONFIG)


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class RunRecord:
    """Which run this is.

    Attributes:
        settings: `run_settings` of the run.
        run_id: made when the run starts from the beginning, or when it is resumed with other settings.
        parents: (run id, step) of the runs from which it was resumed with other settings, and where it left them.
        finished: checksums of the final head's files; None while the run has not finished.
    """

    settings: dict[str, Any]
    run_id: str = field(default_factory=_new_id)
    parents: tuple[tuple[str, int], ...] = ()
    finished: dict[str, str] | None = None

    def owns(self, run_id: str, step: int) -> bool:
        """Return whether a checkpoint belongs to this run, or to a run that it continues.

        Args:
            run_id: the run that wrote the checkpoint.
            step: the step after which it was written.
        """
        return run_id == self.run_id or any(run_id == parent and step <= last for parent, last in self.parents)

    def continued_with(self, settings: dict[str, Any], step: int) -> "RunRecord":
        """Return the record of a run that continues from a step of this one.

        Args:
            settings: its settings. With the same settings it is the same run.
            step: the step.
        """
        if settings == self.settings:
            return replace(self, finished=None)
        return RunRecord(settings, parents=(*self.parents, (self.run_id, step)))

    def write(self, folder: str | Path) -> None:
        """Write the record into a folder."""
        write_text(Path(folder) / RUN_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def write_finished(self, folder: str | Path) -> None:
        """Write the record with the checksums of the final head, which is in the same folder."""
        names = [name for name in HEAD_FILES if (Path(folder) / name).is_file()]
        replace(self, finished={name: checksum(Path(folder) / name) for name in names}).write(folder)

    def is_finished_in(self, folder: str | Path) -> bool:
        """Return whether the run has finished and its final head is whole."""
        return self.finished is not None and not wrong_files(folder, self.finished)


def read_record(folder: str | Path) -> RunRecord | None:
    """Return the record in an output folder or a checkpoint, or None if there is none that can be read."""
    try:
        values = json.loads((Path(folder) / RUN_FILE).read_text(encoding="utf-8"))
        parents = tuple((run_id, step) for run_id, step in values["parents"])
        return RunRecord(values["settings"], values["run_id"], parents, values["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Result files: what a measuring command found, and everything that is needed to measure it again.

Every command that measures something writes one with `--record FILE`. The files in hub_cards/results/ are the only
source of the figures in README.md, hub_cards/RESULTS.md and the cards of the embedded checkpoints, which
`python -m hub_cards.build.results` writes.
"""

import json
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.durable import write_text

PACKAGE = "mrp-diffusion"


@dataclass(frozen=True)
class Schema:
    """What a measuring command must record, because the documents show it.

    Attributes:
        row: fields of every row. The rows are those that the command prints with `--json`.
        figures: figures beside the rows.
        settings: settings of the measurement.
    """

    row: tuple[str, ...]
    figures: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


# Schemas by the name of the command. Shares and ratios are fractions of 1, not percentages.
SCHEMAS = {
    "demo": Schema(
        ("name", "accuracy", "tokens_per_forward", "backbone_forwards", "wall_clock_ratio", "identical"),
        settings=("samples", "batch_size"),
    ),
    "eval": Schema(("mode", "accuracy", "standard_error", "tokens_per_forward", "forwards", "identical")),
    "claims": Schema(("name", "claim", "published", "here", "verdict", "reason")),
    "bench decode": Schema(("mode", "batch_size", "speedups")),
    # rule: the rule of the mode, whose answers same_as_rule compares with. The speeds are relative to static.
    "bench rules": Schema(
        ("mode", "rule", "accuracy", "backbone_forwards", "same_as_rule", "speed_alone", "speed_in_batch"),
        settings=("samples", "batch_size", "samples_alone"),
    ),
    # step_seconds: one step of backbone-only decoding; head_step_ratio: a head step over that.
    # accepted: the acceptance rates that the predictions are for.
    "bench shapes": Schema(
        (
            *("shape", "batch_size", "candidates", "step_seconds", "head_step_ratio"),
            *("verification_ratio", "forwards_saved", "speedup"),
        ),
        figures=("accepted",),
    ),
    "bench loss": Schema(("name", "time_ratio", "memory_ratio", "note")),
    "bench train": Schema(("ratio",), settings=("choice_weight",)),
    # recipe: the fields of the variant, None for a head that is not trained by this command.
    "compare_heads": Schema(("head", "recipe", "forwards_saved")),
    # quality: a sentence about the backbone, or an empty one.
    # forwards_saved: by mode, the forwards of static decoding over those of the mode.
    "build_tiny": Schema(("step", "seconds"), figures=("quality", "forwards_saved"), settings=("seed",)),
}
# An absolute path of at least two components, as a word of its own or after `=`. A URL is not one.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])~?/[^\s'\"]*/([^\s'\"/]*)")


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        name: the command that measured it, a key of `SCHEMAS`.
        command: command lines that repeat it, in order; the last one measures.
        settings: options of the measurement by name.
        figures: what was measured; `figures["rows"]` is a list of dicts with the fields of `SCHEMAS[name]`.
        versions: versions of Python, this package, torch and transformers by name.
        machine: "device" ("cpu" or "cuda"), "model" (of the processor or GPU; None if unknown) and "threads".
        date: day of the measurement, as YYYY-MM-DD.
        origin: where the figures come from if no command wrote this file; else None.
    """

    name: str
    command: tuple[str, ...]
    settings: dict[str, Any]
    figures: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    date: str
    origin: str | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.figures["rows"]


def new_result(
    name: str,
    *,
    command: str | Sequence[str],
    settings: Mapping[str, Any],
    figures: Mapping[str, Any],
    device: torch.device | str = "cpu",
) -> Result:
    """A result that was measured just now, by this process on this machine.

    Args:
        name: the command that measured it, a key of `SCHEMAS`.
        command: the command line, or several to be run in turn.
        settings: options of the measurement by name; values that JSON does not know are stored as text.
        figures: what was measured, with a list of "rows".
        device: the device that was measured.

    Raises:
        ValueError: if `name` is unknown, or a figure or setting of `SCHEMAS` is missing.
    """
    lines = (command,) if isinstance(command, str) else tuple(command)
    result = Result(
        name=name,
        command=tuple(_plain(line) for line in lines),
        settings=_plain(dict(settings)),
        figures=_plain(dict(figures)),
        versions=_versions(),
        machine=_machine(torch.device(device)),
        date=date.today().isoformat(),
    )
    check_result(result)
    return result


def write_result(
    path: str | Path,
    *,
    name: str,
    command: str | Sequence[str],
    settings: Mapping[str, Any],
    figures: Mapping[str, Any],
    device: torch.device | str = "cpu",
) -> Result:
    """Write what was measured just now to a JSON file; folders are created as needed.

    Absolute paths are shortened to their last component, so that no file names the folders of a machine.

    Args:
        path: the file to write.
        name, command, settings, figures, device: see `new_result`.

    Raises:
        ValueError: if `name` is unknown, or a figure or setting of `SCHEMAS` is missing.
    """
    result = new_result(name, command=command, settings=settings, figures=figures, device=device)
    save_result(path, result)
    return result


def save_result(path: str | Path, result: Result) -> None:
    """Write a result to a JSON file; folders are created as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")


def read_result(path: str | Path) -> Result:
    """Read a result file.

    Raises:
        ValueError: if the file is not JSON or not a complete result.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        result = Result(**values | {"command": tuple(values["command"])})
        check_result(result)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result file: {error}") from error
    return result


def check_result(result: Result) -> None:
    """Check that a result has what its command records.

    Raises:
        ValueError: if the command is unknown, or a figure or setting of `SCHEMAS` is missing.
    """
    if result.name not in SCHEMAS:
        raise ValueError(f"unknown result {result.name!r}; expected one of {', '.join(SCHEMAS)}")
    schema = SCHEMAS[result.name]
    if not result.figures.get("rows"):
        raise ValueError(f"the figures of {result.name} have no rows")
    parts = [("a row", row, schema.row) for row in result.rows]
    parts += [("the figures", result.figures, schema.figures), ("the settings", result.settings, schema.settings)]
    for what, values, wanted in parts:
        if missing := [field for field in wanted if field not in values]:
            raise ValueError(f"{what} of {result.name} must have {', '.join(missing)}, got {', '.join(values)}")


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command line that repeats a measurement, without its `--record FILE`.

    It sets OMP_NUM_THREADS if that is set here, since the number of threads determines every time on a CPU.

    Args:
        program: for example "mrp demo".
        arguments: the words that followed it.
    """
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--record" and not argument.startswith("--record="):
            kept.append(argument)
        skip = argument == "--record"
    threads = os.environ.get("OMP_NUM_THREADS")
    environment = [f"OMP_NUM_THREADS={shlex.quote(threads)}"] if threads else []
    return " ".join([*environment, program, shlex.join(kept)]).strip()


def _plain(value: Any) -> Any:
    """The value as JSON knows it, without absolute paths."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return ABSOLUTE_PATH.sub(r"\1", str(value))


def _versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in (PACKAGE, "transformers")}
    return {"python": platform.python_version(), "torch": torch.__version__} | installed


def _machine(device: torch.device) -> dict[str, Any]:
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": device.type, "model": model, "threads": torch.get_num_threads()}


def _processor() -> str | None:
    """The model of the processor; None if the system does not report it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        if named:
            return named.group(1).strip()
    return platform.processor() or None

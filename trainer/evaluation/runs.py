"""Decode and score every prompt in every decoding mode, in a folder where an interrupted run can be resumed.

results.jsonl   one line per mode and prompt, appended as they are decoded
manifest.json   what was run: settings, model, hash of the prompts, versions, machine
summary.json    the figures (summary.py), written by `mrp eval`
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.options import OPTION_NAMES, DecodingOptions

from ..checkpoints.durable import write_text
from ..checkpoints.weight_files import backbone_hash, base_of
from ..data.chats import conversation, tools_of
from ..data.reading import Row, read_rows
from .decoding import Answer, decode_batch, prompt_ids
from .scorers import Scorer

logger = logging.get_logger(__name__)

PACKAGES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Settings:
    """What determines the results of a run; a run can only be resumed with equal settings.

    Attributes:
        modes: options of `generate` by the mode's name, `mrp_mode` among them; the first mode is the reference.
        scorer: name of the scorer.
        max_new_tokens: limit per prompt.
        batch_size: prompts decoded together.
        seed: seed of the sampling noise, set before every batch.
        raw: do not apply the tokenizer's chat template.
        options: options of `generate` that all modes share.
    """

    modes: dict[str, dict]
    scorer: str
    max_new_tokens: int = 256
    batch_size: int = 16
    seed: int = 0
    raw: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.modes:
            raise ValueError("modes is empty: name at least one")
        if "mrp_mode" in self.options:
            raise ValueError("options holds mrp_mode, but each of modes sets its own: leave it out")


def read_eval_rows(
    source: str | Path,
    *,
    name: str | None = None,
    split: str = "train",
    prompt_field: str | None = None,
    answer_field: str | None = None,
) -> list[dict]:
    """Return the rows of a data file, folder or Hub data set, see `mrp_trainer.data.reading.load_source`.

    Args:
        source: the file, folder or Hub id. Each row has `prompt` (text or messages), `messages`, or `conversations` in
            from/value form, possibly with `tools` and the text of a `system` message, and what a scorer reads.
        name: configuration of a Hub data set.
        split: split to read.
        prompt_field, answer_field: fields that become `prompt` and `answer`, if they have other names.

    Raises:
        ValueError: if a row is not such a row, naming file and line, or if there is none.
    """
    fields = {"prompt": prompt_field, "answer": answer_field}
    rows = [_eval_row(row, fields) for row in read_rows(source, name=name, split=split)]
    if not rows:
        raise ValueError(f"{source} holds no rows")
    return rows


def _eval_row(read: Row, fields: dict[str, str | None]) -> dict:
    """The content of a row, with its prompt in `prompt` (text) or `messages`, and its answer in `answer`."""
    row, place = read.content, read.place
    for name, field_name in fields.items():
        if field_name is not None:
            if row.get(field_name) is None:
                raise ValueError(f"{place} has no {field_name} (--{name}-field): it has {', '.join(row)}")
            row = row | {name: row[field_name]}
    chat = row.get("messages") or row.get("conversations") if fields["prompt"] is None else None
    prompt = chat or row.get("prompt")
    if not prompt:
        raise ValueError(
            f"{place}: expected an object with 'prompt' or 'messages', got {', '.join(row) or 'none'}; --prompt-field "
            "names another field"
        )
    row = {key: value for key, value in row.items() if key not in ("messages", "conversations", "tools")}
    if not isinstance(prompt, str):
        messages = conversation(prompt, read)
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{place}: the messages end with an answer, so that none is asked for: leave it out")
        row["messages"] = messages
    tools = tools_of(read.content, place, read.from_json)
    return row if tools is None else row | {"tools": tools}


def evaluate(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    scorer: Scorer | None,
    settings: Settings,
    folder: str | Path | None = None,
    after_batch: Callable[[], None] = lambda: None,
) -> list[dict]:
    """Decode and score every row in every mode, and return a record for each.

    Args:
        model: the model, in eval mode on its device.
        tokenizer: its tokenizer.
        rows: rows of the data, see `read_eval_rows`.
        scorer: function of (completion, row) that returns a bool or a share in 0..1; None: scores are None.
        settings: how to decode.
        folder: where the results are kept. A run that was interrupted there is resumed; None keeps nothing.
        after_batch: called after each batch, once its results are on the disk.

    Returns:
        All records, those of an interrupted run included: the fields of `Answer.record`, and mode, index of the
        row, text and score.

    Raises:
        ValueError: if the checkpoint cannot run a mode, the folder belongs to another run, or the scorer fails.
    """
    for options in settings.modes.values():
        known = {name: value for name, value in (settings.options | options).items() if name in OPTION_NAMES}
        DecodingOptions.resolve(known, model.config)
    records = [] if folder is None else open_run(Path(folder), manifest_of(model, rows, settings))
    done = {(record["mode"], record["index"]) for record in records}
    prompts = [prompt_ids(tokenizer, row, settings.raw) for row in rows]
    total, block_size = len(rows) * len(settings.modes), model.config.block_size
    if len(done) < total:  # the first call of all is slower, and should not count as any mode's time
        _decode(model, tokenizer, prompts[: settings.batch_size], {}, replace(settings, max_new_tokens=block_size))
    bar = tqdm(total=total, initial=len(done), unit="prompt", disable=None)
    with bar, _appending(folder) as append:
        for mode, options in settings.modes.items():
            bar.set_description(mode)
            for start in range(0, len(rows), settings.batch_size):
                batch = range(start, min(start + settings.batch_size, len(rows)))
                missing = [index for index in batch if (mode, index) not in done]
                if not missing:
                    continue
                # the whole batch, even where some of it is done: its rows decode beside the same neighbours, with
                # the same noise, as in a run that was not interrupted
                answers = _decode(model, tokenizer, [prompts[index] for index in batch], options, settings)
                for index in missing:
                    answer = answers[index - start]
                    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                    score = _score(scorer, text, rows[index], index, settings.scorer)
                    records.append({"mode": mode, "index": index, "text": text, "score": score} | answer.record())
                    append(records[-1])
                    bar.update()
                after_batch()
    return records


def _decode(model, tokenizer, prompts: list[list[int]], options: dict, settings: Settings) -> list[Answer]:
    options = settings.options | options | {"tokenizer": tokenizer}  # for stop_strings
    return decode_batch(model, prompts, options, settings.max_new_tokens, seed=settings.seed, trace=True)


@contextmanager
def _appending(folder: str | Path | None) -> Iterator[Callable[[dict], None]]:
    """A function that appends a record to the folder's results at once; without a folder it does nothing."""
    if folder is None:
        yield lambda record: None
        return
    with open(Path(folder) / "results.jsonl", "a", encoding="utf-8") as file:

        def append(record: dict):
            file.write(json.dumps(record) + "\n")
            file.flush()

        yield append


def evaluate_full_head(
    full: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    scorer: Scorer | None,
    settings: Settings,
    folder: str | Path,
) -> list[dict]:
    """Run `evaluate` into `folder`/full-head with a head that predicts the full distribution.

    Args:
        full: the same backbone with such a head (mrp_residual false).
        tokenizer, rows, scorer, settings, folder: as in `evaluate`.

    Returns:
        The records; the names of their modes end in -full.
    """
    records = evaluate(full, tokenizer, rows, scorer, settings, Path(folder) / "full-head")
    return [record | {"mode": f"{record['mode']}-full"} for record in records]


def _score(scorer: Scorer | None, text: str, row: dict, index: int, name: str) -> float | None:
    if scorer is None:
        return None
    try:
        score = scorer(text, row)
    except Exception as error:
        raise ValueError(f"scorer {name!r} failed on row {index + 1} of the data: {error!r}") from error
    if not isinstance(score, (bool, int, float)) or not 0 <= score <= 1:
        raise ValueError(f"scorer {name!r} must return a bool or a share in 0..1, got {score!r}")
    return float(score)


def open_run(folder: Path, manifest: dict) -> list[dict]:
    """Return the records that a folder holds already, and write the manifest if it holds none.

    Raises:
        ValueError: if the folder holds a run with another model, other settings or prompts, or damaged files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, results = folder / "manifest.json", folder / "results.jsonl"
    if not results.exists() or not results.stat().st_size:
        write_json(path, manifest)
        return []
    if not path.exists():
        raise ValueError(f"{folder} holds results without a manifest: choose another output folder")
    earlier = _parsed(path, path.read_text(encoding="utf-8"))
    differing = [
        f"{part}.{name}"
        for part in ("model", "settings", "prompts")
        for name in sorted(manifest[part] | earlier[part])
        if manifest[part].get(name) != earlier[part].get(name)
    ]
    if differing:
        raise ValueError(
            f"{folder} holds a run that differs in {', '.join(differing)}: choose another output folder, or use the "
            "settings of that run to resume it"
        )
    for part in ("versions", "machine"):
        if manifest[part] != earlier[part]:
            logger.warning("resuming a run whose %s were %s", part, earlier[part])
    content = results.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]  # a killed run may have left half a line
    if whole != content:
        os.truncate(results, len(whole))
    return [_parsed(results, line) for line in whole.decode("utf-8").splitlines()]


def _parsed(path: Path, text: str) -> dict:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): choose another output folder") from error


def manifest_of(model: MRPForDiffusionLM, rows: list[dict], settings: Settings) -> dict:
    """Return what identifies a run (model, settings, prompts), and its versions, machine and start time."""
    base, revision = base_of(model)
    head = hashlib.sha256()
    if model.mrp_head is not None:
        for name, tensor in sorted(model.mrp_head.state_dict().items()):
            head.update(name.encode() + tensor.float().cpu().numpy().tobytes())
    return {
        "model": {
            "name": base,
            "revision": revision,
            "backbone_hash": backbone_hash(model),
            "head_hash": head.hexdigest() if model.mrp_head is not None else None,
            "dtype": str(model.dtype),
            "block_size": model.config.block_size,
            "calibrated_remask_threshold": model.config.calibrated_remask_threshold,
        },
        "settings": asdict(settings),
        "prompts": {"count": len(rows), "sha256": hashlib.sha256(_canonical(rows)).hexdigest()},
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _canonical(rows: list[dict]) -> bytes:
    return json.dumps(rows, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8")  # str: dates of Parquet


def write_json(path: Path, content: object) -> None:
    """Write JSON to a file that appears complete or not at all, even if the process is killed meanwhile."""
    write_text(path, json.dumps(content, indent=2) + "\n")

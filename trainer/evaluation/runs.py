"""Accuracy against tokens per backbone forward, over a grid of decoding modes, in a folder that can be continued.

results.jsonl   one line per mode and prompt, appended as they are decoded
manifest.json   what was run: settings, model, hash of the prompts, versions, machine
summary.json    the figures (summary.py)
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_mrp.options import OPTION_NAMES, DecodingOptions

from ..checkpoints.weight_files import backbone_hash, base_of
from .scorers import Scorer

logger = logging.get_logger(__name__)

PACKAGES = ("torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Settings:
    """What decides about the results of a run; only runs with equal settings continue one another.

    Attributes:
        modes: options of `generate` by the mode's name, `mrp_mode` among them; the first one is the reference.
        scorer: its name.
        max_new_tokens: per prompt.
        batch_size: prompts decoded together.
        seed: of sampling, set before every batch.
        raw: whether prompts go without the chat template.
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


# -- data


def load_rows(path) -> list[dict]:
    """The rows of a jsonl file; each has `prompt` (text or messages) or `messages`.

    Raises:
        ValueError: naming the file and line.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict) or not (row.get("prompt") or row.get("messages")):
            raise ValueError(f"{path}, line {number}: expected an object with 'prompt' or 'messages'")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def prompt_ids(tokenizer, row: dict, raw: bool = False) -> list[int]:
    """Token ids of a row's prompt, through the chat template when there is one.

    Raises:
        ValueError: for messages without a chat template, or `raw`.
    """
    prompt = row.get("messages") or row["prompt"]
    templated = tokenizer.chat_template is not None and not raw
    if isinstance(prompt, list) and not templated:
        raise ValueError("the data has messages, but there is no chat template to write them with (or raw is set)")
    if not templated:
        return tokenizer(prompt)["input_ids"]
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# -- decoding


class RevealTrace:
    """A streamer that notes the round in which each new token was revealed, `rounds` [R, T], counted from 1.

    A round is one forward of the backbone for every row that runs. Columns behind a row's end mean nothing.
    """

    def __init__(self, mask_token_id: int, max_new_tokens: int):
        self.mask_token_id = mask_token_id
        self.max_new_tokens = max_new_tokens
        self.rounds = None
        self.round = 1
        self.done = 0  # columns that are finished

    def put(self, value):
        if self.rounds is None:  # the prompts
            self.rounds = torch.zeros(len(value), self.max_new_tokens, dtype=torch.long)
            return
        self._note(value[:, None])
        self.done += 1

    def put_draft(self, value):
        self._note(value)
        self.round += 1

    def end(self):
        pass

    def _note(self, tokens):
        seen = self.rounds[:, self.done : self.done + tokens.shape[1]]
        shown = tokens[:, : seen.shape[1]] != self.mask_token_id
        seen[(seen == 0) & shown] = self.round
        seen[~shown] = 0  # taken back: what counts is the last time that it was revealed

    def costs(self, row: int, length: int) -> torch.Tensor:
        """What share of a forward each of the first `length` tokens of a row has cost, [length].

        A forward is shared equally by the tokens that it revealed; one that revealed only what lies behind the end
        of text, or what was taken back later, is nobody's.
        """
        rounds = self.rounds[row, :length]
        return 1 / rounds.bincount()[rounds].double()


@torch.no_grad()
def decode_batch(model, prompts: list[list[int]], options: dict, max_new_tokens: int, seed: int = 0) -> list[dict]:
    """Decode prompts together; figures of each, of its new tokens up to and with the end of text.

    Args:
        prompts: token ids.
        options: of `generate`; decoding options that it does not name take the package's default, whatever the
            checkpoint's generation config says.

    Returns:
        Per prompt: token_ids; forwards, head_forwards and prefill_forwards; drafts proposed and accepted by depth;
        by position in the block [B] tokens and the forwards they have cost; seconds (an equal share of the batch's).
    """
    longest = max(len(prompt) for prompt in prompts)
    pad = model.config.pad_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    trace = RevealTrace(model.config.mask_token_id, max_new_tokens)
    torch.manual_seed(seed)
    began = time.perf_counter()
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        streamer=trace,
        return_dict_in_generate=True,
        **dict.fromkeys(OPTION_NAMES) | {"do_sample": False} | options,
    )
    new = output.sequences[:, longest:].tolist()  # synchronises
    seconds = (time.perf_counter() - began) / len(prompts)
    stats = {name: value.tolist() for name, value in vars(output.stats).items()}
    size, results = options.get("block_size") or model.config.block_size, []
    for row, prompt in enumerate(prompts):
        length = stats["tokens_by_backbone"][row] + stats["tokens_by_head"][row]
        position = (len(prompt) + torch.arange(length)) % size
        costs = torch.zeros(size, dtype=torch.double).index_add(0, position, trace.costs(row, length))
        results.append(
            {
                "token_ids": new[row][:length],
                "forwards": stats["backbone_forwards"][row],
                "head_forwards": stats["head_forwards"][row],
                "prefill_forwards": stats["prefill_forwards"][row],
                "proposed": stats["drafts_proposed"][row],
                "accepted": stats["drafts_accepted"][row],
                "position_tokens": position.bincount(minlength=size).tolist(),
                "position_forwards": [round(cost, 6) for cost in costs.tolist()],
                "seconds": seconds,
            }
        )
    return results


# -- a run


def evaluate(
    model,
    tokenizer,
    rows: list[dict],
    scorer: Scorer,
    settings: Settings,
    folder,
    after_batch: Callable[[], None] = lambda: None,
) -> list[dict]:
    """Decode and score every row in every mode, going on where an earlier run into `folder` stopped.

    Args:
        rows: of the data, see `load_rows`.
        scorer: function of (completion, row) to a bool or a share in 0..1.
        after_batch: called when a batch's results are on the disk.

    Returns:
        All records: those of `decode_batch` with mode, index of the row, text and score.

    Raises:
        ValueError: for a mode that the checkpoint cannot run, or a folder that belongs to another run.
    """
    for options in settings.modes.values():
        known = {name: value for name, value in (settings.options | options).items() if name in OPTION_NAMES}
        DecodingOptions.resolve(known, model.config)
    folder = Path(folder)
    records = open_run(folder, manifest_of(model, rows, settings))
    done = {(record["mode"], record["index"]) for record in records}
    prompts = [prompt_ids(tokenizer, row, settings.raw) for row in rows]
    todo = len(rows) * len(settings.modes) - len(done)
    if todo:  # the first call is slower: of every mode's time it should be in none
        decode_batch(model, prompts[: settings.batch_size], settings.options, model.config.block_size)
    bar = tqdm(total=todo + len(done), initial=len(done), unit="prompt", disable=None)
    with bar, open(folder / "results.jsonl", "a", encoding="utf-8") as file:
        for mode, options in settings.modes.items():
            bar.set_description(mode)
            for start in range(0, len(rows), settings.batch_size):
                batch = range(start, min(start + settings.batch_size, len(rows)))
                if all((mode, index) in done for index in batch):
                    continue
                # all of it, even what is there already: a prompt's neighbours are those of an unbroken run
                decoded = decode_batch(
                    model,
                    [prompts[index] for index in batch],
                    settings.options | options,
                    settings.max_new_tokens,
                    settings.seed,
                )
                for index, result in zip(batch, decoded, strict=True):
                    if (mode, index) in done:
                        continue
                    text = tokenizer.decode(result["token_ids"], skip_special_tokens=True)
                    score = _score(scorer, text, rows[index], index, settings.scorer)
                    records.append({"mode": mode, "index": index, "text": text, "score": score} | result)
                    file.write(json.dumps(records[-1]) + "\n")
                    file.flush()
                    bar.update()
                after_batch()
    return records


def evaluate_full_head(full, tokenizer, rows: list[dict], scorer: Scorer, settings: Settings, folder) -> list[dict]:
    """As `evaluate`, into `folder`/full-head, of a head without residual; its modes are named ...-full."""
    records = evaluate(full, tokenizer, rows, scorer, settings, Path(folder) / "full-head")
    return [record | {"mode": f"{record['mode']}-full"} for record in records]


def _score(scorer: Scorer, text: str, row: dict, index: int, name: str) -> float:
    try:
        score = scorer(text, row)
    except Exception as error:
        raise ValueError(f"scorer {name!r} failed on row {index + 1} of the data: {error!r}") from error
    if not isinstance(score, (bool, int, float)) or not 0 <= score <= 1:
        raise ValueError(f"scorer {name!r} must return a bool or a share in 0..1, got {score!r}")
    return float(score)


def open_run(folder: Path, manifest: dict) -> list[dict]:
    """The records that a folder holds already; writes the manifest of a new run.

    Raises:
        ValueError: when the folder holds a run with other settings, naming what differs.
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
            f"{folder} holds a run that differs in {', '.join(differing)}: choose another output folder, or give the "
            "settings of that run to go on with it"
        )
    for part in ("versions", "machine"):
        if manifest[part] != earlier[part]:
            logger.warning("this run goes on with one whose %s were %s", part, earlier[part])
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


def manifest_of(model, rows: list[dict], settings: Settings) -> dict:
    """What was run, on what and with what."""
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
    return json.dumps(rows, sort_keys=True, ensure_ascii=False).encode("utf-8")


def write_json(path: Path, content):
    """Write JSON so that the file is there whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)

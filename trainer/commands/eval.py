"""`mrp eval`: accuracy against tokens per backbone forward, over a grid of decoding modes."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from .options import (
    AnswerField,
    AsJson,
    BatchSize,
    Checkpoint,
    DataConfig,
    Device,
    Dtype,
    FullHead,
    Head,
    MaxNewTokens,
    Model,
    PromptField,
    Raw,
    Record,
    Revision,
    Seed,
    Split,
    flag,
    given,
)
from .parsing import NONE, GenerateCommand, generate_options
from .recording import Measurement, MeasuringCommand

if TYPE_CHECKING:
    import torch

    from modeling_mrp import MRPConfig

    from ..evaluation.runs import Settings

CALIBRATION_PROMPTS = 32
THRESHOLDS = [0.9, 0.7, 0.5]
STEPS = [2, 3, 4]
# Arguments of generate that an evaluation sets itself.
RESERVED = {"pad_token_id", "attention_mask", "inputs", "input_ids", "streamer"}
RESERVED |= {"return_dict_in_generate", "num_return_sequences"}
# Options of what --calibrate does not do: run a grid of modes, and write results.
FOR_RESULTS = ("grid", "modes", "compare", "thresholds", "steps", "kl_prompts", "output", "plots", "record")


class EvalCommand(MeasuringCommand, GenerateCommand):
    """`mrp eval` takes --calibrate with or without a number of prompts."""

    value_if_bare = {"--calibrate": str(CALIBRATION_PROMPTS)}


@dataclass
class Grid:
    """Which modes are run: kinds of modes with their numbers, or a file that lists them."""

    modes: list[str] | None
    compare: bool
    thresholds: list[float]
    steps: list[int]
    file: str | None


def evaluate(
    context: typer.Context,
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="jsonl, json or parquet file, folder or Hub data set of prompts (or messages) and what the scorer "
            "reads.",
        ),
    ],
    scorer: Annotated[
        str,
        typer.Option(
            metavar="SCORER",
            help="exact or numeric (compare with the field answer); python (runs the text with the field test or "
            "test_list, and entry_point, in a separate process, which is not a sandbox); or module:function of "
            "(text, row).",
        ),
    ],
    prompt_field: PromptField = None,
    answer_field: AnswerField = None,
    data_config: DataConfig = None,
    split: Split = "train",
    modes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KINDS",
            help="Kinds of modes: static, control, dynamic, wide-narrow, spec, spec-self, spec-token, graph, "
            "graph-self, graph-token, auto, auto-self, direct, remask-leave_one_out, remask-confidence, "
            "remask-residual; or complete names such as entropy-0.1, sequential or dynamic-0.9+graph-8 (speculation "
            "under a rule).",
            show_default="static,spec,direct,remask-leave_one_out",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Add the baselines: control, dynamic, wide-narrow, spec-self.")
    ] = False,
    full_head: FullHead = None,
    thresholds: Annotated[
        list[float],
        typer.Option(metavar="NUMBERS", help="Thresholds of dynamic, wide-narrow and remask."),
    ] = THRESHOLDS,
    steps: Annotated[
        list[int], typer.Option(metavar="NUMBERS", help="Look-ahead K of spec, graph and direct.")
    ] = STEPS,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="YAML file of {mode name: {option of generate: value}}, instead of --modes, --compare, --thresholds "
            "and --steps.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder for the results.", show_default="eval-MODEL")
    ] = None,
    skip: Annotated[
        int, typer.Option(metavar="N", min=0, help="Leave out the first N rows, such as those used to calibrate.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Evaluate at most N rows.", show_default=False)
    ] = None,
    calibrate: Annotated[
        int | None,
        typer.Option(
            metavar="[N]",
            min=0,
            help="Only find the remask threshold of the residual criterion on the first N rows "
            f"({CALIBRATION_PROMPTS} when N is left out) and store it in MODEL's config.json.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: BatchSize = 16,
    seed: Seed = 0,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit of a program that the python scorer runs.")
    ] = 3.0,
    kl_prompts: Annotated[int, typer.Option(metavar="N", min=0, help="Number of rows to measure the KL on.")] = 64,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw plots into the folder.")] = True,
    raw: Raw = False,
    head: Head = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement | None:
    """Measure accuracy against tokens per forward.

    Every prompt of the data is decoded in every mode of a grid, and the new text is scored. Results are appended
    prompt by prompt: after an interruption the same command continues. Any option of `generate` may follow as --name
    value and then holds for all modes. The folder gets results.jsonl, manifest.json, summary.json, summary.md and
    plots.
    """
    _refuse_combinations(context, grid, calibrate)
    options = _options_for_all_modes(context.args)

    from ..checkpoints.loading import load
    from ..checkpoints.output_paths import check_output
    from ..data.wording import counted
    from ..evaluation import plots as drawing
    from ..evaluation.calibration import config_file
    from ..evaluation.runs import Settings, read_eval_rows
    from ..evaluation.scorers import check_rows, load_scorer

    folder = Path(output or f"eval-{Path(model).name}")
    if calibrate is None:
        check_output("--output", folder, folder=True)
    score = load_scorer(scorer, time_limit)
    rows = read_eval_rows(data, name=data_config, split=split, prompt_field=prompt_field, answer_field=answer_field)
    check_rows(scorer, rows)
    if calibrate is not None:
        config_file(model)  # before the model is loaded: it may raise
    elif plots:
        drawing.require_matplotlib()
    rows = rows[skip:][:limit] if calibrate is None else rows[:calibrate]
    if not rows:
        raise ValueError(f"no row of {data} is left: --skip {skip}, --limit {limit}, --calibrate {calibrate}")

    checkpoint = Checkpoint(model, revision, head, device, dtype, full_head)
    which = Grid(modes, compare, thresholds, steps, grid)
    loaded, tokenizer = load(checkpoint)
    settings = Settings(
        modes=grid_modes(which, loaded.config),
        scorer=scorer,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        raw=raw,
        options=options,
    )
    if calibrate is not None:
        _calibrate(model, loaded, tokenizer, rows, score, settings, as_json)
        return None
    records = _decode(checkpoint, loaded, tokenizer, rows, score, settings, folder)
    summary, table = _summarise(loaded, tokenizer, rows[:kl_prompts], records, settings, folder)
    if plots:
        drawing.write_plots(summary, folder, f"{Path(model).name} on {Path(data).stem}")
    print(json.dumps(summary) if as_json else f"{table}\n\n{counted(len(rows), 'prompt')}, written to {folder}")
    return Measurement(summary, {"prompts": len(rows), "options": options}, device=str(loaded.device))


def _decode(checkpoint: Checkpoint, model, tokenizer, rows, score, settings: "Settings", folder: Path) -> list[dict]:
    """Decode and score the rows in every mode, and with the full head when there is one."""
    from ..checkpoints.loading import load_full_head
    from ..evaluation.runs import evaluate, evaluate_full_head

    if checkpoint.full_head is None:
        return evaluate(model, tokenizer, rows, score, settings, folder)
    full = load_full_head(checkpoint)
    theirs = _settings_of_full_head(settings)  # before hours of decoding: it may raise
    records = evaluate(model, tokenizer, rows, score, settings, folder)
    return records + evaluate_full_head(full, tokenizer, rows, score, theirs, folder)


def _summarise(model, tokenizer, kl_rows, records, settings: "Settings", folder: Path) -> tuple[dict, str]:
    """Write the summary into the folder, and return it with its table."""
    from ..checkpoints.durable import write_text
    from ..evaluation.runs import write_json
    from ..evaluation.summary import summarise, table

    summary = summarise(records, list(dict.fromkeys(record["mode"] for record in records)))
    if model.mrp_head is not None and kl_rows:
        summary["kl"] = _kl(model, tokenizer, kl_rows, records, settings)
    write_json(folder / "summary.json", summary)
    text = "\n".join([table(summary), *rounding_note(summary["rows"], settings.options, settings.modes, model.dtype)])
    write_text(folder / "summary.md", text + "\n")
    return summary, text


def rounding_note(rows: list[dict], options: dict, modes: dict[str, dict], dtype: "torch.dtype") -> list[str]:
    """The line, if any, that says what to do about lossless modes whose answers differ from the reference's.

    Args:
        rows: rows of `summarise`.
        options: options of `generate` that all modes share.
        modes: those of each mode, by name.
        dtype: dtype of the model.
    """
    import torch

    from ..evaluation.modes import is_lossless

    reference = options | modes.get(rows[0]["mode"], {})
    differing = [
        row["mode"]
        for row in rows
        if row["identical"] < 1 and is_lossless(options | modes.get(row["mode"], {}), reference)
    ]  # a mode of the full head is not among the modes
    if not differing or dtype == torch.float32:
        return []
    number = str(dtype).removeprefix("torch.")
    return [
        f"{', '.join(differing)}: not all identical, in {number}; `mrp verify` tells whether rounding is the reason"
    ]


def _kl(model, tokenizer, rows: list[dict], records: list[dict], settings: "Settings") -> dict:
    """KL by depth on the answers of the first mode."""
    from ..evaluation.decoding import prompt_ids
    from ..evaluation.kl_between_states import kl_by_depth

    reference = next(iter(settings.modes))
    answers = {record["index"]: record["token_ids"] for record in records if record["mode"] == reference}
    samples = [(prompt_ids(tokenizer, row, settings.raw), answers[index]) for index, row in enumerate(rows)]
    given = [options.get("mrp_steps") for options in settings.modes.values()]
    steps = max([3, *(number for number in given if isinstance(number, int))])
    return kl_by_depth(model, samples, steps, settings.batch_size, settings.seed)


def grid_modes(which: Grid, config: "MRPConfig") -> dict[str, dict]:
    """The options of `generate` of each mode of the grid, by name.

    Args:
        which: the grid as the command line describes it.
        config: config of the model, which determines the default kinds and the block size.

    Raises:
        ValueError: for an unknown kind of mode, a number out of range, or a file that is not a grid.
    """
    from ..evaluation.modes import BACKBONE_ONLY, BASELINES, DEFAULT_KINDS, HEADLESS_KINDS, grid

    if which.file is not None:
        return {name: BACKBONE_ONLY | options for name, options in _read_grid(which.file).items()}
    kinds = which.modes or (DEFAULT_KINDS if config.num_mrp_layers else HEADLESS_KINDS)
    if which.compare:
        kinds = [*kinds, *BASELINES]
    return grid(kinds, which.thresholds, which.steps, config.block_size)


def _read_grid(file: str) -> dict[str, dict]:
    try:
        modes = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--grid {file} is not valid YAML: {error}") from error
    if not isinstance(modes, dict) or not all(isinstance(options, dict) for options in modes.values()):
        raise ValueError(f"--grid {file} must map names of modes to options of generate")
    return {
        str(name): {option: None if value in NONE else value for option, value in options.items()}
        for name, options in modes.items()
    }


def _settings_of_full_head(settings: "Settings") -> "Settings":
    from ..evaluation.modes import modes_of_the_head

    modes = modes_of_the_head(settings.modes)
    if not modes:
        raise ValueError("--full-head has nothing to run: the grid holds neither direct nor spec drafted by a head")
    return replace(settings, modes=modes)


def _refuse_combinations(context: typer.Context, grid: str | None, calibrate: int | None) -> None:
    """Refuse options that would have no effect together."""
    if grid is not None and (others := given(context, "modes", "compare", "steps", "thresholds")):
        raise ValueError(f"--grid {grid} lists the modes itself: leave {flag(others[0])} out")
    if calibrate is not None and (others := given(context, "skip", "limit", "head", "full_head")):
        raise ValueError(
            f"--calibrate uses the first rows of the data and stores the threshold beside MODEL's own head: leave "
            f"{flag(others[0])} out (mrp convert --head puts a head on a checkpoint)"
        )
    if calibrate is not None and (others := given(context, *FOR_RESULTS)):
        raise ValueError(
            f"--calibrate compares thresholds of remask and writes MODEL's config.json alone: leave {flag(others[0])} "
            "out"
        )


def _options_for_all_modes(words: list[str]) -> dict:
    options = generate_options(words)
    if reserved := sorted(RESERVED & options.keys()):
        raise ValueError(f"--{reserved[0]} cannot be set here; use --max-new-tokens or --batch-size")
    return options


def _calibrate(name: str, model, tokenizer, rows, score, settings: "Settings", as_json: bool) -> None:
    """Find the threshold of the residual criterion, store it in the checkpoint's folder `name` and report it."""
    from ..evaluation.calibration import calibrate, store_in_config

    if model.mrp_head is None:
        raise ValueError(f"--calibrate needs a residual head, but {name} has none")

    def show(figures):
        line = (
            "remask_threshold {remask_threshold:<6g} accuracy {accuracy:.3f} tokens/forward {tokens_per_forward:.2f}"
        )
        print(line.format(**figures), file=sys.stderr)

    threshold = calibrate(model, tokenizer, rows, score, settings, on_candidate=show)
    file = store_in_config(name, calibrated_remask_threshold=threshold)
    if as_json:
        print(json.dumps({"calibrated_remask_threshold": threshold, "prompts": len(rows)}))
    else:
        print(f"stored calibrated_remask_threshold {threshold:g} in {file}")
        print(f"evaluate on other prompts: --skip {len(rows)} leaves these out")

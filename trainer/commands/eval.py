"""`mrp eval`: accuracy against tokens per backbone forward, over a grid of decoding modes."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from .cli import command_parser
from .generate import generate_options

CALIBRATION_PROMPTS = 32
# arguments of generate that an evaluation gives
RESERVED = {"max_new_tokens", "pad_token_id", "attention_mask", "inputs", "input_ids", "streamer"}
RESERVED |= {"return_dict_in_generate", "num_return_sequences"}


def main(argv: list[str]):
    """Decode and score a data file in every mode of the grid; print the table, or the summary as JSON."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    _check(parser, arguments)
    options = generate_options(rest)
    if taken := sorted(RESERVED & options.keys()):
        raise ValueError(
            f"--{taken[0]} is not for mrp eval to change: its own options are --max-new-tokens, --batch-size"
        )

    from ..checkpoints.loading import load, load_full_head
    from ..evaluation import plots
    from ..evaluation import runs as evaluation
    from ..evaluation.calibration import check_can_store
    from ..evaluation.scorers import check_rows, load_scorer

    scorer = load_scorer(arguments.scorer, arguments.time_limit)
    rows = evaluation.read_eval_rows(arguments.data)
    check_rows(arguments.scorer, rows)
    calibrating = arguments.calibrate is not None
    if calibrating:
        check_can_store(arguments.model)
        rows = rows[: arguments.calibrate]
    else:
        rows = rows[arguments.skip :][: arguments.limit]
        if arguments.plots:
            plots.require_matplotlib()
    if not rows:
        given = (f"--{name} {vars(arguments)[name]}" for name in ("skip", "limit", "calibrate"))
        raise ValueError(f"no row of {arguments.data} is left: {', '.join(given)}")

    model, tokenizer = load(arguments)
    full = load_full_head(arguments) if arguments.full_head is not None else None
    settings = evaluation.Settings(
        modes=_modes(arguments, model.config),
        scorer=arguments.scorer,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        raw=arguments.raw,
        options=options,
    )
    if calibrating:
        _calibrate(arguments, model, tokenizer, rows, scorer, settings)
        return
    folder = Path(arguments.output or f"eval-{Path(arguments.model).name}")
    theirs = _modes_to_compare(arguments, settings)
    records = evaluation.evaluate(model, tokenizer, rows, scorer, settings, folder)
    if theirs is not None:
        records += evaluation.evaluate_full_head(full, tokenizer, rows, scorer, theirs, folder)
    _report(arguments, model, tokenizer, rows, records, settings, folder)


def _parser():
    parser = command_parser(
        "eval",
        "Decode every prompt of a jsonl file in every mode of a grid, score the new text, and show accuracy against\n"
        "tokens per forward of the backbone. Results are appended prompt by prompt: the same command goes on where a\n"
        "killed run stopped. Any option of `generate` may follow as --name value and then holds for all modes.\n"
        "--compare runs the baselines beside the head: static, thresholds, wide-in / narrow-out, self-drafting.\n"
        "The folder gets results.jsonl, manifest.json, summary.json, summary.md and plots.",
        "mrp eval sdar-1.7b-mrp --data gsm8k.jsonl --scorer numeric --compare --thresholds 0.9,0.7,0.5 --output gsm8k",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id: ours, SDAR or published SDAR-MRP")
    parser.add_argument("--data", required=True, help="jsonl: prompt (or messages) and what the scorer reads")
    parser.add_argument(
        "--scorer",
        required=True,
        help="exact or numeric (field answer), python (runs the text with field test or test_list, and entry_point,\n"
        "in a process of its own, which is no sandbox), or module:function of (text, row)",
    )
    parser.add_argument("--modes", help="kinds of modes, by comma (default: static,spec,direct,remask-leave_one_out)")
    parser.add_argument(
        "--compare", action="store_true", help="add the baselines: control, dynamic, wide-narrow, spec-self"
    )
    parser.add_argument(
        "--full-head",
        metavar="FOLDER",
        help="head trained with mrp_residual: false on this backbone; adds the spec and direct modes with it",
    )
    parser.add_argument(
        "--thresholds", default="0.9,0.7,0.5", help="of dynamic, wide-narrow and remask (default: %(default)s)"
    )
    parser.add_argument("--steps", default="2,3,4", help="K of spec and direct (default: %(default)s)")
    parser.add_argument("--grid", help="YAML of {mode name: {option of generate: value}} instead of these four")
    parser.add_argument("--output", help="folder of the results (default: eval-MODEL)")
    parser.add_argument("--skip", type=_count, default=0, help="leave out the first N rows, as used to calibrate")
    parser.add_argument("--limit", type=_count, help="at most N rows")
    parser.add_argument(
        "--calibrate",
        type=_count,
        nargs="?",
        const=CALIBRATION_PROMPTS,
        metavar="N",
        help=f"only find the remask threshold of the residual criterion on the first N rows (default: "
        f"{CALIBRATION_PROMPTS}) and store it in MODEL's config.json",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts decoded together (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="for --do_sample true (default: 0)")
    parser.add_argument("--time-limit", type=float, default=3.0, help="of a program, in seconds (default: 3)")
    parser.add_argument("--kl-prompts", type=_count, default=64, help="rows that KL is measured on (default: 64)")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="draw nothing")
    parser.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    parser.add_argument("--head", help="folder or Hub id of a trained head to put on the backbone")
    parser.add_argument("--revision", help="revision of MODEL on the Hub")
    parser.add_argument("--device", help="default: cuda when there is one")
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's own")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


def _modes(arguments, config) -> dict[str, dict]:
    from ..evaluation.modes import BACKBONE_ONLY, BASELINES, DEFAULT_KINDS, HEADLESS_KINDS, grid

    if arguments.grid is not None:
        try:
            modes = yaml.safe_load(Path(arguments.grid).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"--grid {arguments.grid} is no YAML: {error}") from error
        if not isinstance(modes, dict) or not all(isinstance(options, dict) for options in modes.values()):
            raise ValueError(f"--grid {arguments.grid} must map names of modes to options of generate")
        return {str(name): BACKBONE_ONLY | options for name, options in modes.items()}
    kinds = arguments.modes.split(",") if arguments.modes is not None else None
    if kinds is None:
        kinds = DEFAULT_KINDS if config.num_mrp_layers else HEADLESS_KINDS
    if arguments.compare:
        kinds = [*kinds, *BASELINES]
    return grid(
        kinds,
        _numbers("thresholds", arguments.thresholds, float),
        _numbers("steps", arguments.steps, int),
        config.block_size,
    )


def _modes_to_compare(arguments, settings):
    """The settings for the full head, or None when there is none."""
    from ..evaluation.modes import modes_of_the_head

    if arguments.full_head is None:
        return None
    modes = modes_of_the_head(settings.modes)
    if not modes:
        raise ValueError("--full-head has nothing to run: the grid holds neither direct nor spec drafted by a head")
    return replace(settings, modes=modes)


def _numbers(name: str, text: str, kind):
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--{name} must be numbers separated by commas, got {text!r}") from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def _check(parser, arguments):
    """Refuse options that would do nothing together."""

    def given(*names):
        return next((name for name in names if vars(arguments)[name] != parser.get_default(name)), None)

    if arguments.grid is not None and (other := given("modes", "compare", "steps", "thresholds")):
        raise ValueError(f"--grid {arguments.grid} names the modes itself: leave --{other} out")
    if arguments.calibrate is not None and (other := given("skip", "limit", "head", "full_head")):
        raise ValueError(
            f"--calibrate uses the first {arguments.calibrate} rows and stores the threshold beside MODEL's own head: "
            f"leave --{other.replace('_', '-')} out (mrp convert --head puts a head on a checkpoint)"
        )


def _report(arguments, model, tokenizer, rows, records, settings, folder: Path):
    """Write summary and plots, print the table."""
    from ..evaluation.decoding import prompt_ids
    from ..evaluation.kl_between_states import kl_by_depth
    from ..evaluation.runs import write_json
    from ..evaluation.summary import summarise, table

    summary = summarise(records, list(dict.fromkeys(record["mode"] for record in records)))
    if model.mrp_head is not None and arguments.kl_prompts:
        reference = next(iter(settings.modes))
        answers = {record["index"]: record["token_ids"] for record in records if record["mode"] == reference}
        samples = [
            (prompt_ids(tokenizer, row, settings.raw), answers[index])
            for index, row in enumerate(rows[: arguments.kl_prompts])
        ]
        steps = max([3, *(options.get("mrp_steps", 0) for options in settings.modes.values())])
        summary["kl"] = kl_by_depth(model, samples, steps, settings.batch_size, settings.seed)
    write_json(folder / "summary.json", summary)
    text = table(summary)
    (folder / "summary.md").write_text(text + "\n", encoding="utf-8")
    if arguments.plots:
        from ..evaluation.plots import write_plots

        write_plots(summary, folder, f"{Path(arguments.model).name} on {Path(arguments.data).stem}")
    print(json.dumps(summary) if arguments.json else text)
    if not arguments.json:
        print(f"\n{len(rows)} prompts, written to {folder}")


def _calibrate(arguments, model, tokenizer, rows, scorer, settings):
    from ..evaluation.calibration import calibrate, store_threshold

    if model.mrp_head is None:
        raise ValueError(f"--calibrate needs a residual head, but {arguments.model} has none")

    def show(figures):
        line = (
            "remask_threshold {remask_threshold:<6g} accuracy {accuracy:.3f} tokens/forward {tokens_per_forward:.2f}"
        )
        print(line.format(**figures), file=sys.stderr)

    threshold = calibrate(model, tokenizer, rows, scorer, settings, on_candidate=show)
    store_threshold(arguments.model, threshold)
    if arguments.json:
        print(json.dumps({"calibrated_remask_threshold": threshold, "prompts": len(rows)}))
    else:
        print(f"stored calibrated_remask_threshold {threshold:g} in {Path(arguments.model) / 'config.json'}")
        print(f"evaluate on other prompts: --skip {len(rows)} leaves these out")

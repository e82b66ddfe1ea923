"""`mrp claims`: the paper's claims on a checkpoint, each with a figure, a verdict and the command that shows it."""

import json
import shlex
import tempfile
from contextlib import nullcontext
from dataclasses import asdict

from .cli import command_parser

PROMPTS = 64
MAX_NEW_TOKENS = 256
NOT_IN_ROW_COMMANDS = ("model", "only", "output", "json", "markdown")


def main(argv: list[str]):
    """Measure the claims and print them as text, as a Markdown table or as JSON."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check(arguments)

    from modeling_mrp.options import one_of

    from ..checkpoints.loading import load, load_full_head
    from ..evaluation.claim_rules import CLAIMS
    from ..evaluation.claims import check_claims, scale_of
    from ..evaluation.modes import BACKBONE_ONLY, REFERENCE
    from ..evaluation.runs import Settings

    names = arguments.only.split(",") if arguments.only is not None else list(CLAIMS)
    for name in names:
        one_of("--only", name, CLAIMS)
    given = _given(parser, arguments)
    rows, scorer = _data(arguments)
    model, tokenizer = load(arguments)
    full = load_full_head(arguments) if arguments.full_head is not None else None
    settings = Settings(
        modes={REFERENCE: BACKBONE_ONLY},
        scorer=arguments.scorer or "none",
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        raw=arguments.raw,
    )
    scale = scale_of(model, settings)
    as_text = not (arguments.json or arguments.markdown)
    if as_text:
        print(f"{len(rows)} prompts, greedy, {describe(scale)}\n")
    output = nullcontext(arguments.output) if arguments.output else tempfile.TemporaryDirectory()
    with output as folder:
        show = (lambda row: print(as_lines(row, given), flush=True)) if as_text else (lambda row: None)
        judged = check_claims(model, tokenizer, rows, scorer, settings, folder, names, full, on_row=show)
    if arguments.json:
        report = {"model": arguments.model, "prompts": len(rows), "scale": asdict(scale)}
        print(json.dumps(report | {"rows": [asdict(row) | {"command": command(row, given)} for row in judged]}))
    elif arguments.markdown:
        print(as_markdown(judged, given))
        print(f"\n{len(rows)} prompts, greedy, {describe(scale)}.")


def _parser():
    parser = command_parser(
        "claims",
        "Measure the paper's claims on a checkpoint: what is claimed, the published figure, ours, the verdict by a\n"
        "stated rule, and the command that shows that row. Without data an embedded checkpoint answers held-out\n"
        "samples of its own task. Without a scorer the share of answers identical to those of one token a step\n"
        "stands in for accuracy.",
        "mrp claims sdar-1.7b-mrp --data gsm8k.jsonl --scorer numeric --full-head heads/full",
    )
    parser.add_argument("model", metavar="MODEL", help="embedded checkpoint, folder or Hub id")
    parser.add_argument("--data", help="jsonl: prompt (or messages) and what the scorer reads")
    parser.add_argument("--scorer", help="exact, numeric, python or module:function, as in `mrp eval`; needs --data")
    parser.add_argument("--prompt-file", help="one prompt per line, - for standard input, instead of --data")
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N", help="at most N (default: %(default)s)")
    parser.add_argument("--full-head", metavar="FOLDER", help="head trained with mrp_residual: false, to compare with")
    parser.add_argument("--only", metavar="CLAIMS", help="some of the claims, by comma (default: all)")
    parser.add_argument("--output", metavar="FOLDER", help="keep the answers there, and go on from those it holds")
    parser.add_argument("--max-new-tokens", type=int, help="default: 256, an embedded task's own")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts decoded together (default: 16)")
    parser.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    parser.add_argument("--head", help="folder or Hub id of a trained head to put on the backbone")
    parser.add_argument("--revision", help="revision of MODEL on the Hub")
    parser.add_argument("--device", help="default: cuda when there is one")
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's own")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def _check(arguments):
    if arguments.prompts < 2:
        raise ValueError(f"--prompts must be at least 2, got {arguments.prompts}: the rules compare standard errors")
    if arguments.scorer is not None and arguments.data is None:
        raise ValueError(f"--scorer {arguments.scorer} reads answers from the rows of a file: give --data FILE")
    if arguments.data is not None and arguments.prompt_file is not None:
        raise ValueError("--data and --prompt-file both name the prompts: give one of them")


def _given(parser, arguments) -> list[str]:
    """What was given on the command line, to be given again in the command of every row."""
    given = ["mrp", "claims", arguments.model]
    for name, value in vars(arguments).items():
        if name not in NOT_IN_ROW_COMMANDS and value != parser.get_default(name):
            given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return given


# -- what is decoded


def _data(arguments):
    """(rows, scorer or None); completes the arguments where MODEL is an embedded checkpoint."""
    from ..evaluation.runs import read_eval_rows
    from ..evaluation.scorers import check_rows, load_scorer
    from .prompts import read_prompts

    task = _embedded_task(arguments)
    scorer = load_scorer(arguments.scorer) if arguments.scorer is not None else None
    if arguments.data is not None:
        rows = read_eval_rows(arguments.data)
        if scorer is not None:
            check_rows(arguments.scorer, rows)
    elif arguments.prompt_file is not None:
        arguments.prompt = []
        rows = [{"prompt": prompt} for prompt in read_prompts(arguments)]
    elif task is not None:
        samples = task.held_out("test", arguments.prompts)
        rows = [{"prompt": sample.prompt, "number": number} for number, sample in enumerate(samples)]
        if task.right_when is not None:
            arguments.scorer = task.right_when
            scorer = _right(task, samples)
        arguments.raw = True  # as it was trained
    else:
        raise ValueError(f"there is nothing to decode: {arguments.model} is not embedded, so give --data FILE")
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = MAX_NEW_TOKENS if task is None else task.answer_tokens
    if len(rows) < 2:
        raise ValueError(f"the rules compare standard errors: give at least 2 prompts, got {len(rows)}")
    return rows[: arguments.prompts], scorer


def _right(task, samples):
    return lambda text, row: task.right(samples[row["number"]], text)


def _embedded_task(arguments):
    """The task of an embedded checkpoint, by its name or folder."""
    from hub_cards.tasks.tasks import TASKS

    from ..checkpoints.weight_files import fetch

    folder = fetch(arguments.model, arguments.revision)[0].resolve()
    return next((task for task in TASKS.values() if task.folder.resolve() == folder), None)


# -- what is shown


def command(row, given: list[str]) -> str:
    """The command that shows one row."""
    return shlex.join([*given, "--only", row.name])


def describe(scale) -> str:
    return (
        f"batches of {scale.batch_size}, {scale.device}, {scale.dtype}, a backbone of "
        f"{scale.parameters / 1e6:.1f} million parameters, blocks of {scale.block_size}"
    )


def as_lines(row, given: list[str]) -> str:
    """One claim, a line for each of its parts."""
    parts = {
        "claim": row.claim,
        "published": row.published,
        "here": row.here,
        "why": row.reason,
        "rule": row.rule,
        "command": command(row, given),
    }
    lines = [f"  {name:10} {text}" for name, text in parts.items() if text]
    return "\n".join([f"{row.name}: {row.verdict}", *lines, ""])


def as_markdown(rows, given: list[str]) -> str:
    """The table, and the rules of the verdicts below it."""
    lines = ["| claim | published | here | verdict |", "|---|---|---|---|"]
    for row in rows:
        verdict = f"**{row.verdict}**" + (f": {row.reason}" if row.reason else "")
        cells = f"{row.claim} (`--only {row.name}`)", row.published, row.here, verdict
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", f"Command: `{shlex.join(given)}`. Verdicts by rule:", ""]
    return "\n".join(lines + [f"- `{row.name}` {row.rule}" for row in rows])

"""`mrp claims`: the paper's claims on a checkpoint, each with a figure, a verdict and the command that shows it."""

import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

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
    Model,
    PromptField,
    PromptFile,
    Raw,
    Record,
    Revision,
    Split,
    flag,
    given,
)
from .prompts import read_prompts
from .recording import Measurement

if TYPE_CHECKING:
    from hub_cards.tasks.tasks import PythonFunctions, WordProblems

    from ..evaluation.claims import ClaimRow

PROMPTS = 64
MAX_NEW_TOKENS = 256
# Parameters that are not repeated in the command of a row.
NOT_IN_ROW_COMMANDS = ("model", "only", "output", "as_json", "markdown")


@dataclass
class Samples:
    """What is decoded, and how it is judged.

    Attributes:
        rows: the prompts, with what the scorer reads.
        scorer: function of (text, row) to a score, or None.
        scorer_name: its name, "none" without one.
        raw: whether the prompts go without the tokenizer's chat template.
        note: what the heading says about the rows, if anything.
    """

    rows: list[dict]
    scorer: Callable[[str, dict], float] | None = None
    scorer_name: str = "none"
    raw: bool = False
    note: str = ""


def claims(
    context: typer.Context,
    model: Model,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Data of prompts (or messages) and what the scorer reads, as in `mrp eval`.",
            show_default=False,
        ),
    ] = None,
    prompt_field: PromptField = None,
    answer_field: AnswerField = None,
    data_config: DataConfig = None,
    split: Split = "train",
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="SCORER",
            help="exact, numeric, python or module:function, as in `mrp eval`; needs --data.",
            show_default=False,
        ),
    ] = None,
    prompt_file: PromptFile = None,
    prompts: Annotated[int, typer.Option(metavar="N", help="Decode at most N prompts.")] = PROMPTS,
    full_head: FullHead = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CLAIMS", help="Names of claims to measure.", show_default="all")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the answers in this folder, and continue from those it holds.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Maximum number of new tokens per prompt.",
            show_default=f"{MAX_NEW_TOKENS}, or the embedded task's own",
        ),
    ] = None,
    batch_size: BatchSize = 16,
    raw: Raw = False,
    head: Head = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = "auto",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement:
    """Measure the paper's claims on a checkpoint.

    For each claim: what is claimed, the published figure, ours, the verdict by a stated rule, and the command that
    shows that row. Without data, an embedded checkpoint answers held-out samples of its own task. Without a scorer,
    the share of answers that equal those of one token a step stands in for accuracy.
    """
    if prompts < 2:
        raise ValueError(f"--prompts must be at least 2, got {prompts}: the rules compare standard errors")
    if scorer is not None and data is None:
        raise ValueError(f"--scorer {scorer} reads answers from the rows of a file: give --data FILE")
    if data is not None and prompt_file is not None:
        raise ValueError("--data and --prompt-file both name the prompts: give one of them")

    from modeling_mrp.options import one_of

    from ..checkpoints.output_paths import check_output
    from ..evaluation.claim_rules import CLAIMS
    from ..evaluation.modes import BACKBONE_ONLY, REFERENCE
    from ..evaluation.runs import Settings

    check_output("--output", output, folder=True)
    names = only or list(CLAIMS)
    for name in names:
        one_of("--only", name, CLAIMS)
    task = embedded_task(model, revision)
    if data is not None or prompt_file is not None:
        fields = {"name": data_config, "split": split, "prompt_field": prompt_field, "answer_field": answer_field}
        samples = samples_of_file(data, scorer, prompt_file, raw, **fields)
    elif task is not None:
        samples = samples_of_task(task, prompts)
    else:
        raise ValueError(f"there is nothing to decode: {model} is not an embedded checkpoint, so give --data FILE")
    if len(samples.rows) < 2:
        raise ValueError(f"the rules compare standard errors: give at least 2 prompts, got {len(samples.rows)}")
    samples.rows = samples.rows[:prompts]
    settings = Settings(
        modes={REFERENCE: BACKBONE_ONLY},
        scorer=samples.scorer_name,
        max_new_tokens=max_new_tokens or (MAX_NEW_TOKENS if task is None else task.answer_tokens),
        batch_size=batch_size,
        raw=samples.raw,
    )
    checkpoint = Checkpoint(model, revision, head, device, dtype, full_head)
    return _measure(checkpoint, samples, settings, names, output, _given_words(context), as_json, markdown)


def _measure(checkpoint, samples, settings, names, output, words, as_json: bool, markdown: bool) -> Measurement:
    """Measure the claims and print them as text, as a Markdown table or as JSON."""
    from ..checkpoints.loading import load, load_full_head
    from ..evaluation.claims import check_claims, scale_of

    model, tokenizer = load(checkpoint)
    full = load_full_head(checkpoint) if checkpoint.full_head is not None else None
    scale = scale_of(model, settings)
    heading = f"{len(samples.rows)} prompts, greedy, {_describe_scale(scale)}"
    heading += f"; {samples.note}" if samples.note else ""
    as_text = not (as_json or markdown)
    if as_text:
        print(f"{heading}\n")
    folder = nullcontext(output) if output else tempfile.TemporaryDirectory()
    with folder as path:
        show = (lambda row: print(as_lines(row, words), flush=True)) if as_text else (lambda row: None)
        judged = check_claims(
            model, tokenizer, samples.rows, samples.scorer, settings, path, names, full, on_row=show
        )  # fmt: skip
    rows = [asdict(row) | {"command": command(row, words)} for row in judged]
    if as_json:
        report = {"model": checkpoint.model, "prompts": len(samples.rows), "note": samples.note or None}
        report |= {"scale": asdict(scale)}
        print(json.dumps(report | {"rows": rows}))
    elif markdown:
        print(as_markdown(judged, words))
        print(f"\n{heading}.")
    figures = {"rows": rows, "scale": asdict(scale), "note": samples.note or None}
    return Measurement(figures, {"prompts": len(samples.rows)}, device=scale.device)


def _given_words(context: typer.Context) -> list[str]:
    """The command with the options that were given, which the command of every row repeats."""
    words = ["mrp", "claims", context.params["model"]]
    names = (parameter.name for parameter in context.command.params)  # context.params has the order of the words
    for name in given(context, *(name for name in names if name not in NOT_IN_ROW_COMMANDS)):
        value = context.params[name]
        words += [flag(name), *([] if value is True else [str(value)])]
    return words


# -- what is decoded


def embedded_task(model: str, revision: str | None = None) -> "WordProblems | PythonFunctions | None":
    """The task of an embedded checkpoint, given by its name or folder; None for any other checkpoint."""
    from hub_cards.tasks.tasks import TASKS

    from ..checkpoints.weight_files import fetch

    folder = fetch(model, revision)[0].resolve()
    return next((task for task in TASKS.values() if task.folder.resolve() == folder), None)


def samples_of_task(task: "WordProblems | PythonFunctions", count: int) -> Samples:
    """Held-out samples of an embedded checkpoint's task, with the task's own measure of right answers if it has one.

    Args:
        task: one of `hub_cards.tasks.tasks.TASKS`.
        count: maximum number of samples.
    """
    held_out = task.held_out("test", count)
    rows = [{"prompt": sample.prompt, "number": number} for number, sample in enumerate(held_out)]
    samples = Samples(rows, raw=True, note=task.note("test", count))  # raw, as the checkpoint was trained
    if task.right_when is not None:
        samples.scorer = lambda text, row: task.right(held_out[row["number"]], text)
        samples.scorer_name = task.right_when
    return samples


def samples_of_file(
    data: str | None, scorer: str | None, prompt_file: str | None, raw: bool, **fields: str | None
) -> Samples:
    """Samples of a data set, or of a file with one prompt per line.

    Args:
        data: a data file, folder or Hub id, or None to read `prompt_file`.
        scorer: name of the scorer, or None.
        prompt_file: path of a file with one prompt per line, or "-" for standard input.
        raw: whether the prompts go without the tokenizer's chat template.
        **fields: further arguments of `read_eval_rows`.

    Raises:
        ValueError: for an unknown scorer, or rows that it cannot read.
    """
    from ..evaluation.runs import read_eval_rows
    from ..evaluation.scorers import check_rows, load_scorer

    if data is None:
        return Samples([{"prompt": prompt} for prompt in read_prompts([], prompt_file)], raw=raw)
    if scorer is None:
        return Samples(read_eval_rows(data, **fields), raw=raw)
    score, rows = load_scorer(scorer), read_eval_rows(data, **fields)
    check_rows(scorer, rows)
    return Samples(rows, score, scorer, raw)


# -- what is shown


def command(row: "ClaimRow", words: Sequence[str]) -> str:
    """The command that shows one row."""
    return shlex.join([*words, "--only", row.name])


def _describe_scale(scale) -> str:
    return (
        f"batches of {scale.batch_size}, {scale.device}, {scale.dtype}, a backbone of "
        f"{scale.parameters / 1e6:.1f} million parameters, blocks of {scale.block_size}"
    )


def as_lines(row: "ClaimRow", words: Sequence[str]) -> str:
    """One claim, with a line for each of its parts."""
    parts = {
        "claim": row.claim,
        "published": row.published,
        "here": row.here,
        "why": row.reason,
        "rule": row.rule,
        "command": command(row, words),
    }
    lines = [f"  {name:10} {text}" for name, text in parts.items() if text]
    return "\n".join([f"{row.name}: {row.verdict}", *lines, ""])


def as_markdown(rows: Sequence, words: Sequence[str]) -> str:
    """A table of the claims, followed by the rules of the verdicts."""
    lines = ["| claim | published | here | verdict |", "|---|---|---|---|"]
    for row in rows:
        verdict = f"**{row.verdict}**" + (f": {row.reason}" if row.reason else "")
        cells = f"{row.claim} (`--only {row.name}`)", row.published, row.here, verdict
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", f"Command: `{shlex.join(words)}`. Verdicts by rule:", ""]
    return "\n".join(lines + [f"- `{row.name}` {row.rule}" for row in rows])

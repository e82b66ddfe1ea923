"""`mrp bench rules`: forwards, accuracy and speed of every step rule, with and without speculation."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from .demo import task_of
from .options import AsJson, BatchSize, Checkpoint, Device, Record, check_at_least
from .recording import Measurement

COLUMNS = {  # heading: text of a row's cell
    "mode": lambda row: row["mode"],
    "accuracy": lambda row: "-" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
    "forwards": lambda row: f"{row['backbone_forwards']}",
    "tokens/forward": lambda row: f"{row['tokens_per_forward']:.2f}",
    "same as rule alone": lambda row: f"{row['same_as_rule']:.1%}",
    "speed alone": lambda row: f"{row['speed_alone']:.2f}x",
    "speed in batch": lambda row: f"{row['speed_in_batch']:.2f}x",
}


def rules(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An embedded checkpoint: words or code.")],
    rules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULES",
            help="Step rules: static-N, dynamic-T, entropy-E, sequential or sequential-N; static is always run.",
            show_default="dynamic-0.9,dynamic-0.7,entropy-0.1,sequential",
        ),
    ] = None,
    speculation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODES",
            help="Speculation under each rule: spec-K, graph-K or auto, each also with -self or -token.",
            show_default="graph-4,graph-8,graph-16",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Decode at most N held-out samples in batches.")] = 100,
    batch_size: BatchSize = 50,
    samples_alone: Annotated[
        int, typer.Option(metavar="N", help="Decode the first N of them one at a time too, for the clock.")
    ] = 16,
    device: Device = None,
    as_json: AsJson = False,
    record: Record = None,
) -> Measurement:
    """Measure what every step rule saves, and what speculation saves on top of it.

    Held-out samples of an embedded checkpoint's task are decoded greedily in float32 by every rule, alone and with
    speculation. Speculation under a rule returns the text of that rule. Speeds are the time of static over that of
    the mode: with one sample at a time, and in batches.
    """
    check_at_least(1, samples=samples, batch_size=batch_size, samples_alone=samples_alone)
    task = task_of(model)

    from ..benchmarks.rules import RULES, SPECULATION, bench_rules
    from ..checkpoints.loading import load

    loaded, _ = load(Checkpoint(model, device=device, dtype="float32"))
    held_out, note = task.held_out("test", samples), task.note("test", samples)
    measured = bench_rules(
        loaded,
        task,
        held_out,
        rules=rules or RULES,
        speculation=speculation or SPECULATION,
        batch_size=batch_size,
        samples_alone=samples_alone,
        on_stage=lambda stage: print(f"measuring: {stage}", file=sys.stderr, flush=True),
    )
    figures = {"rows": [asdict(row) for row in measured], "note": note or None}
    print(json.dumps(figures) if as_json else "\n".join([*([note] if note else []), rules_table(figures["rows"])]))
    settings = {"samples": len(held_out), "samples_alone": min(samples_alone, len(held_out))}
    return Measurement(
        figures, settings | {"max_new_tokens": task.answer_tokens, "decoding": "greedy"}, device=str(loaded.device)
    )


def rules_table(rows: Sequence[dict]) -> str:
    """Return the rows of `bench_rules` as a table, one line for each mode.

    Args:
        rows: rows of `bench_rules`, as dicts.
    """
    lines = [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [f"{line[0]:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )

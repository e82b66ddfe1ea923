"""Figures of an evaluation: one row per mode, the Pareto front, the area under each curve, and their table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .decoding import Answer, Totals
from .formatting import significant
from .frontier import area_under_parallelism, pareto_front
from .modes import family


@dataclass(frozen=True)
class ModeFigures:
    """The figures of one mode over all prompts.

    Attributes:
        mode: name of the mode.
        accuracy, standard_error: mean score and its standard error; None without a scorer.
        tokens_per_forward: new tokens per forward of the backbone, every forward counted.
        forwards, head_forwards: over all prompts; a forward counts once for each prompt that takes part in it.
        tokens: new tokens, including those that end a text.
        seconds: decoding time of all prompts.
        time_ratio: the reference's seconds over this mode's; above 1 is faster.
        identical: share of the answers that equal the reference's token for token.
        acceptance: share of the drafts proposed at depth 1, 2, ... after the backbone's certain step that were
            accepted; a draft after a rejected one is rejected.
        tokens_per_forward_by_position: by position in the block; a token costs its share of the forward that
            revealed it. None for a position that holds no token.
        on_front: whether no other mode is better in accuracy or speed without being worse in the other.
    """

    mode: str
    accuracy: float | None
    standard_error: float | None
    tokens_per_forward: float
    forwards: int
    head_forwards: int
    tokens: int
    seconds: float
    time_ratio: float
    identical: float
    acceptance: list[float]
    tokens_per_forward_by_position: list[float | None]
    on_front: bool


def summarise(records: Sequence[dict], modes: Sequence[str]) -> dict:
    """Return the figures of the records of `evaluate`.

    Args:
        records: the records, of all modes.
        modes: names of the modes, the reference first.

    Returns:
        `rows`, a `ModeFigures` as a dict for each mode. With scores also `aup`, the area under the Pareto front of
        all modes, and `aup_by_family`, that of each kind of mode over its thresholds or steps, with the reference as
        the slow end of every curve.
    """
    by_mode: dict[str, list[dict]] = {mode: [] for mode in modes}
    for record in records:
        by_mode[record["mode"]].append(record)
    rows = [_figures(mode, by_mode[mode], by_mode[modes[0]]) for mode in modes]
    if rows[0].accuracy is None:
        return {"rows": [asdict(row) for row in rows]}
    points = {row.mode: (row.tokens_per_forward, row.accuracy) for row in rows}
    front = pareto_front(points.values())
    best = max(row.accuracy for row in rows)
    families: dict[str, list] = {}
    for mode in modes[1:]:
        families.setdefault(family(mode), [points[modes[0]]]).append(points[mode])
    return {
        "rows": [asdict(row) | {"on_front": points[row.mode] in front} for row in rows],
        "aup": area_under_parallelism(front, best),
        "aup_by_family": {name: area_under_parallelism(curve, best) for name, curve in families.items()},
    }


def _figures(mode: str, records: list[dict], reference: list[dict]) -> ModeFigures:
    totals = Totals.of(map(Answer.from_record, records))
    accuracy, error = _mean_and_error([record["score"] for record in records])
    expected = {record["index"]: record["token_ids"] for record in reference}
    same = sum(record["token_ids"] == expected[record["index"]] for record in records)
    return ModeFigures(
        mode=mode,
        accuracy=accuracy,
        standard_error=error,
        tokens_per_forward=totals.tokens_per_forward,
        forwards=totals.forwards,
        head_forwards=totals.head_forwards,
        tokens=totals.tokens,
        seconds=totals.seconds,
        time_ratio=sum(record["seconds"] for record in reference) / totals.seconds,
        identical=same / len(records),
        acceptance=totals.acceptance,
        tokens_per_forward_by_position=totals.tokens_per_forward_by_position,
        on_front=False,
    )


def _mean_and_error(scores: list[float | None]) -> tuple[float | None, float | None]:
    if None in scores:
        return None, None
    count = len(scores)
    mean = sum(scores) / count
    spread = sum((score - mean) ** 2 for score in scores)
    return mean, (spread / (count * max(count - 1, 1))) ** 0.5


# -- the table

COLUMNS = {  # heading: text of a row's cell
    "mode": lambda row: row["mode"],
    "accuracy": lambda row: f"{row['accuracy']:.3f}",
    "± s.e.": lambda row: f"{row['standard_error']:.3f}",
    "tokens/forward": lambda row: f"{row['tokens_per_forward']:.2f}",
    "forwards": lambda row: str(row["forwards"]),
    "head forwards": lambda row: str(row["head_forwards"]),
    "time ratio": lambda row: f"{row['time_ratio']:.2f}x",
    "identical": lambda row: f"{row['identical']:.1%}",
    "accepted at depth 1, 2, ...": lambda row: " ".join(f"{rate:.2f}" for rate in row["acceptance"]),
    "front": lambda row: "*" if row["on_front"] else "",
}
NEED_SCORES = ("accuracy", "± s.e.", "front")


def rows_table(rows: Sequence[dict], columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """Return the rows of a summary as a Markdown table.

    Args:
        rows: rows of `summarise`.
        columns: keys of `COLUMNS`; those that need scores are left out if there are none.
    """
    if rows[0]["accuracy"] is None:
        columns = [name for name in columns if name not in NEED_SCORES]
    lines = [list(columns), *([COLUMNS[name](row) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def table(summary: dict) -> str:
    """Return a summary as text: the table of all modes, the areas under the curves, and KL before and after."""
    written = [rows_table(summary["rows"])]
    if "aup" in summary:
        written += ["", f"AUP (area under accuracy over tokens per forward) of the front: {summary['aup']:.1f}"]
        areas = [f"{name} {area:.1f}" for name, area in summary["aup_by_family"].items()]
        written += [f"by curve: {', '.join(areas)}"] if areas else []
    if kl := summary.get("kl"):
        pairs = zip(kl["before"], kl["after"], strict=True)
        shown = ", ".join(f"{significant(before)} > {significant(after)}" for before, after in pairs)
        written.append(f"KL to the backbone's next logits before > after correction, by depth: {shown}")
    return "\n".join(written)

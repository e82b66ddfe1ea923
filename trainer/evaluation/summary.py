"""Figures of an evaluation: one row per mode, the Pareto front, the area under each curve."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .frontier import area_under_parallelism, pareto_front
from .modes import family


@dataclass(frozen=True)
class ModeFigures:
    """One mode's figures over all prompts.

    Attributes:
        mode: its name.
        accuracy: mean score, and its standard_error.
        tokens_per_forward: new tokens per forward of the backbone, all forwards counted.
        forwards, head_forwards: of all prompts together, one counted once for every prompt that takes part in it.
        tokens: new tokens, those that end a text included.
        seconds: of decoding, all prompts together.
        time_ratio: the reference's seconds over this mode's; above 1 is faster.
        identical: share of answers that are token for token the reference's.
        acceptance: share of the drafts proposed at depth 1, 2, ... behind the backbone's certain step that were
            accepted; a draft behind a refused one is refused.
        tokens_per_forward_by_position: by position in the block; what a token costs is its share of the forward that
            revealed it. None where no token fell.
        on_front: whether no other mode beats it in accuracy or speed without losing in the other.
    """

    mode: str
    accuracy: float
    standard_error: float
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


def summarise(records: list[dict], modes: Sequence[str]) -> dict:
    """Figures of the records of `evaluate`.

    Args:
        modes: names, the reference first.

    Returns:
        rows (`ModeFigures` as dicts); aup, of the Pareto front of all modes; aup_by_family, of each mode over its
        thresholds or steps, with the reference as the slow end of every curve.
    """
    by_mode: dict[str, list[dict]] = {mode: [] for mode in modes}
    for record in records:
        by_mode[record["mode"]].append(record)
    reference = {record["index"]: record for record in by_mode[modes[0]]}
    points = {mode: _point(by_mode[mode]) for mode in modes}
    front = pareto_front(points.values())
    rows = [_figures(mode, by_mode[mode], reference, points[mode] in front) for mode in modes]
    best = max(accuracy for _, accuracy in points.values())
    families: dict[str, list] = {}
    for mode in modes[1:]:
        families.setdefault(family(mode), [points[modes[0]]]).append(points[mode])
    return {
        "rows": [asdict(row) for row in rows],
        "aup": area_under_parallelism(front, best),
        "aup_by_family": {name: area_under_parallelism(curve, best) for name, curve in families.items()},
    }


def _point(records: list[dict]) -> tuple[float, float]:
    tokens = sum(len(record["token_ids"]) for record in records)
    speed = tokens / sum(record["forwards"] for record in records)
    return speed, sum(record["score"] for record in records) / len(records)


def _figures(mode: str, records: list[dict], reference: dict[int, dict], on_front: bool) -> ModeFigures:
    count = len(records)
    speed, accuracy = _point(records)
    spread = sum((record["score"] - accuracy) ** 2 for record in records)
    seconds = sum(record["seconds"] for record in records)
    same = sum(record["token_ids"] == reference[record["index"]]["token_ids"] for record in records)
    proposed, accepted = _sums(records, "proposed"), _sums(records, "accepted")
    tokens, cost = _sums(records, "position_tokens"), _sums(records, "position_forwards")
    return ModeFigures(
        mode=mode,
        accuracy=accuracy,
        standard_error=(spread / (count * max(count - 1, 1))) ** 0.5,
        tokens_per_forward=speed,
        forwards=sum(record["forwards"] for record in records),
        head_forwards=sum(record["head_forwards"] for record in records),
        tokens=sum(len(record["token_ids"]) for record in records),
        seconds=seconds,
        time_ratio=sum(record["seconds"] for record in reference.values()) / seconds,
        identical=same / count,
        acceptance=[a / p for a, p in zip(accepted[1:], proposed[1:], strict=True) if p],
        tokens_per_forward_by_position=[t / c if t else None for t, c in zip(tokens, cost, strict=True)],
        on_front=on_front,
    )


def _sums(records: list[dict], name: str) -> list[float]:
    return [sum(values) for values in zip(*(record[name] for record in records), strict=True)]


def table(summary: dict) -> str:
    """The rows as a Markdown table, the area under the curves below it."""
    head = "mode", "accuracy", "± s.e.", "tokens/forward", "forwards", "head forwards", "time ratio", "identical"
    lines = [[*head, "accepted at depth 1, 2, ...", "front"]]
    for row in summary["rows"]:
        lines.append(
            [
                row["mode"],
                f"{row['accuracy']:.3f}",
                f"{row['standard_error']:.3f}",
                f"{row['tokens_per_forward']:.2f}",
                str(row["forwards"]),
                str(row["head_forwards"]),
                f"{row['time_ratio']:.2f}x",
                f"{row['identical']:.1%}",
                " ".join(f"{rate:.2f}" for rate in row["acceptance"]),
                "*" if row["on_front"] else "",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    written = ["| " + " | ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    areas = [f"{name} {area:.1f}" for name, area in summary["aup_by_family"].items()]
    written += ["", f"AUP (area under accuracy over tokens per forward) of the front: {summary['aup']:.1f}"]
    written += [f"by curve: {', '.join(areas)}"] if areas else []
    if summary.get("kl"):
        pairs = (f"{before:.3f} > {after:.3f}" for before, after in zip(*_kl(summary), strict=True))
        written.append(f"KL to the backbone's next logits before > after correction, by depth: {', '.join(pairs)}")
    return "\n".join(written)


def _kl(summary: dict) -> tuple[list[float], list[float]]:
    return summary["kl"]["before"], summary["kl"]["after"]

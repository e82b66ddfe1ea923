"""Plots of an evaluation's summary, each as PNG and SVG. Needs matplotlib (the extra `plot`)."""

from pathlib import Path

from .frontier import pareto_front
from .modes import family

FORMATS = ("png", "svg")
SIZE = (7.0, 4.5)  # inches
BEFORE, AFTER = "#b0b0b0", "#1f77b4"


def require_matplotlib():
    """Raise a ValueError that says what to install when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install 'mrp-diffusion[plot]', or pass --no-plots"
        ) from error


def write_plots(summary: dict, folder) -> list[Path]:
    """Draw everything that the summary has figures for; returns the files.

    Args:
        summary: of `summarise`, with `kl` of `kl_by_depth` where there is a head.
        folder: made when missing.

    Raises:
        ValueError: when matplotlib is not installed.
    """
    require_matplotlib()
    folder, rows = Path(folder), summary["rows"]
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"frontier": (draw_frontier, summary)}
    drafting = _deepest(rows)
    if drafting:
        drawings["acceptance"] = (draw_acceptance, drafting)
    drawings["position"] = (draw_positions, [row for row in rows if row is rows[0] or row["on_front"]])
    if summary.get("kl") and summary["kl"]["before"]:
        drawings["kl"] = (draw_kl, summary["kl"])
    files = []
    for name, (draw, content) in drawings.items():
        files += _save(draw(content), folder / name)
    return files


def _deepest(rows: list[dict]) -> list[dict]:
    """Of each family of modes that draft, the one with the longest chains: shorter ones lie on its curve."""
    deepest: dict[str, dict] = {}
    for row in rows:
        known = deepest.get(family(row["mode"]), {"acceptance": []})
        if len(row["acceptance"]) > len(known["acceptance"]):
            deepest[family(row["mode"])] = row
    return list(deepest.values())


def draw_frontier(summary: dict):
    """Accuracy over tokens per forward: a curve for each family of modes, the Pareto front behind them."""
    figure, axes = _figure("tokens per backbone forward", "accuracy")
    rows = summary["rows"]
    front = pareto_front((row["tokens_per_forward"], row["accuracy"]) for row in rows)
    axes.plot(*zip(*front, strict=True), color="black", linestyle="--", linewidth=1, label="Pareto front", gid="front")
    curves: dict[str, list[dict]] = {}
    for row in rows:
        curves.setdefault(family(row["mode"]), []).append(row)
    for name, curve in curves.items():
        curve = sorted(curve, key=lambda row: row["tokens_per_forward"])
        speeds, accuracies, errors = (
            [row[key] for row in curve] for key in ("tokens_per_forward", "accuracy", "standard_error")
        )
        axes.errorbar(speeds, accuracies, yerr=errors, marker="o", markersize=4, linewidth=1, capsize=2, label=name)
    for point in front:
        names = [row["mode"] for row in rows if (row["tokens_per_forward"], row["accuracy"]) == point]
        axes.annotate(", ".join(names), point, xytext=(-4, 5), textcoords="offset points", fontsize=7, ha="right")
    axes.set_title(f"AUP of the front: {summary['aup']:.1f}", fontsize=9)
    axes.legend(fontsize=7)
    return figure


def draw_acceptance(rows: list[dict]):
    """Share of the drafts accepted, over their depth behind the backbone's certain step, for each of the rows."""
    figure, axes = _figure("depth of the draft", "share accepted")
    for row in rows:
        axes.plot(range(1, 1 + len(row["acceptance"])), row["acceptance"], marker="o", markersize=4, label=row["mode"])
    axes.set_ylim(0, 1.02)
    _whole_ticks(axes, max(len(row["acceptance"]) for row in rows), first=1)
    axes.legend(fontsize=7)
    return figure


def draw_positions(rows: list[dict]):
    """Tokens per forward of each position in the block; a token costs its share of the forward that revealed it."""
    figure, axes = _figure("position in the block", "tokens per backbone forward")
    for row in rows:
        values = [float("nan") if value is None else value for value in row["tokens_per_forward_by_position"]]
        axes.plot(range(len(values)), values, marker="o", markersize=3, linewidth=1, label=row["mode"])
    axes.set_ylim(bottom=0)
    _whole_ticks(axes, len(rows[0]["tokens_per_forward_by_position"]))
    axes.legend(fontsize=6, ncols=2)
    return figure


def draw_kl(kl: dict):
    """KL of the backbone's logits to its next ones, and of the corrected logits, by the number of steps between."""
    figure, axes = _figure("steps since the backbone's forward", "KL to the backbone's logits, nats")
    depths = range(1, 1 + len(kl["before"]))
    axes.bar([d - 0.2 for d in depths], kl["before"], width=0.4, color=BEFORE, label="before correction")
    axes.bar([d + 0.2 for d in depths], kl["after"], width=0.4, color=AFTER, label="after correction")
    _whole_ticks(axes, len(kl["before"]), first=1)
    axes.legend(fontsize=8)
    return figure


def _figure(xlabel: str, ylabel: str):
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _whole_ticks(axes, count: int, first: int = 0):
    axes.set_xticks(range(first, first + count))


def _save(figure, stem: Path) -> list[Path]:
    import matplotlib

    files = [stem.with_suffix(f".{extension}") for extension in FORMATS]
    for file in files:
        # without a date and random ids the same figures give the same file
        with matplotlib.rc_context({"svg.hashsalt": stem.name}):
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

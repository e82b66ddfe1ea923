"""Plots of an evaluation's summary, each as PNG and SVG. They need matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .formatting import significant
from .frontier import Point, pareto_front
from .modes import family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
SIZE = (8.0, 4.8)  # inches
BEFORE, AFTER = "#b0b0b0", "#1f77b4"
# Curves may coincide: each has its own shape, and later ones are smaller and hollow, so that all remain visible.
MARKERS = "osD^v<>ph8d"
LABEL_PLACES = [  # offset (x, y) in points from the labelled point, and the alignment of the text there; best first
    ((x, y), side)
    for distance in (9, 18, 28, 40)
    for x, y, side in (
        (distance, distance, "left"),
        (-distance, distance, "right"),
        (0, distance, "center"),
        (distance, -3, "left"),
        (-distance, -3, "right"),
        (distance, -distance - 6, "left"),
        (-distance, -distance - 6, "right"),
        (0, -distance - 6, "center"),
    )
]


def require_matplotlib() -> None:
    """Raise a ValueError that says what to install if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install 'mrp-diffusion[plot]', or pass --no-plots"
        ) from error


def write_plots(summary: dict, folder: str | Path, subject: str = "") -> list[Path]:
    """Draw everything that the summary has figures for, and return the files.

    Args:
        summary: from `summarise`, with `kl` from `kl_by_depth` if there is a head.
        folder: where to write; created if missing.
        subject: model and task, for the titles.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    require_matplotlib()
    folder, rows = Path(folder), summary["rows"]
    folder.mkdir(parents=True, exist_ok=True)
    figures, colours, drafting = {}, _colours(rows), _deepest(rows)
    if "aup" in summary:
        figures["frontier"] = draw_frontier(summary, subject)
    if drafting:
        figures["acceptance"] = draw_acceptance(drafting, subject, colours)
    shown = [row for row in rows if row is rows[0] or row["on_front"] or row in drafting]
    figures["position"] = draw_positions(shown, subject, colours)
    if summary.get("kl") and summary["kl"]["before"]:
        figures["kl"] = draw_kl(summary["kl"], subject)
    return [file for name, figure in figures.items() for file in _save(figure, folder / name)]


def _deepest(rows: Sequence[dict]) -> list[dict]:
    """Return the row with the longest chains of each family of modes that draft; shorter chains lie on its curve."""
    deepest: dict[str, dict] = {}
    for row in rows:
        known = deepest.get(family(row["mode"]), {"acceptance": []})
        if len(row["acceptance"]) > len(known["acceptance"]):
            deepest[family(row["mode"])] = row
    return list(deepest.values())


def _colours(rows: Sequence[dict]) -> dict[str, str]:
    """Return the colour of each family of modes; it is the same in all drawings of a summary."""
    families = dict.fromkeys(family(row["mode"]) for row in rows)
    return {name: f"C{number % 10}" for number, name in enumerate(families)}


# -- the drawings


def draw_frontier(summary: dict, subject: str = "") -> Figure:
    """Draw accuracy over tokens per forward: a curve for each family of modes, and the Pareto front.

    Args:
        summary: from `summarise`, with scores.
        subject: model and task, for the title.
    """
    title = f"Accuracy and speed (AUP of the front: {summary['aup']:.1f})"
    figure, axes = _figure(title, subject, "tokens per forward of the backbone", "accuracy")
    rows = summary["rows"]
    curves: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_forward"]):
        curves.setdefault(family(row["mode"]), []).append(row)
    styles = {name: _style(number, colour) for number, (name, colour) in enumerate(_colours(rows).items())}
    bars = {row["mode"]: _error_bar(row) for row in rows}
    for name, style in styles.items():
        accuracies = [row["accuracy"] for row in curves[name]]
        ends = [bars[row["mode"]] for row in curves[name]]
        errors = [[abs(end - y) for end, y in zip(side, accuracies, strict=True)] for side in zip(*ends, strict=True)]
        speeds = [row["tokens_per_forward"] for row in curves[name]]
        axes.errorbar(speeds, accuracies, yerr=errors, capsize=2, elinewidth=0.6, label=name, **style)
    front = pareto_front((row["tokens_per_forward"], row["accuracy"]) for row in rows)
    # a broad band, which remains visible under the curves that lie on it
    band = {"color": "#dddddd", "linewidth": 8, "solid_capstyle": "butt", "solid_joinstyle": "round"}
    axes.plot(*zip(*front, strict=True), label="Pareto front", zorder=1, **band)
    _leave_room(axes)
    _legend(axes)
    points = {row["mode"]: (row["tokens_per_forward"], row["accuracy"]) for row in rows}
    labels = {}
    for point in reversed(front):  # it falls to the right, so labels find room above it if they start there
        modes = [mode for mode, place in points.items() if place == point]
        labels[point] = ", ".join(modes), styles[family(modes[0])]["color"]
    lines = [[points[row["mode"]] for row in curve] for curve in curves.values()]
    lines += [[(points[mode][0], end) for end in ends] for mode, ends in bars.items()]
    _label_points(figure, axes, labels, [*lines, front], list(points.values()))
    return figure


def _leave_room(axes: Axes) -> None:
    """Limits of the accuracy axis: not below 0, and with room for labels above the highest point."""
    bottom, top = max(axes.get_ylim()[0], 0.0), min(axes.get_ylim()[1], 1.0)
    axes.set_ylim(max(bottom - 0.1 * (top - bottom), 0), top + 0.2 * (top - bottom))
    lowest = axes.get_ylim()[0]
    axes.set_yticks([tick for tick in axes.get_yticks() if lowest <= tick <= 1])
    axes.margins(x=0.12)


def _error_bar(row: dict) -> tuple[float, float]:
    """Accuracy minus and plus its standard error, within 0..1."""
    return max(row["accuracy"] - row["standard_error"], 0.0), min(row["accuracy"] + row["standard_error"], 1.0)


def draw_acceptance(rows: Sequence[dict], subject: str = "", colours: dict[str, str] | None = None) -> Figure:
    """Draw the share of drafts accepted over their depth after the backbone's certain step, a curve for each row.

    Args:
        rows: rows of `summarise` with drafts.
        subject: model and task, for the title.
        colours: colour of each family of modes (default: one for each family in `rows`).
    """
    colours = colours or _colours(rows)
    figure, axes = _figure(
        "Drafts accepted, by depth", subject, "drafts after the backbone's own step", "share accepted"
    )
    for number, row in enumerate(rows):
        depths = range(1, 1 + len(row["acceptance"]))
        axes.plot(depths, row["acceptance"], label=row["mode"], **_style(number, colours[family(row["mode"])]))
    axes.set_ylim(0, 1.03)
    axes.set_xticks(range(1, 1 + max(len(row["acceptance"]) for row in rows)))
    _legend(axes)
    return figure


def draw_positions(rows: Sequence[dict], subject: str = "", colours: dict[str, str] | None = None) -> Figure:
    """Draw tokens per forward at each position of the block; a token costs its share of the forward that revealed it.

    Args:
        rows: rows of `summarise`.
        subject: model and task, for the title.
        colours: colour of each family of modes (default: one for each family in `rows`).
    """
    colours = colours or _colours(rows)
    figure, axes = _figure(
        "Speed by position in the block",
        subject,
        "position in the block, from 0",
        "tokens per forward of the backbone",
    )
    for number, row in enumerate(rows):
        values = [float("nan") if value is None else value for value in row["tokens_per_forward_by_position"]]
        axes.plot(range(len(values)), values, label=row["mode"], **_style(number, colours[family(row["mode"])]))
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(rows[0]["tokens_per_forward_by_position"])))
    _legend(axes)
    return figure


def draw_kl(kl: dict, subject: str = "") -> Figure:
    """Draw the KL between the backbone's later logits and the earlier ones, before and after the head's correction.

    Args:
        kl: from `kl_by_depth`.
        subject: model and task, for the title.
    """
    figure, axes = _figure(
        "KL to the backbone's own next logits",
        subject,
        "tokens revealed since the backbone's forward",
        "KL, nats per masked token",
    )
    depths = range(1, 1 + len(kl["before"]))
    for shift, name, color in ((-0.2, "before", BEFORE), (0.2, "after", AFTER)):
        bars = axes.bar(
            [depth + shift for depth in depths],
            kl[name],
            width=0.38,
            color=color,
            label=f"{name} the head's correction",
        )
        axes.bar_label(bars, [significant(value) for value in kl[name]], padding=2, fontsize=8)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)
    axes.set_xticks(depths)
    _legend(axes)
    return figure


# -- shared by the drawings


def _figure(title: str, subject: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    axes.set_title("\n".join(line for line in (title, subject) if line), fontsize=10)
    axes.grid(alpha=0.3)
    return figure, axes


def _style(number: int, colour: str) -> dict:
    """Marker and line of curve number 0, 1, ... in a colour; later curves are drawn on top, smaller and hollow."""
    hollow = {"markerfacecolor": "none", "markeredgewidth": 1.3} if number else {}
    return hollow | {
        "color": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": max(7.5 - number / 2, 5),
        "linewidth": 1.2,
        "zorder": 2 + number / 100,
    }


def _legend(axes: Axes) -> None:
    """Add a legend to the right of the axes, where it hides no curve. It shows markers without error bars."""
    from matplotlib.container import Container

    handles, labels = axes.get_legend_handles_labels()
    handles = [handle[0] if isinstance(handle, Container) else handle for handle in handles]
    axes.legend(handles, labels, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def _label_points(
    figure: Figure,
    axes: Axes,
    labels: dict[Point, tuple[str, str]],
    lines: Iterable[Sequence[Point]],
    markers: Iterable[Point],
) -> None:
    """Label points in places where the text covers no line, marker or other label, if there is room.

    Args:
        figure: the figure.
        axes: its axes, with final limits.
        labels: text and colour of the label of each point.
        lines: curves that labels should not cover.
        markers: points that labels should not cover.
    """
    from matplotlib.text import Text

    figure.draw_without_rendering()  # the layout decides where the axes lie
    to_pixels, renderer = axes.transData.transform, figure._get_renderer()
    inside, placed = axes.get_window_extent(renderer), []
    line_pixels = [pixel for line in lines for pixel in _along(to_pixels(line))]
    marker_pixels = [to_pixels(place) for place in markers]

    def cost(box, rank: int) -> float:
        covered = 5 * sum(box.contains(*pixel) for pixel in line_pixels)
        covered += 50 * sum(box.padded(6).contains(*pixel) for pixel in marker_pixels)
        covered += 100 * sum(box.overlaps(other) for other in placed)
        outside = not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1))
        return covered + 100 * outside + 2 * rank

    for point, (text, color) in labels.items():
        notes = [
            axes.annotate(
                text,
                point,
                xytext=to,
                textcoords="offset points",
                fontsize=8,
                ha=side,
                color=color,
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 4},
            )
            for to, side in LABEL_PLACES
        ]
        for note in notes:
            note.set_in_layout(False)
            note.update_positions(renderer)
        boxes = [Text.get_window_extent(note, renderer).padded(2) for note in notes]  # of the text, without its arrow
        best = min(range(len(notes)), key=lambda rank: cost(boxes[rank], rank))
        placed.append(boxes[best])
        for rank, note in enumerate(notes):
            if rank != best:
                note.remove()


def _along(line: Sequence[Point], distance: float = 2.0) -> list[Point]:
    """Return the corners of a line, and points on it about `distance` apart."""
    places = [line[-1]]
    for (x, y), (next_x, next_y) in zip(line, line[1:], strict=False):
        steps = max(int(max(abs(next_x - x), abs(next_y - y)) / distance), 1)
        places += [(x + (next_x - x) * i / steps, y + (next_y - y) * i / steps) for i in range(steps)]
    return places


def _save(figure: Figure, stem: Path) -> list[Path]:
    import matplotlib

    files = [stem.with_suffix(f".{extension}") for extension in FORMATS]
    for file in files:
        # without a date and random ids the same figures give the same file
        with matplotlib.rc_context({"svg.hashsalt": stem.name}):
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

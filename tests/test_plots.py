"""Plots show the summary's figures, as PNG and SVG."""

import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.collections import LineCollection
from matplotlib.text import Text

from mrp_trainer.commands.cli import main
from mrp_trainer.evaluation import plots
from mrp_trainer.evaluation.modes import family
from mrp_trainer.evaluation.plots import draw_acceptance, draw_frontier, draw_kl, draw_positions, write_plots


def row(mode, speed, accuracy, acceptance=(), positions=(1.0, None, 2.0), on_front=False):
    return {
        "mode": mode,
        "tokens_per_forward": speed,
        "accuracy": accuracy,
        "standard_error": 0.02,
        "acceptance": list(acceptance),
        "tokens_per_forward_by_position": list(positions),
        "on_front": on_front,
    }


ROWS = [
    row("static", 1.0, 0.9),
    row("spec-2", 1.5, 0.9, [0.8]),
    row("spec-4", 2.0, 0.9, [0.8, 0.7, 0.6], on_front=True),
    row("dynamic-0.5", 3.0, 0.5, on_front=True),
    row("dynamic-0.9", 1.6, 0.8),
]
SUMMARY = {"rows": ROWS, "aup": 180.0, "kl": {"before": [0.13, 0.21], "after": [0.04, 0.05]}}


def lines(figure):
    return {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}


def test_every_drawing_is_written_as_png_and_svg(tmp_path):
    files = write_plots(SUMMARY, tmp_path / "plots")
    expected = {f"{n}.{e}" for n in ("frontier", "acceptance", "position", "kl") for e in ("png", "svg")}
    assert {file.name for file in files} == expected
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_figures_give_the_same_files(tmp_path):
    first, second = write_plots(SUMMARY, tmp_path / "a"), write_plots(SUMMARY, tmp_path / "b")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_drawings_without_figures_are_left_out(tmp_path):
    files = write_plots({"rows": ROWS[:1], "aup": 90.0}, tmp_path)
    assert {file.stem for file in files} == {"frontier", "position"}
    files = write_plots({"rows": [ROWS[0] | {"accuracy": None, "standard_error": None}]}, tmp_path)
    assert {file.stem for file in files} == {"position"}


def test_the_front_runs_through_the_points_that_no_other_dominates():
    figure = draw_frontier(SUMMARY)
    assert lines(figure)["Pareto front"] == [[2.0, 0.9], [3.0, 0.5]]
    notes = {text.get_text() for text in figure.axes[0].texts}
    assert notes == {"spec-4", "dynamic-0.5"}


def test_the_points_of_a_family_make_one_curve_by_rising_speed():
    curves = {c.get_label(): c.lines[0].get_xydata().tolist() for c in draw_frontier(SUMMARY).axes[0].containers}
    assert curves == {
        "static": [[1.0, 0.9]],
        "spec": [[1.5, 0.9], [2.0, 0.9]],
        "dynamic": [[1.6, 0.8], [3.0, 0.5]],
    }


def test_every_title_names_model_and_task():
    drawn = draw_frontier(SUMMARY, "m on t"), draw_acceptance(ROWS[1:3], "m on t")
    drawn += draw_positions(ROWS, "m on t"), draw_kl(SUMMARY["kl"], "m on t")
    titles = [figure.axes[0].get_title() for figure in drawn]
    assert all(title.endswith("\nm on t") for title in titles) and len(set(titles)) == 4


def test_accuracies_and_their_error_bars_stay_within_0_and_1():
    rows = [row("static", 1.0, 0.99), row("dynamic-0.5", 3.0, 0.01), row("dynamic-0.9", 2.0, 0.0)]
    axes = draw_frontier({"rows": rows, "aup": 99.0}).axes[0]
    assert axes.get_ylim()[0] == 0 and min(axes.get_yticks()) >= 0 and max(axes.get_yticks()) <= 1
    ends = [y for bars in axes.collections for segment in bars.get_segments() for _, y in segment]
    assert (min(ends), max(ends)) == (0.0, 1.0)


def test_labels_of_the_front_cover_no_marker_and_no_other_label():
    rows = [row(f"spec-{k}", 1 + k / 20, 0.9 - k / 100) for k in range(6)] + [row("dynamic-0.5", 3.0, 0.1)]
    figure = draw_frontier({"rows": rows, "aup": 99.0})
    figure.draw_without_rendering()
    axes, renderer = figure.axes[0], figure._get_renderer()
    boxes = [Text.get_window_extent(note, renderer) for note in axes.texts]
    assert len(boxes) == len(rows)
    for number, box in enumerate(boxes):
        places = axes.transData.transform([(one["tokens_per_forward"], one["accuracy"]) for one in rows])
        assert not any(box.contains(x, y) for x, y in places)
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_curves_that_coincide_have_different_markers_and_colours():
    drawn = draw_acceptance([ROWS[2], ROWS[2] | {"mode": "spec-4-token"}]).axes[0].lines
    assert len({line.get_marker() for line in drawn}) == len({line.get_color() for line in drawn}) == 2
    assert drawn[1].get_markerfacecolor() == "none"  # the first one shows through


def test_a_family_of_modes_has_one_colour_in_all_drawings(tmp_path, monkeypatch):
    """Colours went by the number of the curve, so that a colour meant another mode in every picture."""
    drawn = {}
    monkeypatch.setattr(plots, "_save", lambda figure, stem: [drawn.setdefault(stem.name, figure)])
    write_plots(SUMMARY, tmp_path)
    frontier = {bars.get_label(): bars.lines[0].get_color() for bars in drawn["frontier"].axes[0].containers}
    for name in ("acceptance", "position"):
        shown = drawn[name].axes[0].lines
        assert [line.get_color() for line in shown] == [frontier[family(line.get_label())] for line in shown]


def test_speed_by_position_shows_static_the_front_and_the_longest_chain_of_drafts(tmp_path, monkeypatch):
    """Only the front was shown, from which remasking may displace every speculative mode."""
    drawn = {}
    monkeypatch.setattr(plots, "_save", lambda figure, stem: [drawn.setdefault(stem.name, figure)])
    rows = [row | {"on_front": row["mode"] == "dynamic-0.5"} for row in ROWS]
    write_plots(SUMMARY | {"rows": rows}, tmp_path)
    assert list(lines(drawn["position"])) == ["static", "spec-4", "dynamic-0.5"]


def test_the_legend_shows_markers_without_error_bars():
    legend = draw_frontier(SUMMARY).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["Pareto front", "static", "spec", "dynamic"]
    assert not any(isinstance(artist, LineCollection) for artist in legend.findobj())


def test_acceptance_starts_at_depth_one():
    assert lines(draw_acceptance([ROWS[2]])) == {"spec-4": [[1, 0.8], [2, 0.7], [3, 0.6]]}


def test_a_position_without_tokens_leaves_a_gap():
    (points,) = lines(draw_positions(ROWS[:1])).values()
    assert [points[0], points[2]] == [[0, 1.0], [2, 2.0]]
    assert points[1][1] != points[1][1]


def test_kl_bars_have_the_height_of_the_figures():
    heights = [[bar.get_height() for bar in bars] for bars in draw_kl(SUMMARY["kl"]).axes[0].containers]
    assert heights == [[0.13, 0.21], [0.04, 0.05]]


def test_small_kl_values_are_written_above_their_bars():
    notes = draw_kl({"before": [0.13], "after": [0.0000123]}).axes[0].texts
    assert [note.get_text() for note in notes] == ["0.130", "1.23e-05"]


def test_without_matplotlib_the_error_says_what_to_install_before_anything_is_decoded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'mrp-diffusion\[plot\]'"):
        write_plots(SUMMARY, tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    assert main(["eval", str(tmp_path / "no-model"), "--data", str(data), "--scorer", "exact"]) == 2
    assert "matplotlib" in capsys.readouterr().err

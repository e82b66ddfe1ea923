"""Plots show the summary's figures, as PNG and SVG."""

import sys
import xml.etree.ElementTree as ET

import pytest

from mrp_trainer.commands.cli import main
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


def test_what_there_are_no_figures_for_is_not_drawn(tmp_path):
    files = write_plots({"rows": ROWS[:1], "aup": 90.0}, tmp_path)
    assert {file.stem for file in files} == {"frontier", "position"}


def test_the_front_runs_through_what_nothing_beats():
    figure = draw_frontier(SUMMARY)
    assert lines(figure)["Pareto front"] == [[2.0, 0.9], [3.0, 0.5]]
    notes = [text.get_text() for text in figure.axes[0].texts]
    assert notes == ["spec-4", "dynamic-0.5"]


def test_the_points_of_a_family_make_one_curve_by_rising_speed():
    curves = {c.get_label(): c.lines[0].get_xydata().tolist() for c in draw_frontier(SUMMARY).axes[0].containers}
    assert curves == {
        "static": [[1.0, 0.9]],
        "spec": [[1.5, 0.9], [2.0, 0.9]],
        "dynamic": [[1.6, 0.8], [3.0, 0.5]],
    }


def test_acceptance_starts_at_depth_one():
    assert lines(draw_acceptance([ROWS[2]])) == {"spec-4": [[1, 0.8], [2, 0.7], [3, 0.6]]}


def test_a_position_without_tokens_leaves_a_gap():
    (points,) = lines(draw_positions(ROWS[:1])).values()
    assert [points[0], points[2]] == [[0, 1.0], [2, 2.0]]
    assert points[1][1] != points[1][1]


def test_kl_bars_have_the_height_of_the_figures():
    heights = [[bar.get_height() for bar in bars] for bars in draw_kl(SUMMARY["kl"]).axes[0].containers]
    assert heights == [[0.13, 0.21], [0.04, 0.05]]


def test_without_matplotlib_the_error_says_what_to_install_before_anything_is_decoded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'mrp-diffusion\[plot\]'"):
        write_plots(SUMMARY, tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    assert main(["eval", str(tmp_path / "no-model"), "--data", str(data), "--scorer", "exact"]) == 2
    assert "matplotlib" in capsys.readouterr().err

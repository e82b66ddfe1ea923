"""The result files that the build scripts write with `--record`."""

import pytest

from hub_cards.build import build_tiny, compare_heads
from hub_cards.build.recipes import RECIPES

results = pytest.importorskip("mrp_trainer.evaluation.results")


def test_build_records_the_times_of_its_steps_and_its_figures(tmp_path):
    figures = {
        "rows": [{"step": "backbone", "seconds": 12.5}],
        "quality": "Good.",
        "forwards_saved": {"spec-4": 1.9},
    }
    build_tiny.record(tmp_path / "build.json", RECIPES["code"], figures)
    result = results.read_result(tmp_path / "build.json")
    assert result.figures == figures and result.settings == {"task": "code", "seed": build_tiny.SEED}
    assert result.command == ("python -m hub_cards.build.build_tiny code",)


def test_comparison_records_every_head_with_its_recipe(tmp_path):
    saved = {"spec-2": 1.4, "spec-4": 1.6}
    found = {compare_heads.WITHOUT_HEAD: saved, "fresh, 2 layers": saved}
    compare_heads.record(tmp_path / "heads.json", "words", found)
    without, fresh = results.read_result(tmp_path / "heads.json").rows
    assert without == {"head": compare_heads.WITHOUT_HEAD, "recipe": None, "forwards_saved": saved}
    assert fresh["recipe"]["fresh"] and fresh["recipe"]["layers"] == 2 and fresh["forwards_saved"] == saved

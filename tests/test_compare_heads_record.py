"""The result file that the comparison of heads writes with `--record`."""

from hub_cards.build import compare_heads
from mrp_trainer.evaluation import results


def test_comparison_records_every_head_with_its_recipe(tmp_path):
    saved = {"spec-2": 1.4, "spec-4": 1.6}
    found = {compare_heads.WITHOUT_HEAD: saved, "fresh, 2 layers": saved}
    compare_heads.record(tmp_path / "heads.json", "words", found)
    without, fresh = results.read_result(tmp_path / "heads.json").rows
    assert without == {"head": compare_heads.WITHOUT_HEAD, "recipe": None, "forwards_saved": saved}
    assert fresh["recipe"]["fresh"] and fresh["recipe"]["layers"] == 2 and fresh["forwards_saved"] == saved

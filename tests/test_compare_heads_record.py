"""`compare_heads`: what it trains, and the result file that it writes with `--record`."""

from hub_cards.build import build_tiny, compare_heads
from hub_cards.build.recipes import RECIPES
from mrp_trainer.evaluation import results

SAVED = {"spec-2": 1.4, "spec-4": 1.6, "spec-8": 1.7, "spec-4-token": 1.8, "spec-8-token": 1.9}


def run(arguments, monkeypatch):
    """Run the command line without training and decoding; return the kinds of training rows that it asked for."""
    asked = []

    def train(name, start, recipe, rows, heads):
        asked.append(compare_heads.VARIANTS[name].visited)
        rows(asked[-1])

    monkeypatch.setattr(compare_heads, "FRESH_STEPS", 1)
    monkeypatch.setattr(compare_heads, "train_variant", train)
    monkeypatch.setattr(compare_heads, "measure", lambda *args, **options: SAVED)
    compare_heads.main(arguments)
    return asked


def test_comparison_records_every_head_with_its_recipe(tmp_path):
    found = {compare_heads.WITHOUT_HEAD: SAVED, "fresh, 2 layers": SAVED}
    compare_heads.record(tmp_path / "heads.json", "words", ["a command"], found)
    result = results.read_result(tmp_path / "heads.json")
    without, fresh = result.rows
    assert without == {"head": compare_heads.WITHOUT_HEAD, "recipe": None, "forwards_saved": SAVED}
    assert fresh["recipe"]["fresh"] and fresh["recipe"]["layers"] == 2 and fresh["forwards_saved"] == SAVED
    assert result.command == ("a command",)


def test_the_recorded_command_and_heads_are_those_of_this_run(tmp_path, monkeypatch):
    """The file held the heads of all earlier runs as well, and a command without --only and --scratch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(compare_heads, "visited_rows", lambda *args: None)
    for name in ("visited states", "fresh"):
        run(["words", "--scratch", "here", "--only", name, "--record", "heads.json"], monkeypatch)
    result = results.read_result("heads.json")
    assert result.command == ("python -m hub_cards.build.compare_heads words --scratch here --only fresh",)
    assert [row["head"] for row in result.rows] == [compare_heads.WITHOUT_HEAD, compare_heads.STARTED_FROM, "fresh"]


def test_visited_states_are_decoded_only_for_variants_that_are_trained_on_them(tmp_path, monkeypatch):
    """`--only fresh` decoded 2400 prompts before it printed anything."""
    decoded = []
    monkeypatch.setattr(compare_heads, "visited_rows", lambda *args: decoded.append(1))
    assert run(["words", "--scratch", str(tmp_path), "--only", "fresh"], monkeypatch) == [False]
    assert not decoded
    names = ["visited states", "visited states, K = 7"]
    assert run(["words", "--scratch", str(tmp_path), "--only", *names], monkeypatch) == [True, True]
    assert len(decoded) == 1


def test_the_build_is_recorded_with_the_folders_that_were_given(tmp_path):
    recipe = RECIPES["code"]
    usual = build_tiny.build_command(recipe, build_tiny.default_scratch(recipe), recipe.task.folder)
    assert usual == "python -m hub_cards.build.build_tiny code"
    other = build_tiny.build_command(recipe, build_tiny.Path("a b"), build_tiny.Path("out"))
    assert other == "python -m hub_cards.build.build_tiny code --scratch 'a b' --out out"

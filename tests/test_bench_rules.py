"""`mrp bench rules`: every step rule, alone and with speculation, which keeps the rule's text."""

import json

import pytest

from hub_cards.tasks.tasks import TASKS
from mrp_trainer.benchmarks import rules as bench
from mrp_trainer.checkpoints.loading import load
from mrp_trainer.commands.cli import main
from mrp_trainer.commands.options import Checkpoint
from mrp_trainer.evaluation.results import read_result

FIELDS = ["mode", "rule", "accuracy", "backbone_forwards", "head_forwards", "tokens_per_forward", "same_as_rule"]


@pytest.fixture(scope="module")
def words():
    return load(Checkpoint("words", device="cpu", dtype="float32"))[0]


@pytest.fixture(scope="module")
def rows(words):
    task = TASKS["words"]
    speculation = ("graph-4", "spec-4-self")
    samples = task.held_out("validation", 4)
    return bench.bench_rules(words, task, samples, speculation=speculation, batch_size=4, samples_alone=1)


def test_each_rule_is_followed_by_its_speculation(rows):
    assert [row.mode for row in rows[:6]] == [
        *("static", "static+graph-4", "static+spec-4-self"),
        *("dynamic-0.9", "dynamic-0.9+graph-4", "dynamic-0.9+spec-4-self"),
    ]
    assert len(rows) == 3 * len(bench.RULES)
    assert all(row.mode.split("+")[0] == row.rule for row in rows)


def test_speculation_keeps_the_text_of_its_rule_and_saves_forwards(rows):
    """Law 1 for every rule, by the names of modes."""
    alone = {row.rule: row for row in rows if "+" not in row.mode}
    assert {row.mode: row.same_as_rule for row in rows} == {row.mode: 1.0 for row in rows}
    for row in rows:
        assert row.accuracy == alone[row.rule].accuracy
        if row.mode != row.rule:
            assert row.backbone_forwards < alone[row.rule].backbone_forwards
        assert (row.head_forwards > 0) == row.mode.endswith("+graph-4")


def test_the_rules_are_different_rules(rows):
    """Otherwise the texts of speculation would be those of static whatever the rule."""
    forwards = [row.backbone_forwards for row in rows if row.mode == row.rule]
    assert len(set(forwards)) == len(forwards) == 5


def test_speeds_are_relative_to_static(rows):
    assert (rows[0].speed_alone, rows[0].speed_in_batch) == (1.0, 1.0)
    assert all(row.speed_alone > 0 and row.speed_in_batch > 0 for row in rows)


def test_the_time_alone_is_the_sum_over_the_prompts(words, monkeypatch):
    times = iter([1.0, 4.0, 2.0, 8.0])
    monkeypatch.setattr("mrp_trainer.benchmarks.timing.timed", lambda step, device: next(times))
    modes = bench.rule_modes(words, [], ["graph-4"])["static"]
    assert bench._seconds_alone(words, [[5], [6]], modes, 4) == {"static": 3.0, "static+graph-4": 12.0}


def test_static_comes_first_and_no_mode_twice(words):
    modes = bench.rule_modes(words, ["sequential", "static", "sequential"], ["graph-4", "graph-4"])
    assert {rule: list(options) for rule, options in modes.items()} == {
        "static": ["static", "static+graph-4"],
        "sequential": ["sequential", "sequential+graph-4"],
    }


@pytest.mark.parametrize(
    "rules, speculation, expected",
    [
        (["spec-4"], ["graph-8"], "rules: 'spec-4' cannot be used here; expected names such as static, dynamic-0.9"),
        (["dynamic-0.9+graph-8"], [], "rules: 'dynamic-0.9.graph-8' cannot be used here"),
        (["dynamic-2"], ["graph-8"], "rules: unknown mode 'dynamic-2'; expected a rule .static, .*T a threshold"),
        (["sequential"], ["direct-2"], "speculation: 'direct-2' cannot be used here; expected names such as graph-4"),
        ([], ["static+graph-4"], "speculation: 'static.graph-4' cannot be used here"),
        ([], ["graph"], "speculation: unknown mode 'graph'"),
    ],
)
def test_what_is_no_rule_or_no_speculation_is_named(words, rules, speculation, expected):
    with pytest.raises(ValueError, match=expected):
        bench.rule_modes(words, rules, speculation)


def test_speculation_without_a_head_is_offered(tiny_model):
    model = tiny_model(num_mrp_layers=0)
    with pytest.raises(ValueError, match="speculation: 'graph-4' needs a head, .* use graph-4-self"):
        bench.rule_modes(model, [], ["graph-4"])
    assert list(bench.rule_modes(model, [], ["graph-4-self"])["static"]) == ["static", "static+graph-4-self"]


def test_a_number_below_one_is_named(words):
    with pytest.raises(ValueError, match="samples_alone must be at least 1, got 0"):
        bench.bench_rules(words, TASKS["words"], [object()], samples_alone=0)


def test_the_command_prints_and_records_its_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    line = "bench rules words --rules sequential --speculation graph-4 --samples 2 --batch-size 2 --samples-alone 3"
    assert main([*line.split(), "--device", "cpu", "--json", "--record", str(tmp_path / "rules.json")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in shown["rows"]] == ["static", "static+graph-4", "sequential", "sequential+graph-4"]
    assert list(shown["rows"][0]) == [*FIELDS, "speed_alone", "speed_in_batch"]
    result = read_result(tmp_path / "rules.json")
    assert result.rows == shown["rows"] and result.settings["samples_alone"] == 2
    assert result.command == (f"OMP_NUM_THREADS=1 mrp {line} --device cpu --json",)


def test_the_commands_table_names_what_the_answers_are_compared_with(capsys):
    line = "bench rules code --rules sequential --speculation graph-4 --samples 1 --batch-size 1 --samples-alone 1"
    assert main([*line.split(), "--device", "cpu"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "same as rule alone" in heading
    assert [line.split()[0] for line in lines] == ["static", "static+graph-4", "sequential", "sequential+graph-4"]
    assert all(line.split()[1] == "-" and "100.0%" in line for line in lines)


def test_bad_numbers_and_models_are_named(capsys):
    assert main(["bench", "rules", "words", "--samples-alone", "0"]) == 2
    assert "--samples-alone must be at least 1, got 0" in capsys.readouterr().err
    assert main(["bench", "rules", "verse"]) == 2
    assert "'verse' is not an embedded checkpoint" in capsys.readouterr().err

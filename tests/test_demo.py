"""`mrp demo`: the preset of an evaluation, its closing sentence, and the answer that is shown as it is decoded."""

import json

import pytest
import torch

from hub_cards.tasks.tasks import TASKS
from mrp_trainer.commands.demo import conclusion, demo, task_of
from mrp_trainer.evaluation.modes import DEMO_MODES

TASK = TASKS["words"]


@pytest.fixture
def few_modes(monkeypatch):
    monkeypatch.setattr("mrp_trainer.evaluation.task_evaluation.DEMO_MODES", ("static", "graph-8", "dynamic-0.5"))


def test_the_table_has_a_row_per_mode_and_the_sentence_says_what_it_shows(capsys, few_modes):
    demo(samples=3)
    printed = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed if line.startswith("| ")]
    assert cells[0] == ["mode", "accuracy", "tokens/forward", "forwards", "time ratio", "identical"]
    static, spec, _ = (dict(zip(cells[0], row, strict=True)) for row in cells[2:])
    assert (static["mode"], spec["mode"], spec["identical"]) == ("static", "graph-8", "100.0%")
    (sentence,) = [line for line in printed if line.startswith("graph-8 returned")]
    saved = int(static["forwards"]) / int(spec["forwards"])
    assert f"static's text in 100% of the answers with {saved:.2f}x fewer forwards of the backbone" in sentence
    assert printed[-1].endswith("forwards of the backbone") and printed[-2].startswith("answer  ")


def test_json_rows_are_those_of_the_table(capsys, few_modes):
    demo(samples=3, json=True)
    static, spec, dynamic = json.loads(capsys.readouterr().out)["rows"]
    assert list(static) == [
        *("name", "accuracy", "tokens_per_forward", "backbone_forwards", "wall_clock_ratio", "identical"),
    ]
    assert (static["name"], static["wall_clock_ratio"], static["identical"]) == ("static", 1.0, 1.0)
    assert spec["accuracy"] == static["accuracy"] and spec["backbone_forwards"] < static["backbone_forwards"]
    assert dynamic["tokens_per_forward"] > static["tokens_per_forward"]


def test_json_holds_the_note_on_samples_that_are_left_out(capsys, monkeypatch, few_modes):
    """Only the heading of the table said that some samples were missing."""
    for note, shown in (("2 of 5 are left out", "2 of 5 are left out"), ("", None)):
        monkeypatch.setattr(type(TASK), "note", lambda self, split, count, note=note: note)
        demo(samples=2, json=True)
        assert json.loads(capsys.readouterr().out)["note"] == shown


def test_one_sample_and_one_thread_are_singular(capsys, few_modes):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        demo(samples=1, batch_size=1)
    finally:
        torch.set_num_threads(threads)
    assert ": 1 held-out sample, greedy, batches of 1, 1 CPU thread, float32" in capsys.readouterr().out


def test_a_task_that_cannot_tell_right_from_wrong_has_no_accuracy(capsys, monkeypatch, few_modes):
    monkeypatch.setattr(type(TASK), "right_when", None)
    demo(samples=2)
    printed = capsys.readouterr().out
    assert "accuracy" not in printed and "dynamic-0.5" in printed and "100.0%" in printed


@pytest.mark.parametrize(
    "shown, expected",
    [
        ((100, 2.0, 1.0), "static's text in 100% of the answers with 2.00x fewer forwards of the backbone; on this "
                          "CPU it took 0.50x the time."),
        ((250, 0.8, 0.9996), "in 99.9% of the answers with 1.25x as many forwards of the backbone; on this CPU it "
                             "took 1.25x the time."),
    ],
)  # fmt: skip
def test_the_closing_sentence_follows_from_the_rows(shown, expected):
    names = "forwards", "time_ratio", "identical"
    rows = [{"mode": "static", "forwards": 200, "time_ratio": 1.0, "identical": 1.0}]
    rows.append({"mode": "graph-8"} | dict(zip(names, shown, strict=True)))
    assert conclusion(rows).endswith(expected)
    rows.append({"mode": "auto", "forwards": 150, "time_ratio": 1.6, "identical": 1.0})
    assert conclusion(rows).endswith(f"{expected} auto, the default, which drafts only as far as it pays, took 0.62x.")


def test_the_modes_keep_the_names_that_readers_of_the_json_know():
    assert list(DEMO_MODES) == [
        *("static", "static-2", "static-4", "spec-2", "spec-3", "spec-4", "spec-4-self", "spec-4-token"),
        *(
            "spec-8-token",
            "graph-4",
            "graph-8",
            "auto",
            "direct-1",
            "direct-2",
            "direct-3",
            "dynamic-0.9",
            "dynamic-0.7",
            "dynamic-0.5",
        ),
        *("remask-leave_one_out", "remask-confidence", "remask-residual"),
    ]


def test_a_prompt_of_the_users_is_answered_as_it_is_decoded(capsys):
    demo(prompt="Tom has 23 apples, buys 14. How many?")
    printed = capsys.readouterr().out
    assert "drafts" in printed and "·" in printed
    assert "37" in printed.splitlines()[-2]


def test_a_function_of_the_users_is_completed(capsys):
    demo(model="code", prompt="def name(self):")
    assert "return self" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["words", "sdar-tiny-mrp"])
def test_a_checkpoint_is_known_by_either_name(name):
    assert task_of(name) is TASK


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"model": "verse"}, "'verse'.*words .sdar-tiny-mrp."),
        ({"prompt": "Tom has 23 zebras, buys 14. How many?"}, "does not know: zebras"),
        ({"samples": 0}, "--samples must be at least 1, got 0"),
        ({"batch_size": -1}, "--batch-size must be at least 1, got -1"),
    ],
)
def test_bad_options_are_named(options, expected):
    with pytest.raises(ValueError, match=expected):
        demo(**options)

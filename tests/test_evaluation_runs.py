"""A run of `evaluate`: its data, resuming it after a kill, and the folders that it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from mrp_trainer.evaluation.modes import grid
from mrp_trainer.evaluation.runs import Settings, evaluate, read_eval_rows

ROWS = [{"prompt": f"what is {word} ?", "answer": word} for word in ("one", "two", "three", "two", "two")]
MODES = grid(["spec", "dynamic"], [0.5], [3], block_size=4)


def first_is_odd(text, row):
    return len(text) % 2


@pytest.fixture
def setup(tiny_model, word_tokenizer):
    return tiny_model(), word_tokenizer


def timeless(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def settings(**changes):
    values = {"modes": MODES, "scorer": "odd", "max_new_tokens": 6, "batch_size": 2, "seed": 5}
    return Settings(**values | changes)


SAMPLED = {"do_sample": True, "temperature": 1.0}  # equal prompts in one batch draw different samples


class Killed(BaseException):
    pass


def test_a_run_that_was_killed_while_scoring_is_resumed_with_the_same_results(setup, tmp_path):
    whole = evaluate(*setup, ROWS, first_is_odd, settings(options=SAMPLED), tmp_path / "whole")
    calls = []

    def killed_at_the_eighth(text, row):
        calls.append(text)
        if len(calls) == 8:  # the first of two in the last full batch of the second mode
            raise Killed
        return first_is_odd(text, row)

    with pytest.raises(Killed):
        evaluate(*setup, ROWS, killed_at_the_eighth, settings(options=SAMPLED), tmp_path / "cut")
    path = tmp_path / "cut" / "results.jsonl"
    kept = path.read_bytes()
    assert kept.count(b"\n") == 7
    path.write_bytes(kept + b'{"mode": "spec-3", "ind')  # half a line
    rest = []

    def counting(text, row):
        rest.append(text)
        return first_is_odd(text, row)

    resumed = evaluate(*setup, ROWS, counting, settings(options=SAMPLED), tmp_path / "cut")
    assert timeless(resumed) == timeless(whole)
    assert len(rest) == len(ROWS) * len(MODES) - 7
    assert path.read_bytes().startswith(kept)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert timeless(lines) == timeless(whole)


def test_a_finished_run_decodes_nothing_again(setup, tmp_path, monkeypatch):
    first = evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)
    monkeypatch.setattr("mrp_trainer.evaluation.runs.decode_batch", None)
    assert evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path) == first


def test_a_folder_with_another_run_is_refused_and_the_difference_named(setup, tiny_model, tmp_path):
    model, tokenizer = setup
    one_mode = settings(modes={"static": {"mrp_mode": None}}, max_new_tokens=1)
    evaluate(model, tokenizer, ROWS[:2], first_is_odd, one_mode, tmp_path)
    for rows, ours, changed, part in (
        (ROWS[:2], model, replace(one_mode, max_new_tokens=2), "settings.max_new_tokens"),
        (ROWS[1:3], model, one_mode, "prompts.sha256"),
        (ROWS[:2], tiny_model(seed=1), one_mode, "model.backbone_hash, model.head_hash"),
    ):
        with pytest.raises(ValueError, match=f"differs in {part}:"):
            evaluate(ours, tokenizer, rows, first_is_odd, changed, tmp_path)


def test_the_manifest_says_what_was_run(setup, tmp_path):
    evaluate(*setup, ROWS[:1], first_is_odd, settings(modes={"static": {"mrp_mode": None}}), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["settings"]["seed"] == 5
    assert manifest["settings"]["modes"] == {"static": {"mrp_mode": None}}
    assert manifest["prompts"]["count"] == 1
    assert manifest["machine"]["device"] == "cpu"


def test_a_run_that_failed_before_its_first_result_does_not_occupy_the_folder(setup, tmp_path):
    with pytest.raises(ValueError, match="scorer 'x' failed on row 1 of the data: KeyError"):
        evaluate(*setup, ROWS, lambda text, row: row["none"], settings(scorer="x"), tmp_path)
    assert (tmp_path / "manifest.json").exists()
    records = evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)
    assert records and json.loads((tmp_path / "manifest.json").read_text())["settings"]["scorer"] != "x"


def test_a_damaged_result_is_named(setup, tmp_path):
    evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)
    (tmp_path / "results.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match="results.jsonl is damaged .*choose another output folder"):
        evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)


def test_a_score_outside_0_to_1_is_refused(setup, tmp_path):
    with pytest.raises(ValueError, match=r"scorer 'odd' must return a bool or a share in 0..1, got 2"):
        evaluate(*setup, ROWS, lambda text, row: 2, settings(), tmp_path)


def test_a_mode_that_the_checkpoint_cannot_run_is_refused_before_anything_is_decoded(
    tiny_model, word_tokenizer, tmp_path
):
    with pytest.raises(ValueError, match="needs a residual head"):
        evaluate(tiny_model(num_mrp_layers=0), word_tokenizer, ROWS, first_is_odd, settings(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_a_folder_the_records_are_those_of_a_run_with_one(setup, tmp_path, monkeypatch):
    kept = evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    assert timeless(evaluate(*setup, ROWS, first_is_odd, settings())) == timeless(kept)
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}


def test_without_a_scorer_there_are_no_scores(setup):
    records = evaluate(*setup, ROWS[:1], None, settings())
    assert [record["score"] for record in records] == [None] * len(MODES)


@pytest.mark.parametrize(
    "content, expected",
    [
        ('{"prompt": "a"}\n{"prompt"\n', r"data.jsonl, line 2, column 10: not valid JSON \(Expecting ':' delimiter\)"),
        ('{"prompt": "a"}\n\n{"question": "b"}\n', "line 3: expected an object with 'prompt' or 'messages'"),
        ("[1]\n", "row 1: expected an object"),
        ("1\n", "line 1: expected an object"),
        ("\n", "holds no rows"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, expected):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=expected):
        read_eval_rows(path)

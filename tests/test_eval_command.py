"""The command `mrp eval`."""

import json

import pytest
from transformers import AutoTokenizer

from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.commands.cli import main
from mrp_trainer.evaluation.decoding import decode_batch, prompt_ids
from mrp_trainer.evaluation.summary import summarise

ROWS = [{"prompt": f"what is {word} ?", "answer": word} for word in ("one", "two", "three", "two", "two")]


@pytest.fixture
def folder(tiny_model, word_tokenizer, tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "odd_scorer.py").write_text("def score(text, row):\n    return len(text) % 2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = ["eval", "model", "--data", "data.jsonl", "--scorer", "odd_scorer:score", "--max-new-tokens", "4"]


def test_the_command_writes_and_prints_the_summary_and_does_it_again(folder, capsys):
    command = [
        *COMMAND,
        "--modes",
        "spec",
        "--steps",
        "2",
        "--compare",
        "--thresholds",
        "0.5",
        "--limit",
        "3",
        "--json",
    ]
    assert main(command) == 0
    summary = json.loads(capsys.readouterr().out)
    modes = ["static", "spec-2", "static-2", "static-4", "dynamic-0.5", "wide-narrow-0.5", "spec-2-self"]
    assert [row["mode"] for row in summary["rows"]] == modes
    assert summary["rows"][1]["identical"] == summary["rows"][6]["identical"] == 1.0
    assert len(summary["kl"]["before"]) == len(summary["kl"]["after"]) >= 1
    out = folder / "eval-model"
    assert json.loads((out / "summary.json").read_text()) == summary
    written = {path.name for path in out.iterdir()}
    assert {"results.jsonl", "manifest.json", "summary.md", "frontier.png", "frontier.svg", "kl.png"} <= written
    assert main([*command, "--no-plots"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_a_full_head_runs_the_modes_that_a_head_drafts_in_the_same_table(tiny_model, folder, capsys):
    full = tiny_model(mrp_residual=False)
    save_head(full, folder / "head")
    command = [*COMMAND, "--full-head", "head", "--no-plots", "--json", "--steps", "2", "--thresholds", "0.5"]
    assert main([*command, "--compare"]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [mode for mode in rows if mode.endswith("-full")] == ["spec-2-full", "direct-2-full"]
    assert rows["spec-2-full"]["identical"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = [prompt_ids(tokenizer, row) for row in ROWS]
    expected = decode_batch(full, prompts, {"mrp_mode": "direct", "mrp_steps": 2}, max_new_tokens=4)
    assert rows["direct-2-full"]["forwards"] == sum(answer.forwards for answer in expected)
    records = [json.loads(line) for line in (folder / "eval-model/full-head/results.jsonl").read_text().splitlines()]
    found = [record["token_ids"] for record in records if record["mode"] == "direct-2"]
    assert found == [answer.token_ids for answer in expected]
    assert main([*command, "--modes", "dynamic"]) == 2
    assert "the grid holds neither direct nor spec drafted by a head" in capsys.readouterr().err


def test_a_grid_of_ones_own_and_options_for_all_modes(folder, capsys):
    (folder / "grid.yaml").write_text("slow: {}\ndeep: {mrp_mode: spec, mrp_steps: 4, mrp_draft_threshold: 0.1}\n")
    assert main([*COMMAND, "--grid", "grid.yaml", "--no-plots", "--limit", "2", "--suppress_tokens", "[5]"]) == 0
    assert "| deep " in capsys.readouterr().out
    records = [json.loads(line) for line in (folder / "eval-model" / "results.jsonl").read_text().splitlines()]
    assert [record["mode"] for record in records] == ["slow", "slow", "deep", "deep"]
    assert all(5 not in record["token_ids"] for record in records)


def test_a_checkpoint_without_a_head_runs_the_modes_that_need_none(tiny_model, folder, capsys):
    tiny_model(num_mrp_layers=0).save_pretrained(folder / "model")
    assert main([*COMMAND, "--steps", "2", "--thresholds", "0.5", "--no-plots", "--limit", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    modes = ["static", "static-2", "static-4", "dynamic-0.5", "wide-narrow-0.5", "spec-2-self"]
    assert [row["mode"] for row in summary["rows"]] == modes
    assert "kl" not in summary


def test_the_command_calibrates_and_stores(folder, capsys):
    (folder / "odd_scorer.py").write_text("def score(text, row):\n    return 1\n")
    assert main([*COMMAND, "--calibrate", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((folder / "model" / "config.json").read_text())["calibrated_remask_threshold"]
    assert printed == {"calibrated_remask_threshold": stored, "prompts": 2}
    assert stored in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize("dtype, shown", [("bfloat16", True), ("float32", False)])
def test_a_lossless_mode_that_differs_in_half_precision_points_to_verify(folder, capsys, monkeypatch, dtype, shown):
    def differing(*arguments):
        summary = summarise(*arguments)
        return summary | {"rows": [row | {"identical": 0.5} for row in summary["rows"]]}

    monkeypatch.setattr("mrp_trainer.evaluation.summary.summarise", differing)
    command = [
        *COMMAND,
        "--modes",
        "spec,spec-token,direct,sequential+spec-2",
        "--steps",
        "2",
        "--no-plots",
        "--limit",
        "1",
    ]
    assert main([*command, "--dtype", dtype]) == 0
    expected = "spec-2: not all identical, in bfloat16; `mrp verify` tells whether rounding is the reason"
    for text in (capsys.readouterr().out, (folder / "eval-model" / "summary.md").read_text()):
        assert (expected in text.splitlines()) == shown and ("mrp verify" in text) == shown


@pytest.mark.parametrize(
    "extra, expected",
    [
        (["--steps", "two"], "Invalid value for '--steps'"),
        (["--modes", "sepc"], "Did you mean 'spec'"),
        (["--skip", "9"], "no row of data.jsonl is left: --skip 9, --limit None"),
        (["--mrp_mode", "spec"], "options holds mrp_mode"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--pad-token-id", "5"], "--pad_token_id cannot be set here; use --max-new-tokens or --batch-size"),
        (["--grid", "grid.yaml", "--compare"], "--grid grid.yaml lists the modes itself: leave --compare out"),
        (["--grid", "broken.yaml"], "--grid broken.yaml is not valid YAML"),
        (["--calibrate", "2", "--limit", "1"], "leave --limit out"),
        (["--calibrate", "2", "--record", "r.json"], "config.json alone: leave --record out"),
        (["--calibrate", "2", "--no-plots"], "leave --plots out"),
        (["--calibrate", "2", "--modes", "spec"], "leave --modes out"),
        (["--calibrate", "2", "--head", "head"], "leave --head out (mrp convert --head"),
        (["--device", "xpu9"], "--device xpu9 cannot be used here"),
    ],
)
def test_bad_arguments_end_with_one_line(folder, capsys, extra, expected):
    (folder / "broken.yaml").write_text("a: [")
    assert main([*COMMAND, *extra]) == 2
    assert expected in capsys.readouterr().err

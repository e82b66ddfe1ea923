"""`--record FILE`: the file of every measuring command is a complete result that the documents can show."""

import json
import shlex

import pytest

from hub_cards.build import result_tables as tables
from mrp_trainer.benchmarks import shapes as bench
from mrp_trainer.commands.cli import main
from mrp_trainer.evaluation.results import read_result

TINY = bench.Shape(4, 32, 64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=61)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A function that runs `mrp` with a command line and `--record`, in an empty folder, and returns the result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(line):
        assert main([*shlex.split(line), "--record", "results/new.json"]) == 0
        result = read_result("results/new.json")
        assert result.command == (f"mrp {line}",)
        assert result.origin is None
        return result

    return run


@pytest.fixture
def model(tiny_model, word_tokenizer, tmp_path):
    """A tiny checkpoint in the folder `model` and data for it in `data.jsonl`; returns the folder's name."""
    tiny_model().save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"what is {word} ?", "answer": word} for word in ("one", "two", "three")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "model"


def test_demo(record, capsys):
    result = record("demo --samples 2")
    assert (result.settings["model"], result.settings["samples"]) == ("words", 2)
    shown = {line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    assert {row["name"] for row in result.rows} == shown - {"mode", "--------------------"}
    assert tables.demo_table(result.rows).count("\n") == len(result.rows) + 1


def test_eval(record, model, capsys):
    line = f"eval {model} --data data.jsonl --scorer exact --modes spec --steps 2 --max-new-tokens 4 --json --no-plots"
    result = record(f"{line} --limit 2")
    assert result.figures == json.loads(capsys.readouterr().out)
    assert result.settings["prompts"] == 2 and result.settings["scorer"] == "exact"
    assert "| spec-2 |" in tables.eval_table(result, {})


def test_claims(record, model, capsys):
    line = f"claims {model} --data data.jsonl --scorer exact --only lossless,similarity --max-new-tokens 4 --json"
    result = record(line)
    assert [row["name"] for row in result.rows] == ["lossless", "similarity"]
    assert result.rows == json.loads(capsys.readouterr().out)["rows"]
    assert "(`lossless`)" in tables.claims_table({"tiny": [result]})


def test_bench_decode(record, model, capsys):
    line = f"bench decode {model} --modes static spec-2 --batch-sizes 1 2 --prompt 'what is two ?' --max-new-tokens 4"
    result = record(f"{line} --repeats 1 --json")
    assert [(row["mode"], row["batch_size"]) for row in result.rows] == [
        ("static", 1), ("spec-2", 1), ("static", 2), ("spec-2", 2),
    ]  # fmt: skip
    assert result.rows == json.loads(capsys.readouterr().out)["rows"]
    assert "| static | 1.00 / 1.00 |" in tables.decode_table({"tiny": result})


def test_bench_shapes(record, monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    line = "bench shapes --shapes tiny --batch-sizes 1 --candidates 1 2 --repeats 1 --block-size 4 --context 8"
    result = record(f"{line} --layers 1 --dtype float32")
    assert [row["candidates"] for row in result.rows] == [1, 2] and result.figures["accepted"] is None
    assert "| TINY | 1 |" in tables.shapes_table([result])


def test_bench_loss(record, monkeypatch):
    monkeypatch.setattr("torch.compile", lambda function: function)  # compiling takes longer than all the rest
    result = record("bench loss --rows 4 --vocab-size 100 --hidden-size 8 --repeats 1 --device cpu")
    by_name = {row["name"]: row for row in result.rows}
    assert by_name["naive"]["time_ratio"] == 1 and by_name["ours"]["memory_ratio"] > 0
    assert "CUDA" in by_name["liger"]["note"]
    assert "| naive | 1.00 | 1.000 |" in tables.loss_table(result)


def test_bench_train(record, model):
    result = record(
        f"bench train {model} --rows 2 --sequence-length 8 --unroll-steps 2 --repeats 1 --choice-weight 0.1"
    )
    (row,) = result.rows
    assert row["tokens"] == 16 and row["ratio"] > 0
    assert f"| 0.1 | {row['ratio']:.2f} |" in tables.train_table([result])


def test_a_measurement_that_fails_leaves_the_file_of_an_earlier_one(record, model):
    record(f"bench decode {model} --modes static --batch-sizes 1 --prompt two --max-new-tokens 4 --repeats 1")
    before = read_result("results/new.json")
    assert main(["bench", "decode", model, "--modes", "no-mode", "--record", "results/new.json"]) == 2
    assert read_result("results/new.json") == before

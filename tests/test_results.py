"""Result files, and the documents whose figures must be those of the result files."""

import json
import platform
import re
import shutil
import socket
from datetime import date
from pathlib import Path

import pytest
import torch

from hub_cards.build import figure, results
from hub_cards.build.result_tables import (
    heads_table,
    loss_table,
    recipe_text,
    rules_table,
    settings_text,
    shapes_table,
    span,
)
from mrp_trainer.evaluation.results import SCHEMAS, command_line, read_result, write_result

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "hub_cards" / "results").glob("*.json"))
CARDS = ("hub_cards/sdar-tiny-mrp/README.md", "hub_cards/sdar-tiny-code-mrp/README.md")
ROW = {
    "name": "static",
    "accuracy": None,
    "tokens_per_forward": 0.5,
    "backbone_forwards": 7,
    "wall_clock_ratio": 1.0,
    "identical": 1.0,
}

SETTINGS = {
    "samples": 2,
    "samples_alone": 1,
    "batch_size": 100,
    "choice_weight": 0.0,
    "seed": 0,
}  # all that any schema wants


def write_demo(path, **changes):
    values = {
        "name": "demo",
        "command": "mrp demo --samples 2",
        "settings": SETTINGS,
        "figures": {"rows": [ROW]},
    }
    return write_result(path, **values | changes)


# --- writing and reading a result


def test_a_result_can_be_read_back(tmp_path):
    written = write_demo(tmp_path / "new" / "demo.json")
    assert read_result(tmp_path / "new" / "demo.json") == written
    assert written.rows == [ROW] and written.command == ("mrp demo --samples 2",)
    assert written.origin is None


def test_a_result_names_versions_machine_and_date(tmp_path):
    written = write_demo(tmp_path / "demo.json")
    assert written.versions["torch"] == torch.__version__
    assert written.versions["python"] == platform.python_version()
    assert set(written.versions) == {"python", "torch", "transformers", "mrp-diffusion"}
    assert written.machine["device"] == "cpu" and written.machine["threads"] == torch.get_num_threads()
    assert written.date == date.today().isoformat()


def test_a_result_names_neither_host_nor_folders_of_the_machine(tmp_path):
    settings = {"data": tmp_path / "problems" / "test.jsonl", "head": "~/heads/best", "url": "https://example.org/a/b"}
    command = f"mrp eval sdar-tiny-mrp --data {tmp_path}/problems/test.jsonl --head=/srv/heads/full --output out/x"
    write_demo(
        tmp_path / "demo.json", settings=SETTINGS | settings | {"dtype": torch.float32}, command=["cd out/x", command]
    )
    text = (tmp_path / "demo.json").read_text()
    assert str(tmp_path) not in text and "/srv" not in text and socket.gethostname() not in text
    result = read_result(tmp_path / "demo.json")
    assert result.settings == SETTINGS | {
        "data": "test.jsonl",
        "head": "best",
        "url": "https://example.org/a/b",
        "dtype": "torch.float32",
    }
    assert result.command == ("cd out/x", "mrp eval sdar-tiny-mrp --data test.jsonl --head=full --output out/x")


def test_an_unknown_result_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="unknown result 'demos'; expected one of demo, eval"):
        write_demo(tmp_path / "demo.json", name="demos")
    assert not (tmp_path / "demo.json").exists()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_row_that_lacks_a_field_is_refused(tmp_path, name):
    further = dict.fromkeys(SCHEMAS[name].figures, "")
    row = dict.fromkeys(SCHEMAS[name].row, 1)
    write_demo(tmp_path / "whole.json", name=name, figures=further | {"rows": [row, row]})
    part = dict(row)
    missing = part.popitem()[0]
    with pytest.raises(ValueError, match=f"a row of {name} must have {missing}, got"):
        write_demo(tmp_path / "part.json", name=name, figures=further | {"rows": [row, part | {"other": 1}]})


@pytest.mark.parametrize("name", [name for name, schema in SCHEMAS.items() if schema.figures])
def test_a_missing_figure_is_refused(tmp_path, name):
    with pytest.raises(
        ValueError, match=f"the figures of {name} must have {', '.join(SCHEMAS[name].figures)}, got rows"
    ):
        write_demo(tmp_path / "part.json", name=name, figures={"rows": [dict.fromkeys(SCHEMAS[name].row, 1)]})


def test_a_missing_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the settings of demo must have batch_size, got samples"):
        write_demo(tmp_path / "demo.json", settings={"samples": 2})


def test_a_result_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="have no rows"):
        write_demo(tmp_path / "demo.json", figures={"rows": []})


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "demo"}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "demo.json").write_text(text)
    with pytest.raises(ValueError, match="demo.json is not a result file"):
        read_result(tmp_path / "demo.json")


def test_the_recorded_command_can_be_typed_again(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments = ["--prompt", "two words", "--record", "out.json", "--samples", "2", "--record=out.json"]
    assert command_line("mrp demo", arguments) == "mrp demo --prompt 'two words' --samples 2"
    assert command_line("mrp demo", []) == "mrp demo"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert command_line("mrp demo", []) == "OMP_NUM_THREADS=1 mrp demo"


# --- tables


def test_settings_are_listed_without_those_that_say_nothing():
    settings = {"raw": False, "ignore_eos": True, "head": None, "prompt": [], "seed": 0, "batch_sizes": [1, 4]}
    assert settings_text(settings | {"machine": "a CPU"}) == "ignore eos, seed 0, batch sizes 1 4"


def test_a_range_shows_one_value_when_both_ends_look_the_same():
    assert span([1.08, 0.49], ".2f") == "0.49 to 1.08"
    assert span([0.491, None, 0.492], ".2f") == "0.49"
    assert span([None], ".2f") == ""


def test_the_loss_table_unites_the_runs_of_an_implementation(tmp_path):
    rows = [
        {"name": "ours", "time_ratio": 0.5, "memory_ratio": 0.1, "note": None},
        {"name": "ours", "time_ratio": 1.0, "memory_ratio": 0.1, "note": None},
        {"name": "liger", "time_ratio": None, "memory_ratio": None, "note": "its kernels need a CUDA device"},
    ]
    result = write_demo(tmp_path / "loss.json", name="bench loss", figures={"rows": rows})
    lines = loss_table(result).splitlines()
    assert lines[2:] == ["| ours | 0.50 to 1.00 | 0.100 |  |", "| liger |  |  | its kernels need a CUDA device |"]


def test_the_shapes_table_has_a_line_for_each_shape_and_batch_size(tmp_path):
    row = {"shape": "4b", "batch_size": 1, "step_seconds": 2.0, "head_step_ratio": 0.1, "forwards_saved": 1.5}
    speedups = {2: 0.5, 4: None}  # no acceptance rate is known for the deeper drafts
    rows = [row | {"candidates": k, "verification_ratio": 1 + k / 10, "speedup": speedups[k]} for k in speedups]
    result = write_demo(tmp_path / "shapes.json", name="bench shapes", figures={"rows": rows, "accepted": [0.5]})
    assert shapes_table([result]).splitlines()[2:] == ["| 4B | 1 | 2.00 s | 10.0% | 1.20 / 1.40 | 0.50 / - |"]


def test_the_heads_table_groups_modes_by_task_and_acceptance(tmp_path):
    saved = {"spec-2": 1.5, "spec-4": 1.75, "spec-4-token": 2.0}
    row = {"head": "without a head", "recipe": None, "forwards_saved": saved}
    result = write_demo(tmp_path / "heads.json", name="compare_heads", figures={"rows": [row]})
    header, _, line = heads_table({"words": result}).splitlines()
    assert header == "| head | trained with | words, exact, K = 2 / 4 | words, token, K = 4 |"
    assert line == "| without a head |  | 1.50 / 1.75 | 2.00 |"


RULE_ROWS = [  # mode, forwards, same_as_rule, speed_alone, speed_in_batch
    ("static", 120, 1.0, 1.0, 1.0),
    ("static+graph-4", 60, 1.0, 1.5, 0.75),
    ("static+graph-8", 40, 1.0, 2.0, 0.25),
    ("dynamic-0.9", 80, 1.0, 1.25, 1.5),
    ("dynamic-0.9+graph-4", 30, 0.99, 1.75, 0.5),
    ("dynamic-0.9+graph-8", 20, 0.97, 2.5, 0.75),
]


@pytest.mark.parametrize("accuracy", [0.5, None])
def test_the_rules_table_has_a_line_for_each_rule(tmp_path, accuracy):
    fields = "mode", "backbone_forwards", "same_as_rule", "speed_alone", "speed_in_batch"
    rows = [
        dict(zip(fields, row, strict=True)) | {"rule": row[0].split("+")[0], "accuracy": accuracy} for row in RULE_ROWS
    ]
    result = write_demo(tmp_path / "rules.json", name="bench rules", figures={"rows": rows})
    header, _, *lines = rules_table(result).splitlines()
    assert header.startswith("| rule: alone / graph-4 / graph-8 |") and header.endswith(
        "| speed, 100 rows at a time |"
    )
    cell = "" if accuracy is None else " 0.500 |"
    assert lines == [
        f"| static |{cell} 120 / 60 / 40 | 1.00 / 2.00 / 3.00 | 100.0% | 1.00 / 1.50 / 2.00 | 1.00 / 0.75 / 0.25 |",
        f"| dynamic-0.9 |{cell} 80 / 30 / 20 | 1.50 / 4.00 / 6.00 | 98.0% | 1.25 / 1.75 / 2.50 | 1.50 / 0.50 / 0.75 |",
    ]
    assert ("accuracy" in header) == (accuracy is not None)


def test_a_recipe_is_told_in_words():
    recipe = {"changes": {}, "visited": False, "fresh": True, "layers": 3, "residual": False, "after": None}
    assert recipe_text(recipe) == "fresh, 3 layers, random states, `mrp_residual: false`"
    changed = {"visited": True, "after": "fresh", "residual": True, "changes": {"choice_weight": 0.1}}
    assert recipe_text(recipe | changed) == "continues `fresh`, states that decoding visits, `choice_weight: 0.1`"


# --- the files and documents of this repository


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_result_file_is_complete(path):
    result = read_result(path)
    date.fromisoformat(result.date)
    assert result.command and result.settings and result.machine["device"] in ("cpu", "cuda")
    assert set(result.versions) == {"python", "torch", "transformers", "mrp-diffusion"}


def test_every_figure_was_measured_under_the_python_that_readme_names():
    assert "All figures were measured under Python 3.11." in (ROOT / "README.md").read_text().replace("\n", " ")
    assert {".".join(read_result(path).versions["python"].split(".")[:2]) for path in FILES} == {"3.11"}


def test_every_result_file_is_shown():
    page = (ROOT / "hub_cards" / "RESULTS.md").read_text()
    assert FILES and [path.name for path in FILES if f"(results/{path.name})" not in page] == []


def test_documents_show_the_figures_of_the_result_files(capsys):
    assert results.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def copied(tmp_path):
    """A copy of the result files and of the documents."""
    shutil.copytree(ROOT / "hub_cards" / "results", tmp_path / "hub_cards" / "results")
    for name in ("README.md", "hub_cards/RESULTS.md", *CARDS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_changed_figure_is_reported_and_then_written_wherever_it_is_quoted(copied, capsys):
    path = copied / "hub_cards" / "results" / "demo-words.json"
    values = json.loads(path.read_text())
    (row,) = [row for row in values["figures"]["rows"] if row["name"] == "graph-8"]
    row["backbone_forwards"] = 1234
    path.write_text(json.dumps(values))
    stale = {"README.md", "hub_cards/RESULTS.md", CARDS[0]}

    before = (copied / "README.md").read_text()
    assert results.main(["--check", "--root", str(copied)]) == 1
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == stale
    assert (copied / "README.md").read_text() == before

    assert results.main(["--root", str(copied)]) == 0
    assert all("1234" in (copied / name).read_text() for name in stale)
    assert f"with {7891 / 1234:.2f} times fewer backbone forwards" in (copied / "README.md").read_text()
    assert results.main(["--check", "--root", str(copied)]) == 0


def test_a_document_without_its_block_is_refused(copied):
    card = copied / CARDS[0]
    card.write_text(card.read_text().replace("<!-- results:card-words -->", ""))
    with pytest.raises(ValueError, match="must have the blocks card-words, got $"):
        results.main(["--root", str(copied)])


# Numbers of README outside the blocks that are written from result files, and what they are.
EXPLAINED = {
    "arXiv 2605.18817": "the paper",
    "2605.18817)": "its address",
    "Python 3.10": "the oldest Python",
    "Python 3.11": "the Python of the tests",
    "transformers 5.24.0": "tested version",
    "5.10.2 (the oldest": "tested version",
    "torch 2.13.0": "tested version",
    "transformers 4.57.6 and 5.0.0": "tested with remote code",
    "| 0.9, 0.1 |": "defaults",
    "`dynamic-0.9` reveals every token whose confidence exceeds 0.9": "what the mode means",
    '"token"; 0.9 |': "default",
    "1.7B and 8B": "sizes of SDAR",
    "Apache-2.0": "the licence",
}
# The same for the explanations in RESULTS.md.
EXPLAINED_IN_RESULTS = {
    "Python 3.11": "the Python of all measurements so far",
    "at least 0.9 confident": "the floor of token acceptance, the threshold of wide-narrow",
    "a confidence of 0.5": "the threshold of remask-C",
    "`dynamic-0.9`": "a mode",
    "`dynamic-0.9+graph-8`": "a mode",
}
FIGURE = re.compile(r"\d+\.\d+|\d+ ?%|\d+x\b|\d+(?:\.\d+)? times")


def without(text, known):
    """The text without its code blocks and without what is explained."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for part in known:
        assert part in text, f"{part} is no longer there to be explained"
        text = text.replace(part, "")
    return text


def test_readme_quotes_no_figure_outside_of_the_blocks():
    """Decimals, percentages and "N times" come from result files; the few others are versions and defaults."""
    prose = results.BLOCK.sub("", (ROOT / "README.md").read_text())
    assert FIGURE.findall(without(prose, EXPLAINED)) == []


def test_explanations_in_results_quote_no_figure_that_is_typed_by_hand():
    typed = re.sub(r"\$\w+", "", results.TEMPLATE.read_text())
    assert FIGURE.findall(without(typed, EXPLAINED_IN_RESULTS)) == []


def test_readme_states_the_settings_of_its_table():
    demo = read_result(ROOT / "hub_cards" / "results" / "demo-words.json")
    assert demo.machine["threads"] == 1
    assert f"{demo.settings['samples']} held-out word problems on one CPU thread" in (ROOT / "README.md").read_text()


def test_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 12288


def test_the_figure_is_what_its_script_draws():
    assert figure.FIGURE.read_text() == figure.figure(), "run python -m hub_cards.build.figure"
    assert "hub_cards/round.svg" in (ROOT / "README.md").read_text()


def test_no_document_names_a_folder_of_a_machine():
    texts = [path.read_text() for path in (*FILES, ROOT / "README.md", ROOT / "hub_cards" / "RESULTS.md")]
    assert not any(re.search(r"(?<![\w.)/-])/(home|root|tmp|work|Users)/", text) for text in texts)

"""Held-out samples: the data file for `mrp eval`, its scorer, and the references to the standard library."""

import json
import platform
import re

import pytest

from hub_cards.tasks.held_out import main, right
from hub_cards.tasks.python_functions import functions_in
from hub_cards.tasks.references import Reference, References
from hub_cards.tasks.tasks import TASKS, PythonFunctions
from mrp_trainer.commands.cli import main as mrp

CODE = TASKS["code"]


def test_every_row_holds_what_its_scorer_needs(capsys):
    main(["words", "--split", "validation", "--samples", "5"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 5
    assert all(right(row["answer"], row) for row in rows)
    assert not any(right(other["answer"], row) for row, other in zip(rows, rows[1:], strict=False))


def test_function_is_right_if_it_parses():
    row = {"task": "code", "prompt": "def f(x):"}
    assert right("\n    return x", row) and not right("\n    return (x", row)


def test_embedded_file_holds_unique_references_and_no_text():
    stored = json.loads((CODE.folder / "held_out.json").read_text(encoding="utf-8"))
    assert set(stored) == {"python", "splits"} and re.fullmatch(r"3\.\d+\.\d+", stored["python"])
    rows = [row for split in ("validation", "test") for row in stored["splits"][split]]
    assert [len(rows) for rows in stored["splits"].values()] == [200, 200]
    for row in rows:
        assert set(row) == {"file", "name", "sha256"}
        assert row["file"].endswith(".py") and row["name"].replace(".", "_").isidentifier()
        assert re.fullmatch("[0-9a-f]{64}", row["sha256"])
    assert len({tuple(row.values()) for row in rows}) == len(rows)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_reference_is_either_found_or_counted(split):
    found = CODE.held_out(split, 200)
    stored = {one.sha256: one for one in CODE.references.splits[split]}
    assert all((stored[one.sha256].file, stored[one.sha256].name) == (one.file, one.name) for one in found)
    assert len(found) + CODE.left_out(split, 200) == 200


@pytest.mark.skipif(platform.python_version() != CODE.references.python, reason="another version of the library")
@pytest.mark.parametrize("split", ["validation", "test"])
def test_same_python_finds_all_references_in_the_order_they_were_drawn(split):
    assert CODE.held_out(split, 200) == CODE.draw_held_out(split, 200)
    assert CODE.left_out(split, 200) == 0 and CODE.note(split, 200) == ""


LIBRARY = """
class Thing:
    @property
    def size(self):
        return self.stored

    @size.setter
    def size(self, value):
        self.stored = value

try:
    def outer(): return 1
finally:
    pass

def removed(): return 2

def changed(): return 3
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A code task with references to a small library of its own, which has changed since."""
    library, folder = tmp_path / "library", tmp_path / "checkpoint"
    library.mkdir()
    folder.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    (library / "first.py").write_text(LIBRARY)
    (library / "second.py").write_text("def gone(): return 4\n")
    drawn = [one for file in sorted(library.iterdir()) for one in functions_in(file)]
    (folder / "held_out.json").write_text(References.of({"test": drawn, "validation": drawn[-2:]}).to_json())
    changed = LIBRARY.replace("def removed(): return 2", "").replace("return 3", "return 4")
    (library / "first.py").write_text(changed)
    (library / "second.py").unlink()

    class SmallTask(PythonFunctions):
        pass

    SmallTask.folder = folder
    return SmallTask()


def test_references_distinguish_functions_of_one_name_by_their_hash(task):
    sizes = [one for one in task.held_out("test", 6) if one.name == "Thing.size"]
    assert [one.prompt for one in sizes] == ["def size(self):", "def size(self, value):"]


def test_missing_and_different_functions_are_left_out_and_counted(task):
    assert [one.name for one in task.held_out("test", 6)] == ["Thing.size", "Thing.size", "outer"]
    assert task.left_out("test", 6) == 3 and task.left_out("test", 4) == 1
    assert task.note("test", 3) == ""
    assert task.note("test", 200).startswith("3 of 6 held-out functions are missing or different in Python 3.")


def test_error_if_this_python_has_none_of_the_functions(task):
    with pytest.raises(ValueError, match="none of the first 2 validation functions"):
        task.held_out("validation", 2)


def test_command_reports_left_out_functions_on_standard_error(task, capsys, monkeypatch):
    monkeypatch.setitem(TASKS, "code", task)
    main(["code", "--samples", "6"])
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3 and "3 of 6 held-out functions" in printed.err


def test_references_survive_being_written_and_read(tmp_path):
    references = References("3.11.7", {"test": (Reference("a/b.py", "A.f", "0" * 64),), "validation": ()})
    (tmp_path / "held_out.json").write_text(references.to_json())
    assert References.read(tmp_path / "held_out.json") == references


def test_word_problems_leave_nothing_out():
    assert TASKS["words"].note("test", 200) == ""


@pytest.fixture
def one_missing(monkeypatch):
    """The code task as under a Python whose library lacks the first of its held-out functions."""
    first = CODE.references.splits["test"][0]
    found = Reference.find
    monkeypatch.setattr(Reference, "find", lambda self: None if self == first else found(self))
    assert CODE.left_out("test", 3) >= 1
    return CODE.note("test", 3)


@pytest.mark.parametrize("options", [[], ["--markdown"]])
def test_headings_of_claims_say_what_is_left_out(one_missing, capsys, options):
    command = ["claims", "code", "--prompts", "3", "--only", "similarity", "--max-new-tokens", "4", *options]
    assert mrp(command) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if one_missing in line]
    assert line.startswith(f"{len(CODE.held_out('test', 3))} prompts, greedy")


def test_heading_of_the_demo_says_what_is_left_out(one_missing, capsys, monkeypatch):
    monkeypatch.setattr("mrp_trainer.evaluation.task_evaluation.DEMO_MODES", ("static", "graph-8"))
    assert mrp(["demo", "--model", "code", "--samples", "3"]) == 0
    heading, note = capsys.readouterr().out.splitlines()[:2]
    assert f"{len(CODE.held_out('test', 3))} held-out samples" in heading and note == one_missing

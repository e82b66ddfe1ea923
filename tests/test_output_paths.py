"""Paths that a command will write to are checked before it loads anything."""

import errno
import os

import pytest

from mrp_trainer.checkpoints.output_paths import check_output
from mrp_trainer.commands.cli import main


def test_what_can_be_written_passes_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "old.json").write_text("mine")
    for path, folder in [("new/deeper", True), ("new/file.json", False), ("old.json", False), ("", True)]:
        check_output("--out", tmp_path / path, folder=folder)
    check_output("--out", None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "mine"


def test_a_folder_in_place_of_a_file_is_named_and_the_reverse(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--out: {tmp_path} is a folder, expected a file to write"):
        check_output("--out", tmp_path)
    with pytest.raises(ValueError, match=f"--out: {tmp_path / 'file'} is a file, expected a folder to write"):
        check_output("--out", tmp_path / "file", folder=True)


def test_the_reason_why_a_path_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/below cannot be written \(.*file: Not a directory\)"):
        check_output("--out", tmp_path / "file" / "below")

    def refuse(dir):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # a folder's permissions mean nothing to root
    with pytest.raises(ValueError, match=f"--out: {tmp_path}/a/b cannot be written \\({tmp_path}: Permission denied"):
        check_output("--out", tmp_path / "a" / "b", folder=True)


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "no/such/model", "OUT"],
        ["trajectories", "no/such/model", "--data", "a.jsonl", "--out", "OUT.parquet"],
        ["eval", "no/such/model", "--data", "DATA", "--scorer", "exact", "--output", "OUT"],
        ["claims", "no/such/model", "--data", "DATA", "--scorer", "exact", "--output", "OUT"],
        ["demo", "--record", "OUT.json"],
        ["bench", "decode", "no/such/model", "--record", "OUT.json"],
        ["train", "--base-model", "no/such/model", "--train-data", "DATA", "--output-dir", "OUT"],
    ],
)
def test_every_command_says_so_before_it_looks_for_its_model(tmp_path, capsys, words):
    """The model was loaded, and decoded with, before the first attempt to write; and the error blamed the name."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    (tmp_path / "file").touch()
    names = {"OUT": str(tmp_path / "file" / "out"), "DATA": str(tmp_path / "data.jsonl")}
    argv = [names.get(word, word.replace("OUT", names["OUT"])) for word in words]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written" in line and "Not a directory" in line

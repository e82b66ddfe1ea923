"""Files that are written whole or not at all, and checksums that reveal every kind of damage."""

import os

import pytest
from damage import DAMAGE, damage, snapshot

from mrp_trainer.checkpoints.durable import MANIFEST, damaged_files, seal, staged, unseal, write_text


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_to_a_sealed_folder_is_named(tmp_path, kind):
    folder = tmp_path / "checkpoint"
    (folder / "nested").mkdir(parents=True)
    names = ["weights.bin", "nested/state.json"]
    for name in names:
        (folder / name).write_bytes(b"some content of a file")
    assert damaged_files(folder) == [MANIFEST]  # not sealed yet
    seal(folder)
    assert damaged_files(folder) == []
    whole = snapshot(folder)
    for name in [*names, MANIFEST]:
        damage(folder / name, kind)
        # a byte after the end of the manifest, or a lost line feed, leaves its JSON as it was
        harmless = name == MANIFEST and kind == "cut by a byte"
        assert damaged_files(folder) == ([] if harmless else [name])
        (folder / name).write_bytes(whole[name])


def test_error_while_writing_leaves_the_old_files(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="disk full"), staged(tmp_path) as staging:
        (staging / "a").write_text("new")
        raise OSError("disk full")
    assert snapshot(tmp_path) == {"a": b"old"}


def test_staged_files_replace_the_old_ones_and_leave_the_others(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("other")
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".saving" / "rest").write_text("left by a process that was killed")
    with staged(tmp_path) as staging:
        (staging / "a").write_text("new")
        (staging / "c").mkdir()
        (staging / "c" / "d").write_text("nested")
        assert (tmp_path / "a").read_text() == "old"
    assert snapshot(tmp_path) == {"a": b"new", "b": b"other", "c/d": b"nested"}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_text_file_keeps_its_old_content_if_the_new_one_cannot_be_written(tmp_path, monkeypatch, fails):
    path = tmp_path / "file"
    write_text(path, "old é\n")

    def full(*args):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(OSError, match="no space left"):
            write_text(path, "new")
    assert snapshot(tmp_path) == {"file": "old é\n".encode()}


def test_text_goes_through_a_link_and_into_a_pipe(tmp_path):
    write_text(tmp_path / "target", "old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    write_text("/dev/null", "nothing")
    assert not os.path.isfile("/dev/null")


def test_folder_that_is_being_removed_counts_as_unfinished(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"content")
    seal(folder)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: None)  # killed before it began
        unseal(folder)
    assert damaged_files(folder) == [MANIFEST]
    unseal(folder)
    unseal(folder)  # not there: nothing to do
    assert list(tmp_path.iterdir()) == []

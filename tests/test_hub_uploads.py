"""Uploads of a training run: the head's files alone, and failures that cost nothing."""

import logging

import pytest
from golden_checkpoints import BLOCK4
from local_hub import LocalHub
from train_runs import TRAIN, checkpoints, head, run, same

from mrp_trainer import MRPTrainingArguments, hub_uploads
from mrp_trainer.checkpoints.run_record import read_record
from mrp_trainer.train import main

SENT = {"mrp_head.safetensors", "mrp_head_config.json", "README.md"}
SENT |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.slow
def test_every_save_uploads_the_files_of_the_head_and_nothing_else(project, tmp_path):
    """transformers uploads whatever lies in output_dir: its training arguments, the run's record, the user's files."""
    (tmp_path / "run" / "notes").mkdir(parents=True)
    for name in (".env", "optimizer.pt", "notes/draft.txt"):
        (tmp_path / "run" / name).write_text("private")
    with LocalHub() as hub:
        hub.commit("me/head", {"model.safetensors": b"theirs", "modeling.py": b"theirs"})
        config = project(max_steps=2, save_steps=1, push_to_hub=True, hub_model_id="me/head", hub_always_push=True)
        run(*TRAIN, config, **hub.environment(tmp_path / "cache"))
    before, *commits = hub.repositories["me/head"]
    assert len(commits) == 3  # one for each save, and the last with the card
    for commit in commits:
        assert commit.files.keys() - SENT == before.files.keys()
    assert commits[-1].files.keys() >= SENT
    steps = [(tmp_path / "run" / f"checkpoint-{step}" / "mrp_head.safetensors").read_bytes() for step in (1, 2)]
    assert [commit.files["mrp_head.safetensors"] for commit in commits] == [*steps, steps[-1]]


class Uploads(list):
    """Stands in for `push`: keeps what is uploaded, or fails."""

    fail = False

    def __call__(self, folder, repo_id, **options):
        if self.fail:
            raise OSError(f"pushing to {repo_id} failed: no connection")
        self.append((options["message"], head(folder)))


@pytest.fixture
def uploads(monkeypatch):
    monkeypatch.setattr(hub_uploads, "push", Uploads())
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: type("Api", (), {"create_repo": staticmethod(created)}))
    monkeypatch.setenv("HF_TOKEN", "any")
    return hub_uploads.push


def created(name, **options):
    return type("Url", (), {"repo_id": f"me/{name}"})


def test_the_names_of_the_files_are_printed(project, uploads, capsys):
    main([project(max_steps=1, push_to_hub=True, hub_strategy="end")])
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("uploading to me/run: ")]
    assert set(line.removeprefix("uploading to me/run: ").split(", ")) == SENT
    assert [message for message, _ in uploads] == ["Model save"]


def test_a_failed_upload_during_training_is_a_warning(project, uploads, tmp_path, caplog):
    """Such failures were silent, because the result of the upload in the background was never read."""
    uploads.fail = True
    with pytest.raises(OSError, match=r"pushing to me/run failed: no connection \(the head is saved: mrp push .*run"):
        main([project(max_steps=2, push_to_hub=True, save_steps=1, hub_always_push=True)])
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    failure = "an upload failed, and training continues: pushing to me/run failed: no connection"
    assert warnings.count(failure) == 2
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    assert same(head(tmp_path / "run"), head(tmp_path / "run" / "checkpoint-2"))


def test_after_a_failed_upload_the_same_command_uploads_and_finishes(project, uploads, tmp_path):
    config = project(max_steps=2, push_to_hub=True, hub_strategy="end", resume_from_checkpoint="auto")
    uploads.fail = True
    with pytest.raises(OSError, match="pushing to me/run failed"):
        main([config])
    uploads.fail = False
    main([config])
    [(_, uploaded)] = uploads
    assert same(uploaded, head(tmp_path / "run"))
    assert read_record(tmp_path / "run").is_finished_in(tmp_path / "run")


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_strategies_that_upload_optimizer_states_are_refused(tmp_path, strategy):
    with pytest.raises(ValueError, match=f"hub_strategy={strategy} is not supported: .* use every_save or end"):
        MRPTrainingArguments(str(tmp_path), hub_strategy=strategy)


def test_a_repository_that_cannot_be_one_and_a_missing_token_are_refused_before_anything_is_loaded(
    project, monkeypatch
):
    options = {"push_to_hub": True, "base_model": str(BLOCK4 / "not there")}
    with pytest.raises(ValueError, match="hub_model_id must be owner/name .* got 'my head/x'"):
        main([project(hub_model_id="my head/x", **options)])
    monkeypatch.setattr("mrp_trainer.checkpoints.push.get_token", lambda: None)
    with pytest.raises(ValueError, match="uploading needs a token"):
        main([project(hub_model_id="me/head", **options)])

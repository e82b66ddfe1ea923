"""Runs that were killed, finished, changed or interrupted, and what they resume from."""

import signal
import subprocess

import psutil
import pytest
import torch
from local_hub import LocalHub
from train_runs import ENVIRONMENT, ON_TWO, TRAIN, head, logs, run, same

from mrp_trainer.checkpoints.resume import last_checkpoint
from mrp_trainer.train import main


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"packing": True, "num_train_epochs": 0.5}])
def test_resuming_a_finished_run_takes_no_further_step(project, tmp_path, options):
    """25 rows in steps of 4: the run ends within a pass over the data."""
    options = {"max_steps": -1 if "num_train_epochs" in options else 3, "save_steps": 1} | options
    main([project(**options)])
    whole, known = head(tmp_path / "run"), checkpoints(tmp_path / "run")
    (tmp_path / "run" / "mrp_head.safetensors").unlink()  # killed before its last file
    main([project(resume_from_checkpoint="auto", **options)])
    assert same(head(tmp_path / "run"), whole)
    assert checkpoints(tmp_path / "run") == known


def test_zero_steps_write_the_initial_head_byte_for_byte(project, tmp_path):
    main([project(max_steps=1)])
    main([project("again", head=str(tmp_path / "run"), max_steps=0)])
    written = [(tmp_path / name / "mrp_head.safetensors").read_bytes() for name in ("run", "again")]
    assert written[0] == written[1]


FILES = ["mrp_head.safetensors", "mrp_head_config.json", "mrp_run.json", "optimizer.pt", "scheduler.pt"]


@pytest.mark.parametrize("lost", [*FILES, "rng_state.pth", "trainer_state.json"])
def test_checkpoint_that_lacks_a_file_is_skipped_or_refused_by_name(project, tmp_path, lost, caplog):
    main([project(max_steps=4)])
    folder = tmp_path / "run"
    (folder / "checkpoint-4" / lost).unlink()
    assert last_checkpoint(folder) == str(folder / "checkpoint-2")
    assert lost in caplog.text
    with pytest.raises(ValueError, match=f"resume_from_checkpoint: .*lacks {lost}"):
        main([project(max_steps=4, resume_from_checkpoint=str(folder / "checkpoint-4"))])


def test_checkpoint_whose_last_file_was_cut_short_is_skipped(project, tmp_path):
    main([project(max_steps=4)])
    state = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")
    whole = head(tmp_path / "run")
    main([project(max_steps=4, resume_from_checkpoint="auto")])
    assert same(head(tmp_path / "run"), whole)
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-4")


def test_checkpoint_half_written_over_an_older_one_counts_as_incomplete(project, tmp_path, monkeypatch):
    main([project(max_steps=2)])

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("mrp_trainer.mrp_trainer.MRPTrainer._save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        main([project(max_steps=2, seed=7)])
    assert last_checkpoint(tmp_path / "run") is None


CHANGES = [
    ({"per_device_train_batch_size": 2}, "rows per step .* was 4 and is 2"),
    ({"gradient_accumulation_steps": 2}, "rows per step .* was 4 and is 8"),
    ({"seed": 1}, "seed was 42 and is 1"),
    ({"muon_learning_rate": 0.02}, "Muon .* was False and is True"),
    ({"train_data": "fewer.jsonl"}, "rows of train_data was 25 and is 5"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda value: next(iter(value), None))
def test_run_with_other_settings_is_not_resumed(project, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fewer.jsonl").write_text("".join((tmp_path / "data.jsonl").read_text().splitlines(True)[:5]))
    main([project(max_steps=2)])
    with pytest.raises(ValueError, match=message):
        main([project(max_steps=4, resume_from_checkpoint="auto", **change)])


def test_run_resumes_with_its_step_cut_into_smaller_batches(project, tmp_path):
    """The same rows per step give the same head, up to the order of sums."""
    main([project("whole", max_steps=4, optim="sgd")])
    resume = str(tmp_path / "whole" / "checkpoint-2")
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    main([project("cut", max_steps=4, optim="sgd", resume_from_checkpoint=resume, **cut)])
    one, two = head(tmp_path / "whole"), head(tmp_path / "cut")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)


def test_head_trained_with_another_block_size_is_refused(project, tmp_path):
    main([project(max_steps=1)])
    with pytest.raises(ValueError, match="was trained with block_size=4 and the model has 2"):
        main([project("again", head=str(tmp_path / "run"), block_size=2)])


def test_memory_and_rows_are_logged(project, capsys):
    main([project(max_steps=1)])
    shown = capsys.readouterr().err
    assert "memory: about" in shown
    assert "25 samples in 25 rows of at most 16 tokens" in shown


@pytest.mark.slow
def test_every_save_pushes_the_head(project, tmp_path):
    with LocalHub() as hub:
        config = project(max_steps=2, save_steps=1, push_to_hub=True, hub_model_id="me/head", hub_always_push=True)
        run(*TRAIN, config, **hub.environment(tmp_path / "cache"))
    pushed = [commit.files.get("mrp_head.safetensors") for commit in hub.repositories["me/head"][1:]]
    steps = [(tmp_path / "run" / f"checkpoint-{step}" / "mrp_head.safetensors").read_bytes() for step in (1, 2)]
    assert len(pushed) > 2
    assert set(pushed) <= set(steps)
    assert pushed[-1] == steps[-1]


@pytest.mark.slow
def test_signal_to_one_of_two_processes_stops_both_with_one_checkpoint(project, tmp_path):
    config = project(max_steps=100_000, save_steps=50_000, logging_steps=1, use_cpu=True, ddp_backend="gloo")
    process = subprocess.Popen([*ON_TWO, config], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    while "loss" not in process.stdout.readline():
        assert process.poll() is None
    workers = psutil.Process(process.pid).children()
    last = max(workers, key=lambda worker: int(worker.environ().get("RANK", -1)))
    assert last.environ()["RANK"] == "1"
    last.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    [checkpoint] = (tmp_path / "run").glob("checkpoint-*")
    assert last_checkpoint(tmp_path / "run") == str(checkpoint)
    assert same(head(checkpoint), head(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
def test_two_processes_equal_one_where_the_last_batch_is_not_full(project, tmp_path, drop):
    """17 training rows and 5 evaluation rows in batches of 4: the last batch is filled up or dropped."""
    lines = (tmp_path / "data.jsonl").read_text().splitlines(True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:17]))
    (tmp_path / "held-out.jsonl").write_text("".join(lines[17:22]))
    common = {
        "train_data": str(tmp_path / "train.jsonl"),
        "eval_data": str(tmp_path / "held-out.jsonl"),
        "dataloader_drop_last": drop,
        "eval_steps": 4,
        "decode_new_tokens": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 1e9,
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "no",
    }
    main([project("one", **common)])
    config = project("two", per_device_train_batch_size=2, ddp_backend="gloo", **common)
    run(*ON_TWO, config)
    one, two = head(tmp_path / "one"), head(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)
    for log, other in zip(logs(tmp_path / "one"), logs(tmp_path / "two"), strict=True):
        timed = {name for name in log if "runtime" in name or "per_second" in name or name == "total_flos"}
        assert {name: other[name] for name in other if name not in timed} == pytest.approx(
            {name: log[name] for name in log if name not in timed}, rel=1e-4, abs=1e-6
        )

"""Runs that were killed, finished, changed or interrupted, and what they resume from."""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from damage import DAMAGE, damage, snapshot
from train_runs import ENVIRONMENT, ON_TWO, TRAIN, checkpoints, head, logs, losses, run, same, unfinish

from mrp_trainer.argument_parsing import parse_arguments
from mrp_trainer.checkpoints.resume import fault_of, last_checkpoint
from mrp_trainer.train import build_trainer, main


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
FILES += ["rng_state.pth", "trainer_state.json", "mrp_log_window.json", "mrp_manifest.json"]


@pytest.mark.parametrize("lost", FILES)
def test_checkpoint_that_lacks_a_file_is_skipped_or_refused_by_name(project, tmp_path, lost, caplog):
    main([project(max_steps=4)])
    folder = tmp_path / "run"
    (folder / "checkpoint-4" / lost).unlink()
    assert last_checkpoint(folder) == str(folder / "checkpoint-2")
    assert lost in caplog.text
    with pytest.raises(ValueError, match=f"resume_from_checkpoint: .*lacks {lost}"):
        main([project(max_steps=4, resume_from_checkpoint=str(folder / "checkpoint-4"))])


def test_damage_of_every_kind_to_every_file_is_named_and_passed_over(project, tmp_path, caplog):
    """A checkpoint whose optimizer was cut short or whose head was half zeroed used to be resumed from.

    The last byte of a JSON file is a line feed, which only its checksum misses.
    """
    main([project(max_steps=4)])
    newest = tmp_path / "run" / "checkpoint-4"
    assert {path.name for path in newest.iterdir()} > set(FILES)
    for path, kind in itertools.product(sorted(newest.iterdir()), DAMAGE):
        if (path.name, kind) == ("mrp_manifest.json", "cut by a byte"):
            continue
        content = path.read_bytes()
        caplog.clear()
        damage(path, kind)
        assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2"), (path.name, kind)
        assert path.name in caplog.text
        path.write_bytes(content)
    assert last_checkpoint(tmp_path / "run") == str(newest)


@pytest.mark.parametrize("lost", ["optimizer.pt", "mrp_head.safetensors"])
def test_run_goes_on_from_the_checkpoint_before_a_damaged_one(project, tmp_path, lost):
    main([project(max_steps=4)])
    whole = head(tmp_path / "run")
    unfinish(tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint-4" / lost, "second half zeroed")
    main([project(max_steps=4, resume_from_checkpoint="auto")])
    assert same(head(tmp_path / "run"), whole)
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-4")


def test_run_whose_checkpoints_are_all_damaged_is_not_started_over_unasked(project, tmp_path):
    main([project(max_steps=2)])
    unfinish(tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint-2" / "optimizer.pt", "emptied")
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds checkpoint-2 .*overwrite_output_dir"):
        main([project(max_steps=2, resume_from_checkpoint="auto")])
    assert snapshot(tmp_path / "run") == before


def test_checkpoint_that_was_never_finished_is_replaced(project, tmp_path, monkeypatch):
    """Killed in its very first save, a run leaves nothing to resume from: `auto` starts from the beginning."""

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mrp_trainer.mrp_trainer.MRPTrainer._save_optimizer_and_scheduler", killed)
        with pytest.raises(KeyboardInterrupt):
            main([project(max_steps=2)])
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    assert last_checkpoint(tmp_path / "run") is None
    main([project(max_steps=2, resume_from_checkpoint="auto")])
    main([project("whole", max_steps=2)])
    assert same(head(tmp_path / "run"), head(tmp_path / "whole"))


def test_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(project, tmp_path):
    """A child process saves a checkpoint over an unfinished one and dies at the n-th file operation, for every n.

    Before the checksums are written the older checkpoint is the last one, from then on the new one. Only one is kept,
    so the older one must not be deleted before.
    """
    trainer = build_trainer(*parse_arguments([project(max_steps=4, save_total_limit=1)]))
    trainer.train()
    output, kept = tmp_path / "run", tmp_path / "kept"
    (output / "checkpoint-4").rename(output / "checkpoint-2")
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    (output / "checkpoint-4").mkdir()
    (output / "checkpoint-4" / "optimizer.pt").write_text("left by a save that was killed")
    shutil.copytree(output, kept)
    assert state["global_step"] == 4
    found = []
    for operation in itertools.count(1):
        shutil.rmtree(output)
        shutil.copytree(kept, output)
        child = os.fork()
        if child == 0:
            die_at_file_operation(operation, output)
            trainer._save_checkpoint(trainer.model, None)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        found.append(last_checkpoint(output))
        if not killed:
            break
    old, new = str(output / "checkpoint-2"), str(output / "checkpoint-4")
    assert operation > 30
    assert found == sorted(found, key=[old, new].index)
    assert {old, new} == set(found)
    assert checkpoints(output) == ["checkpoint-4"]


def test_full_disk_ends_in_one_line_and_loses_nothing(project, tmp_path):
    """A child process may write no file longer than some thousand bytes: of torch, safetensors, and Python in turn."""
    trainer = build_trainer(*parse_arguments([project(max_steps=2)]))
    trainer.train()
    before = snapshot(tmp_path / "run" / "checkpoint-2")
    longest = sorted({len(content) for content in before.values()})
    for limit in longest[:-1]:
        trainer.state.global_step += 1
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                trainer._save_checkpoint(trainer.model, None)
            except OSError as error:
                os._exit(7 if "checkpoint-" in str(error) and "could not be written" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, limit
        assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")
    assert snapshot(tmp_path / "run" / "checkpoint-2") == before


def die_at_file_operation(number, folder):
    """Kill this process at the n-th time that it opens, renames or removes something in the folder."""
    operations = itertools.count(1)
    watched = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")

    def watch(event, arguments):
        if event in watched and str(folder) in str(arguments[0]) and next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


@pytest.mark.parametrize("resume", ["auto", "checkpoint-2"])
def test_resuming_a_finished_run_says_so_and_touches_nothing(project, tmp_path, capsys, resume):
    main([project(max_steps=4)])
    folder = tmp_path / "run"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    resume = resume if resume == "auto" else str(folder / resume)
    assert main([project(max_steps=4, resume_from_checkpoint=resume)]) == 0
    assert "is finished: nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_damaged_head_of_a_finished_run_is_written_again(project, tmp_path):
    main([project(max_steps=4)])
    path = tmp_path / "run" / "mrp_head.safetensors"
    whole = path.read_bytes()
    damage(path, "second half zeroed")
    main([project(max_steps=4, resume_from_checkpoint="auto")])
    assert path.read_bytes() == whole


WINDOWS = [
    {},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    {"streaming": True},
    {"muon_learning_rate": 0.02},
    {"lora_rank": 2, "head_init": "backbone_layers", "lora_dropout": 0.1},
]


@pytest.mark.parametrize("options", WINDOWS, ids=lambda options: next(iter(options), "plain"))
def test_first_log_after_a_resume_covers_the_same_steps(project, tmp_path, options):
    """The losses of the steps between the last log and the checkpoint were lost: the mean was over fewer steps.

    Logs after steps 3, 6, 9 and 12; checkpoints in between; epochs end after steps 7 and 14 of this run of 14.
    """
    options = options | {"max_steps": 14, "save_steps": 1, "logging_steps": 3}
    main([project("whole", **options)])
    for stop in (2, 7, 13):
        resume = str(tmp_path / "whole" / f"checkpoint-{stop}")
        main([project(f"from-{stop}", resume_from_checkpoint=resume, **options)])
        assert losses(tmp_path / f"from-{stop}") == losses(tmp_path / "whole")
        means = [logs(tmp_path / name)[-1]["train_loss"] for name in ("whole", f"from-{stop}")]
        assert means[0] == means[1]


def test_log_after_a_resume_is_the_mean_of_its_steps(project, tmp_path):
    """The same run logged after every step gives the terms of the mean."""
    main([project("each", max_steps=6)])
    each = losses(tmp_path / "each")
    main([project("whole", max_steps=6, logging_steps=5)])
    resume = str(tmp_path / "whole" / "checkpoint-4")
    main([project("resumed", max_steps=6, logging_steps=5, resume_from_checkpoint=resume)])
    assert losses(tmp_path / "resumed")[5] == pytest.approx(sum(each[step] for step in range(1, 6)) / 5, rel=1e-6)


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


@pytest.mark.slow
def test_two_processes_resume_bit_exactly_with_the_same_logs(project, tmp_path):
    options = {"max_steps": 6, "logging_steps": 4, "ddp_backend": "gloo", "per_device_train_batch_size": 2}
    run(*ON_TWO, project("whole", **options))
    resume = str(tmp_path / "whole" / "checkpoint-2")
    run(*ON_TWO, project("resumed", resume_from_checkpoint=resume, **options))
    assert same(head(tmp_path / "resumed"), head(tmp_path / "whole"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    alone = options | {"per_device_train_batch_size": 4, "ddp_backend": None}
    main([project("alone", resume_from_checkpoint=resume, **alone)])
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    means = [logs(tmp_path / name)[-1]["train_loss"] for name in ("whole", "resumed", "alone")]
    assert means[0] == means[1] == pytest.approx(means[2], rel=1e-4)
    config = project("whole", resume_from_checkpoint="auto", **options)
    before = snapshot(tmp_path / "whole")
    run(*ON_TWO, config)  # finished
    assert snapshot(tmp_path / "whole") == before
    refused = subprocess.run([*ON_TWO, config, "--seed", "1"], env=ENVIRONMENT, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "seed: 42 -> 1" in refused.stderr


@pytest.mark.slow
def test_run_that_is_killed_again_and_again_ends_with_the_same_head(project, tmp_path):
    """SIGKILL at random moments of a run that saves after every step and keeps one checkpoint."""
    options = {"max_steps": 300, "save_steps": 1, "save_total_limit": 1, "logging_steps": 7}
    run(*TRAIN, project("whole", **options))
    config = project("killed", resume_from_checkpoint="auto", **options)
    moments = random.Random(0)
    for _ in range(6):
        before = step_of_last(tmp_path / "killed")
        process = subprocess.Popen([*TRAIN, config], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while process.poll() is None and step_of_last(tmp_path / "killed") <= before:
            time.sleep(0.01)
        time.sleep(moments.random() / 2)
        process.kill()
        process.wait()
        assert last_checkpoint(tmp_path / "killed") is not None
    run(*TRAIN, config)
    assert same(head(tmp_path / "killed"), head(tmp_path / "whole"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def step_of_last(folder):
    steps = [int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")]
    return max(steps, default=0)


@pytest.mark.slow
def test_interrupted_run_resumes_to_the_head_of_an_uninterrupted_one(project, tmp_path):
    """^C within a window of logs, at whatever step it arrives."""
    options = {"max_steps": 40, "save_steps": 50, "logging_steps": 9}
    main([project("whole", **options)])
    config = project("cut", resume_from_checkpoint="auto", **options)
    process = subprocess.Popen([*TRAIN, config], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    while "loss" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    [checkpoint] = (tmp_path / "cut").glob("checkpoint-*")
    assert fault_of(checkpoint) is None
    main([config])
    assert same(head(tmp_path / "cut"), head(tmp_path / "whole"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")

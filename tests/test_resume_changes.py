"""Resuming a run with other settings, and starting one in the folder of another."""

import shutil

import pytest
import torch
from damage import snapshot
from train_runs import checkpoints, head, losses, same, unfinish, write_data

from mrp_trainer.argument_parsing import parse_arguments
from mrp_trainer.checkpoints.resume import last_checkpoint
from mrp_trainer.train import build_trainer, main

CHANGES = [
    ({"per_device_train_batch_size": 2}, r"rows per step .*: 4 -> 2"),
    ({"gradient_accumulation_steps": 2}, r"rows per step .*: 4 -> 8"),
    ({"seed": 1}, "seed: 42 -> 1"),
    ({"data_seed": 1}, "data_seed: null -> 1"),
    ({"muon_learning_rate": 0.02}, r"Muon .*: false -> true"),
    ({"train_data": "fewer.jsonl"}, "rows of train_data: 25 -> 5"),
    ({"train_data": "other.jsonl"}, r"contents of train_data: \w{12}\.\.\. -> \w{12}\.\.\."),
    ({"sequence_length": 17}, "sequence_length: 16 -> 17"),
    ({"packing": True}, "packing: false -> true"),
    ({"unroll_steps": 1}, "unroll_steps: 2 -> 1"),
    ({"reveal": "confident"}, "reveal: random -> confident"),
    ({"reveal_counts": [1, 2]}, r"reveal_counts: \[1\] -> \[1, 2\]"),
    ({"noise_eps": 0.1}, r"noise_eps: 0\.001 -> 0\.1"),
    ({"noise_per_block": True}, "noise_per_block: false -> true"),
    ({"choice_weight": 0.1}, r"choice_weight: 0\.0 -> 0\.1"),
    ({"kl_temperature": 2.0}, r"kl_temperature: 1\.0 -> 2\.0"),
    ({"divergence": "total_variation"}, "divergence: kl -> total_variation"),
    ({"optim": "sgd"}, r"optim: adamw\w* -> sgd"),
    ({"head_init": "backbone_layers"}, "head_init: fresh -> backbone_layers"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last: false -> true"),
    ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy: random -> sequential"),
    ({"bf16": True}, "bf16: false -> true"),
]


def test_change_of_what_shapes_a_run_is_refused_by_name_with_both_values(project, tmp_path, monkeypatch):
    """All but the first six used to be accepted in silence; the run then mixed old and new settings."""
    monkeypatch.chdir(tmp_path)
    lines = (tmp_path / "data.jsonl").read_text().splitlines(True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "other.jsonl").write_text("".join([*lines[:-1], lines[0]]))
    main([project(max_steps=2)])
    unfinish(tmp_path / "run")
    before = snapshot(tmp_path / "run")
    for change, message in CHANGES:
        for allowed in (False, True):
            with pytest.raises(ValueError, match=message):
                main(
                    [project(resume_from_checkpoint="auto", resume_with_changes=allowed, **{"max_steps": 2} | change)]
                )
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    "change",
    [{"shuffle_buffer": 5}, {"train_data": "other.jsonl"}, {"dataloader_num_workers": 1}],
    ids=lambda change: next(iter(change)),
)
def test_stream_of_another_source_or_order_is_not_resumed(project, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    lines = (tmp_path / "data.jsonl").read_text().splitlines(True)
    (tmp_path / "other.jsonl").write_text("".join([*lines[:-1], lines[0]]))
    main([project(max_steps=2, streaming=True)])
    with pytest.raises(ValueError, match=f"{next(iter(change))}.*: .* -> "):
        main([project(max_steps=4, streaming=True, resume_from_checkpoint="auto", resume_with_changes=True, **change)])


def test_data_may_move_and_be_split_over_batches_otherwise(project, tmp_path):
    """Neither is a change: contents and rows per step stay the same."""
    main([project(max_steps=4)])
    (tmp_path / "data.jsonl").rename(tmp_path / "moved.jsonl")
    options = {"train_data": str(tmp_path / "moved.jsonl"), "per_device_train_batch_size": 1}
    options |= {"gradient_accumulation_steps": 4, "report_to": "none", "dataloader_num_workers": 1}
    assert main([project(max_steps=4, resume_from_checkpoint="auto", **options)]) == 0


ALLOWED = [
    ({"max_steps": 4}, "max_steps: 2 -> 4"),
    ({"learning_rate": 1e-4}, "learning_rate: 0.001 -> 0.0001"),
    ({"lr_scheduler_type": "linear"}, "lr_scheduler_type: cosine_with_min_lr -> linear"),
    ({"weight_decay": 0.1}, "weight_decay: 0.0 -> 0.1"),
    ({"logging_steps": 2}, "logging_steps: 1 -> 2"),
    ({"save_steps": 1}, "save_steps: 2 -> 1"),
    ({"max_grad_norm": 0.5}, "max_grad_norm: 1.0 -> 0.5"),
]


def test_change_that_can_be_applied_is_refused_unless_it_is_asked_for(project, tmp_path):
    main([project(max_steps=2)])
    before = snapshot(tmp_path / "run")
    for change, message in ALLOWED:
        with pytest.raises(ValueError, match=f"{message}.*resume_with_changes"):
            main([project(resume_from_checkpoint="auto", **{"max_steps": 2} | change)])
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"muon_learning_rate": 0.02}])
@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup"])
def test_finished_run_with_more_steps_becomes_the_longer_run(project, tmp_path, options, schedule):
    """Bit for bit under a schedule that does not know its end; under others the first steps had another rate."""
    options = options | {"lr_scheduler_type": schedule, "warmup_steps": 4, "lr_scheduler_kwargs": {}}
    main([project("long", max_steps=9, **options)])
    main([project(max_steps=3, **options)])
    main([project(max_steps=9, resume_from_checkpoint="auto", resume_with_changes=True, **options)])
    assert same(head(tmp_path / "run"), head(tmp_path / "long"))
    assert losses(tmp_path / "run") == losses(tmp_path / "long")


@pytest.mark.parametrize("muon", [None, 0.02])
def test_changed_learning_rate_and_length_give_the_new_schedule(project, tmp_path, muon):
    """The old learning rate was kept, and the head came out as if nothing had been changed.

    Step s, counted from 0, of a linear schedule over N steps has the learning rate peak * (1 - s / N).
    """
    options = {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "muon_learning_rate": muon}
    main([project(max_steps=4, **options)])
    resume = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2"), "resume_with_changes": True}
    changed = {"learning_rate": 5e-4, "max_steps": 8, "weight_decay": 0.1} | (
        {"muon_learning_rate": 0.01} if muon else {}
    )
    trainer = build_trainer(*parse_arguments([project("changed", **options | changed | resume)]))
    trainer.train(resume_from_checkpoint=resume["resume_from_checkpoint"])
    peak = 0.01 if muon else 5e-4  # the first group of parameters is logged
    rates = {log["step"]: log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log}
    old = {step: (muon or 1e-3) * (1 - (step - 1) / 4) for step in (1, 2)}
    assert rates == pytest.approx(old | {step: peak * (1 - (step - 1) / 8) for step in range(3, 9)})
    assert max(group["weight_decay"] for group in trainer.optimizer.param_groups) == 0.1
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == ({5e-4, 0.01} if muon else {5e-4})


@pytest.mark.parametrize("muon", [None, 0.02])
def test_learning_rate_changed_to_zero_keeps_the_head_of_the_checkpoint(project, tmp_path, muon):
    main([project(max_steps=4, muon_learning_rate=muon)])
    checkpoint = tmp_path / "run" / "checkpoint-2"
    options = {"learning_rate": 0.0, "muon_learning_rate": muon and 1e-30, "lr_scheduler_type": "constant"}
    resume = {"resume_from_checkpoint": str(checkpoint), "resume_with_changes": True, "lr_scheduler_kwargs": {}}
    main([project("still", max_steps=4, **options, **resume)])
    assert same(head(tmp_path / "still"), head(checkpoint))
    assert not same(head(tmp_path / "run"), head(checkpoint))


def test_changed_run_is_another_run_that_a_kill_does_not_undo(project, tmp_path):
    """After a change at step 2, the checkpoint of step 4 in the same folder has the old learning rate."""
    main([project(max_steps=4)])
    changed = {"max_steps": 4, "learning_rate": 1e-2}
    resume = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2"), "resume_with_changes": True}
    main([project("whole", **changed | resume)])
    trainer = build_trainer(*parse_arguments([project(**changed | resume)]))
    trainer._begin_run(resume["resume_from_checkpoint"])  # killed before the next checkpoint
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")
    main([project(**changed | {"resume_from_checkpoint": "auto"})])
    assert same(head(tmp_path / "run"), head(tmp_path / "whole"))


def test_schedule_that_follows_the_loss_cannot_be_changed(project, tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {}, "eval_steps": 1}
    write_data(tmp_path / "held-out.jsonl", [{"prompt": "what is one", "completion": "so one . two"}])
    options |= {"eval_data": str(tmp_path / "held-out.jsonl"), "decode_prompts": 0, "eval_strategy": "steps"}
    main([project(max_steps=2, **options)])
    with pytest.raises(ValueError, match=r"resume_with_changes cannot .* reduce_lr_on_plateau"):
        main([project(max_steps=4, resume_from_checkpoint="auto", resume_with_changes=True, **options)])


def test_changed_run_cannot_end_before_its_checkpoint(project, tmp_path):
    main([project(max_steps=4)])
    with pytest.raises(ValueError, match="max_steps 3 ends after step 3, but .* is at step 4"):
        main([project(max_steps=3, resume_from_checkpoint="auto", resume_with_changes=True)])
    main([project("epochs", max_steps=-1, num_train_epochs=2)])
    options = {"max_steps": -1, "num_train_epochs": 1, "resume_with_changes": True}
    with pytest.raises(ValueError, match="num_train_epochs 1.* ends after step 7, but .* is at step 14"):
        main([project("epochs", resume_from_checkpoint="auto", **options)])


def test_checkpoints_of_an_older_run_are_never_resumed_from(project, tmp_path, caplog):
    main([project(max_steps=4)])
    main([project("older", max_steps=6)])
    shutil.copytree(tmp_path / "older" / "checkpoint-6", tmp_path / "run" / "checkpoint-6")
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-4")
    assert "checkpoint-6 belongs to another run" in caplog.text
    with pytest.raises(ValueError, match="checkpoint-6 belongs to an older run"):
        main([project(max_steps=6, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))])


@pytest.mark.parametrize("options", [{}, {"save_strategy": "no"}], ids=["checkpoints", "only a head"])
def test_new_run_in_the_folder_of_another_is_refused_unless_told_to_overwrite(project, tmp_path, options):
    """A run without resume_from_checkpoint used to overwrite checkpoint after checkpoint of the run before it."""
    main([project(max_steps=4, **options)])
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=r"output_dir .*run holds .* of another run: .*overwrite_output_dir"):
        main([project(max_steps=2, seed=7, **options)])
    assert snapshot(tmp_path / "run") == before
    with pytest.raises(ValueError, match="set resume_from_checkpoint to none"):
        main([project(max_steps=2, overwrite_output_dir=True, resume_from_checkpoint="auto", **options)])
    assert snapshot(tmp_path / "run") == before
    main([project(max_steps=2, seed=7, overwrite_output_dir=True, **options)])
    main([project("alone", max_steps=2, seed=7, **options)])
    assert same(head(tmp_path / "run"), head(tmp_path / "alone"))
    assert checkpoints(tmp_path / "run") == checkpoints(tmp_path / "alone")


def test_checkpoint_of_another_folder_is_not_resumed_into_a_folder_that_holds_a_run(project, tmp_path):
    main([project(max_steps=2)])
    main([project("other", max_steps=2, seed=7)])
    resume = {"max_steps": 2, "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2")}
    with pytest.raises(ValueError, match="holds checkpoint-2 of another run than"):
        main([project("other", **resume)])
    main([project("other", overwrite_output_dir=True, **resume)])
    assert same(head(tmp_path / "other"), head(tmp_path / "run"))


def test_changed_steps_between_logs_and_checkpoints_take_effect(project, tmp_path):
    """They were taken from the checkpoint, whatever the options said."""
    main([project(max_steps=2)])
    change = {"max_steps": 8, "logging_steps": 3, "save_steps": 4}
    main([project(resume_from_checkpoint="auto", resume_with_changes=True, **change)])
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 6]
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]


def test_run_resumes_with_its_step_cut_into_smaller_batches(project, tmp_path):
    """The same rows per step give the same head, up to the order of sums."""
    main([project("whole", max_steps=4, optim="sgd")])
    resume = str(tmp_path / "whole" / "checkpoint-2")
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    main([project("cut", max_steps=4, optim="sgd", resume_from_checkpoint=resume, **cut)])
    one, two = head(tmp_path / "whole"), head(tmp_path / "cut")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)

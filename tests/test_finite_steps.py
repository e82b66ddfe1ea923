"""A loss or gradient that is not finite: no optimizer step is taken with it, and the message names its samples."""

import json
import logging
import re
import subprocess

import pytest
import torch
from conftest import NUMBERS
from safetensors.torch import load_file, save_file
from test_accelerate_configs import launch_two
from test_host_synchronisations import FetchCounter
from train_runs import ENVIRONMENT, ON_TWO, head, logs, losses, same, write_data
from transformers import Trainer

from mrp_trainer.argument_parsing import parse_arguments
from mrp_trainer.checkpoints.resume import last_checkpoint
from mrp_trainer.finite_steps import FiniteSteps, NonFiniteError
from mrp_trainer.train import build_trainer, main

BAD = (5, 14, 22, 31)  # of 40 samples, in this order: rows of 4 are read one after another
STEPS = {row // 4 + 1 for row in BAD}
IN_ORDER = {"train_sampling_strategy": "sequential", "max_steps": 10, "learning_rate": 0.01}


RESUMED = {"resume_from_checkpoint": "auto", "resume_with_changes": True}


@pytest.fixture
def poisoned(project, word_tokenizer, tmp_path):
    """A project whose backbone has inf in the embedding of one word, which is in 4 of its 40 samples."""
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][word_tokenizer.convert_tokens_to_ids("minus")] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    records = [
        {"prompt": f"what is {NUMBERS[i % 5]} ?", "completion": f"so {'minus' if i in BAD else 'plus'} one . three"}
        for i in range(40)
    ]
    write_data(tmp_path / "data.jsonl", records)

    def write(name="run", **options):
        return project(name, **IN_ORDER | options)

    return write


def rows_in(message: str) -> list[int]:
    return [int(row) for row in re.findall(r"\(row (\d+) of the data\)", message)]


OBJECTIVES = [
    {},
    {"choice_weight": 0.5},
    {"divergence": "total_variation"},
    {"reveal": "confident"},
    {"muon_learning_rate": 0.02},
    {"logging_steps": 3},
    {"activation_checkpointing": True},
]


@pytest.mark.parametrize("options", OBJECTIVES, ids=str)
def test_training_stops_before_the_step_and_names_it_and_its_sample(poisoned, tmp_path, options):
    """Such a run once ended with status 0, logged a loss of 0.0 and saved a head of nothing but NaN."""
    with pytest.raises(NonFiniteError, match="^step 2: the loss is not finite in the samples") as raised:
        main([poisoned(**options)])
    assert rows_in(str(raised.value)) == [BAD[0]]
    assert not (tmp_path / "run" / "mrp_head.safetensors").exists()
    folder = last_checkpoint(tmp_path / "run")
    assert folder.endswith("checkpoint-1") and folder in str(raised.value)
    assert all(tensor.isfinite().all() for tensor in head(folder).values())


def test_checkpoint_at_the_stop_is_that_of_the_step_before(poisoned, tmp_path):
    with pytest.raises(NonFiniteError):
        main([poisoned("stopped", save_steps=100)])
    main([poisoned("short", max_steps=1, lr_scheduler_type="constant", save_steps=1)])
    with pytest.raises(NonFiniteError):
        main([poisoned("constant", lr_scheduler_type="constant", save_steps=100)])
    assert same(head(tmp_path / "constant" / "checkpoint-1"), head(tmp_path / "short" / "checkpoint-1"))


def test_first_step_that_is_not_finite_leaves_nothing_behind(poisoned, tmp_path):
    with pytest.raises(NonFiniteError, match="step 1: .*nothing was trained before it"):
        main([poisoned(per_device_train_batch_size=8)])
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


def test_saved_head_is_not_overwritten(poisoned, tmp_path):
    main([poisoned(max_steps=1)])
    saved = (tmp_path / "run" / "mrp_head.safetensors").read_bytes()
    with pytest.raises(NonFiniteError):
        main([poisoned(max_steps=10, **RESUMED)])
    assert (tmp_path / "run" / "mrp_head.safetensors").read_bytes() == saved


@pytest.mark.parametrize("options", [{}, {"muon_learning_rate": 0.02}, {"optim": "sgd"}], ids=str)
def test_skipped_steps_change_nothing_and_are_counted(poisoned, tmp_path, caplog, options):
    """Weights before and after a skipped step are equal, and the logged loss is the mean over the others."""
    run = poisoned(skip_nonfinite_batches=True, save_steps=1, **options)
    with caplog.at_level(logging.WARNING, logger="mrp_trainer"):
        assert main([run]) == 0
    heads = [head(tmp_path / "run" / f"checkpoint-{step}") for step in range(1, 11)]
    still = {step for step in range(2, 11) if same(heads[step - 1], heads[step - 2])}
    assert still >= STEPS
    assert all(losses(tmp_path / "run")[step] == 0 for step in still - STEPS)  # nothing was masked there
    assert all(tensor.isfinite().all() for tensor in heads[-1].values())
    skipped = {log["step"]: log["skipped_steps"] for log in logs(tmp_path / "run") if "skipped_steps" in log}
    assert skipped == dict.fromkeys(STEPS, 1)
    assert sorted(losses(tmp_path / "run")) == sorted(set(range(1, 11)) - STEPS)
    named = [rows_in(record.getMessage()) for record in caplog.records if "is skipped" in record.getMessage()]
    assert named == [[row] for row in BAD]
    assert "skipped 4 of 10 steps, whose loss" in caplog.text


def test_logged_losses_are_means_over_the_steps_that_were_taken(poisoned, tmp_path):
    main([poisoned("each", skip_nonfinite_batches=True)])
    main([poisoned("five", skip_nonfinite_batches=True, logging_steps=5)])
    each, five = losses(tmp_path / "each"), losses(tmp_path / "five")
    for end in (5, 10):
        taken = [each[step] for step in range(end - 4, end + 1) if step in each]
        assert five[end] == pytest.approx(sum(taken) / len(taken), rel=1e-5)
    for run in ("each", "five"):
        [last] = [log for log in logs(tmp_path / run) if "train_loss" in log]
        assert last["train_loss"] == pytest.approx(sum(each.values()) / 6, rel=1e-5)
        assert last["skipped_steps_in_run"] == 4


def test_whole_step_is_skipped_under_accumulation(poisoned, tmp_path):
    """The normaliser of a step is that of all its batches, so one bad batch takes its neighbours with it."""
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "save_steps": 1}
    with pytest.raises(NonFiniteError) as raised:
        main([poisoned("stopped", **options)])
    assert rows_in(str(raised.value)) == [BAD[0]]
    main([poisoned(skip_nonfinite_batches=True, **options)])
    main([poisoned("whole", skip_nonfinite_batches=True, optim="adamw_torch")])
    assert sorted(losses(tmp_path / "run")) == sorted(set(range(1, 11)) - STEPS)
    for name, tensor in head(tmp_path / "whole").items():
        torch.testing.assert_close(head(tmp_path / "run")[name], tensor, rtol=1e-3, atol=1e-4)


def test_run_in_which_every_step_is_skipped_is_an_error(poisoned, tmp_path):
    with pytest.raises(NonFiniteError, match="nothing was trained: skipped 1 of 1 step, whose loss"):
        main([poisoned(per_device_train_batch_size=8, max_steps=1, skip_nonfinite_batches=True)])
    assert not (tmp_path / "run" / "mrp_head.safetensors").exists()


def test_gradient_that_overflows_is_caught_although_the_loss_is_finite(project, monkeypatch):
    trainer = build_trainer(*parse_arguments([project()]))
    start = {name: tensor.clone() for name, tensor in trainer.model.mrp_head.state_dict().items()}
    trainer.model.mrp_head.eh_proj.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NonFiniteError, match="step 1: the gradient is not finite in the samples") as raised:
        trainer.train()
    assert len(re.findall(r"\d+ \(row|\b0\b", str(raised.value))) == 4  # all samples of the batch
    assert same(start, trainer.model.mrp_head.state_dict())


def test_head_with_weights_that_are_not_finite_is_not_written(project, tmp_path):
    """A last step with a huge learning rate has a finite gradient and makes the head inf."""
    main([project(max_steps=1)])
    saved = (tmp_path / "run" / "mrp_head.safetensors").read_bytes()
    with pytest.raises(ValueError, match="the head's .* not finite"):
        main([project(max_steps=2, learning_rate=1e38, weight_decay=10.0, **RESUMED)])
    assert (tmp_path / "run" / "mrp_head.safetensors").read_bytes() == saved


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_check_makes_the_host_wait_once_per_optimizer_step(project, monkeypatch, accumulation):
    """On a CPU nothing waits: what counts are values that Python takes out of tensors, beyond transformers' own."""
    fetches = {}
    for owner in (Trainer, FiniteSteps):

        def counted(self, *args, owner=owner, step=owner.training_step):
            with FetchCounter() as counter:
                loss = step(self, *args)
            fetches[owner] = fetches.get(owner, 0) + counter.count
            return loss

        monkeypatch.setattr(owner, "training_step", counted)
    options = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 1, "max_steps": 3}
    main([project(**options, save_strategy="no")])
    assert fetches[FiniteSteps] - fetches[Trainer] == 3


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_two_processes_agree_on_the_step_and_name_the_rank(poisoned, tmp_path, skip):
    options = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "save_steps": 1}
    config = poisoned(skip_nonfinite_batches=skip, **options)
    done = subprocess.run([*ON_TWO, config], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    if skip:
        assert done.returncode == 0, done.stderr
        assert sorted(losses(tmp_path / "run")) == sorted(set(range(1, 11)) - STEPS)
        assert all(tensor.isfinite().all() for tensor in head(tmp_path / "run").values())
        main([poisoned("one", skip_nonfinite_batches=True)])
        for name, tensor in head(tmp_path / "one").items():
            torch.testing.assert_close(head(tmp_path / "run")[name], tensor, rtol=1e-3, atol=1e-4)
    else:
        assert done.returncode != 0
        assert re.search(
            r"step 2: the loss is not finite in the samples with sample_ids rank 0: \d+ \(row 5 ", done.stderr
        )
        assert not (tmp_path / "run" / "mrp_head.safetensors").exists()
        assert json.loads((tmp_path / "run" / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1


@pytest.mark.slow
def test_sharded_processes_skip_the_same_steps_as_one_process(poisoned, tmp_path):
    """After the forward that looks for the samples, FSDP2's model holds whole parameters and not the optimizer's.

    Clearing the gradients of the model left those of the optimizer, and the skipped step made part of the head NaN.
    """
    options = {"skip_nonfinite_batches": True, "optim": "adamw_torch"}
    two = poisoned("two", per_device_train_batch_size=2, ddp_backend="gloo", **options)
    stopped = poisoned("stopped", per_device_train_batch_size=2, ddp_backend="gloo")
    done = launch_two("accelerate-fsdp2.yaml", "-m", "tests.fsdp_on_cpu", two, stopped)
    assert re.search(r"step 2: the loss is not finite in .* rank 0: \d+ \(row 5 of the data\)", done.stderr)
    assert last_checkpoint(tmp_path / "stopped").endswith("checkpoint-1")
    main([poisoned("one", **options)])
    assert sorted(losses(tmp_path / "two")) == sorted(set(range(1, 11)) - STEPS)
    for name, tensor in head(tmp_path / "one").items():
        torch.testing.assert_close(head(tmp_path / "two")[name], tensor, rtol=1e-3, atol=1e-4)

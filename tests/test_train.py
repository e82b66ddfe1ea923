"""`mrp train` from end to end, in separate processes where a user would start them."""

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from train_runs import ENVIRONMENT, ON_TWO, ROOT, TRAIN, head, logs, losses, run, same, write_data

from mrp_trainer.argument_parsing import parse_arguments
from mrp_trainer.arguments import MRPTrainingArguments
from mrp_trainer.train import build_trainer, checkpoint_to_resume, main

RECIPES = ROOT / "hub_cards" / "recipes"
WORDS = ["one", "two", "three", "four", "five"]


def test_config_gives_a_head_that_loads_onto_its_backbone(project, tmp_path):
    write_data(tmp_path / "held-out.jsonl", [{"prompt": "what is one", "completion": "so one . two"}] * 6)
    config = project(eval_data=str(tmp_path / "held-out.jsonl"), eval_steps=3, decode_new_tokens=8)
    assert main([config]) == 0
    evaluations = [log for log in logs(tmp_path / "run") if "eval_loss" in log]
    assert [log["step"] for log in evaluations] == [3, 6]
    for log in evaluations:
        assert log["eval_tokens_per_forward"] > 0
        assert 0 <= log["eval_accepted_1"] <= 1
    again = project("again", head=str(tmp_path / "run"))
    trainer = build_trainer(*parse_arguments([again]))
    assert same(dict(trainer.model.mrp_head.state_dict()), head(tmp_path / "run"))


def test_zero_learning_rate_writes_the_initial_head_byte_for_byte(project, tmp_path):
    main([project(max_steps=1)])
    main([project("again", head=str(tmp_path / "run"), learning_rate=0.0, max_steps=1)])
    written = [(tmp_path / name / "mrp_head.safetensors").read_bytes() for name in ("run", "again")]
    assert written[0] == written[1]


def test_stream_trains_and_needs_max_steps(project, tmp_path):
    assert main([project(streaming=True, max_steps=3)]) == 0
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3]
    with pytest.raises(ValueError, match="max_steps"):
        main([project(streaming=True, max_steps=-1)])


def test_missing_option_or_folder_is_named(project):
    with pytest.raises(ValueError, match="base_model is required"):
        main([])
    with pytest.raises(ValueError, match="train_data is required"):
        main(["--base_model", "somewhere"])
    with pytest.raises(ValueError, match="folder nowhere does not exist"):
        checkpoint_to_resume(MRPTrainingArguments(resume_from_checkpoint="nowhere"))


def test_auto_resumes_the_last_checkpoint_or_starts_from_the_beginning(project, tmp_path):
    arguments = parse_arguments([project(resume_from_checkpoint="auto")])[2]
    assert checkpoint_to_resume(arguments) is None
    main([project(resume_from_checkpoint="auto")])
    assert checkpoint_to_resume(arguments) == str(tmp_path / "run" / "checkpoint-6")


@pytest.mark.parametrize("stop", [4, 9])
def test_stream_shorter_than_the_run_resumes_bit_exactly(project, tmp_path, stop):
    """25 samples make six and a quarter steps, so the stops lie in the first and in the second pass."""
    options = {"streaming": True, "shuffle_buffer": 8, "max_steps": 15, "save_steps": 1}
    main([project("whole", **options)])
    resume = str(tmp_path / "whole" / f"checkpoint-{stop}")
    main([project("resumed", resume_from_checkpoint=resume, **options)])
    assert same(head(tmp_path / "resumed"), head(tmp_path / "whole"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_killed_run_resumes_bit_exactly_in_a_new_process(project, tmp_path, streaming):
    run(*TRAIN, project("whole", max_steps=60, save_steps=5, streaming=streaming))
    config = project("killed", max_steps=60, save_steps=5, streaming=streaming)
    process = subprocess.Popen([*TRAIN, config], env=ENVIRONMENT)
    while not (tmp_path / "killed" / "checkpoint-10" / "trainer_state.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "mrp_head.safetensors").exists()
    run(*TRAIN, config, "--resume_from_checkpoint", "auto")
    assert same(head(tmp_path / "killed"), head(tmp_path / "whole"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_interrupt_saves_and_stops_after_the_step(project, tmp_path):
    config = project(max_steps=100_000, save_steps=50_000, logging_steps=1)
    process = subprocess.Popen(
        [*TRAIN, config],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    while "loss" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    [checkpoint] = (tmp_path / "run").glob("checkpoint-*")
    assert same(head(checkpoint), head(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_equal_one_with_twice_the_batch(project, tmp_path, accumulation):
    """Every other sample has one answer token, which the first reveal shows: some ranks supervise nothing."""
    write_data(
        tmp_path / "uneven.jsonl",
        [{"prompt": "what is", "completion": " ".join(WORDS * 3) if i % 2 else "one"} for i in range(16)],
    )
    common = {
        "train_data": str(tmp_path / "uneven.jsonl"),
        "append_eos": False,
        "sequence_length": 20,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 1e9,
        "max_steps": 4,
        "save_strategy": "no",
        "gradient_accumulation_steps": accumulation,
    }
    run(*TRAIN, project("one", per_device_train_batch_size=2, **common))
    config = project("two", per_device_train_batch_size=1, ddp_backend="gloo", **common)
    run(*ON_TWO, config)
    one, two = head(tmp_path / "one"), head(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert max(losses(tmp_path / "one").values()) > 0


def test_processes_leave_the_group_and_end_its_threads(project):
    """Otherwise gloo may abort a process after everything is saved: its threads outlive the interpreter."""
    code = (
        "import sys, torch.distributed as dist; from pathlib import Path; from mrp_trainer.train import main\n"
        "main(sys.argv[1:]); assert not dist.is_initialized()\n"
        "threads = [task.read_text() for task in Path('/proc/self/task').glob('*/comm')]\n"
        "assert not [name for name in threads if 'gloo_runloop' in name], threads"
    )
    config = project(max_steps=1, ddp_backend="gloo")
    run(*ON_TWO[:-2], "--no-python", sys.executable, "-c", code, config)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("sdar.yaml", {"base_model": "JetLM/SDAR-4B-Chat", "output_dir": "heads/sdar-4b", "checkpointing": True}),
        (
            "tiny.yaml",
            {"base_model": RECIPES / "../sdar-tiny-mrp", "output_dir": "heads/tiny", "checkpointing": False},
        ),
    ],
)
def test_recipe_parses_without_a_deprecated_option(recipe, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        model_args, _, args = parse_arguments([str(RECIPES / recipe), "--bf16", "false"])
    assert model_args.base_model == str(expected["base_model"])
    assert args.output_dir == expected["output_dir"]
    assert args.activation_checkpointing == args.gradient_checkpointing == expected["checkpointing"]


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_both_names_of_activation_checkpointing_set_both_without_a_warning(name):
    options = [f"--{name}", "true", f"--{name}_kwargs", '{"preserve_rng_state": false}']
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        _, _, args = parse_arguments(options)
    assert args.activation_checkpointing is args.gradient_checkpointing is True
    expected = {"preserve_rng_state": False, "use_reentrant": False}
    assert args.activation_checkpointing_kwargs == args.gradient_checkpointing_kwargs == expected


def test_every_recipe_is_tested():
    files = {path.name for path in RECIPES.iterdir()}
    assert files == {"sdar.yaml", "tiny.yaml", "accelerate-ddp.yaml", "accelerate-fsdp2.yaml"}


def test_commands_in_the_recipe_set_the_sizes():
    """The commands in the comments parse, and every size keeps 16 rows per step."""
    text = (RECIPES / "sdar.yaml").read_text().replace(" \\\n#", "")
    commands = [line.split()[3:] for line in text.splitlines() if line.startswith("#   mrp train ")]
    parsed = [parse_arguments([str(RECIPES / "sdar.yaml"), *words[1:], "--bf16", "false"]) for words in commands]
    sizes = [model_args.base_model for model_args, _, _ in parsed]
    assert sizes == [f"JetLM/SDAR-{size}-Chat" for size in ("1.7B", "4B", "8B")]
    for _, _, args in parsed:
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    assert len({args.output_dir for _, _, args in parsed}) == 3


def test_paths_in_a_config_are_relative_to_its_folder(project, tmp_path, monkeypatch):
    path = project(base_model="base", train_data="data.jsonl", max_steps=1, output_dir="run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model_args, data_args, _ = parse_arguments([path])
    assert (model_args.base_model, data_args.train_data) == (str(tmp_path / "base"), str(tmp_path / "data.jsonl"))
    assert main([os.path.relpath(path)]) == 0
    assert head(tmp_path / "elsewhere" / "run")


def test_path_that_is_not_beside_the_config_is_left_as_it_is(project, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "here.jsonl").write_text("{}")
    model_args, data_args, _ = parse_arguments([project(base_model="org/name", train_data="here.jsonl")])
    assert (model_args.base_model, data_args.train_data) == ("org/name", "here.jsonl")


def test_tiny_recipe_trains(project, tmp_path):
    """Trains with the recipe's options on another tiny backbone and for fewer steps."""
    project()
    overrides = {
        "base_model": tmp_path / "base",
        "num_mrp_layers": 1,
        "train_data": tmp_path / "data.jsonl",
        "output_dir": tmp_path / "tiny",
        "max_steps": 3,
        "logging_steps": 1,
    }
    options = [word for name, value in overrides.items() for word in (f"--{name}", str(value))]
    assert main([str(RECIPES / "tiny.yaml"), *options]) == 0
    assert sorted(losses(tmp_path / "tiny")) == [1, 2, 3]
    assert head(tmp_path / "tiny")

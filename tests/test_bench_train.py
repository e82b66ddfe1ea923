import json

import pytest
import torch
from datasets import Dataset

from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.benchmarks import train as bench
from mrp_trainer.commands.cli import main as mrp

ROWS, LENGTH, K = 3, 16, 2


def test_one_step_is_the_step_that_the_trainer_takes(tiny_model, tmp_path):
    measured = tiny_model()
    step = bench.TrainerStep(measured, ROWS, LENGTH, K, str(tmp_path / "a"), learning_rate=1e-2)
    for part in (step.collate, step.loss_and_backward, step.optimize):
        part()
    trained = tiny_model()
    args = MRPTrainingArguments(
        output_dir=str(tmp_path / "b"),
        per_device_train_batch_size=ROWS,
        unroll_steps=K,
        max_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Dataset.from_list(bench.random_rows(ROWS, LENGTH, trained.config.vocab_size))
    MRPTrainer(trained, args, train_dataset=data, sequence_length=LENGTH).train()
    before = tiny_model().state_dict()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(measured.state_dict()[name], tensor, msg=name)
        assert torch.equal(tensor, before[name]) != name.startswith("mrp_head.")


def test_bare_work_has_the_sizes_of_the_step(tiny_model, tmp_path):
    model = tiny_model()
    step = bench.TrainerStep(model, ROWS, LENGTH, K, str(tmp_path))
    bare = bench.BareStep(model, step.batch)
    seen = {}
    model.model.register_forward_hook(lambda module, args, out: seen.update(backbone=args[0].shape))
    model.mrp_head.register_forward_hook(lambda module, args, out: seen.update(head=out.shape))
    for part in (bare.backbone, bare.head, bare.logits):
        part()
    assert seen == {"backbone": (ROWS * (2 + K), LENGTH), "head": (ROWS * (1 + K), LENGTH, 32)}
    reveal_step = step.batch["reveal_step"]
    assert bare.supervised == sum(int((reveal_step > k).sum()) for k in range(1, K + 1)) > 0
    assert all(p.grad is None for p in model.parameters())


def test_figures_follow_from_the_seconds(tiny_model, monkeypatch):
    seconds = {
        "collate": [1.0, 2.0, 1.0],
        "loss and backward": [6.0, 12.0, 6.0],
        "optimizer": [1.0, 2.0, 1.0],
        "backbone": [2.0, 4.0, 1.0],
        "head": [1.0, 2.0, 0.5],
        "logits": [1.0, 2.0, 0.5],
    }
    monkeypatch.setattr(bench, "interleaved", lambda parts, repeats, device: {name: seconds[name] for name in parts})
    result = bench.bench_train(tiny_model(), rows=ROWS, sequence_length=LENGTH, unroll_steps=K, repeats=3)
    assert (result.step_seconds, result.bare_seconds) == (8, 4)
    assert result.ratio == 2  # of 2, 2 and 4
    assert result.tokens == ROWS * LENGTH
    assert result.tokens_per_second == ROWS * LENGTH / 8
    assert result.split == {"collate": 0.125, "loss and backward": 0.75, "optimizer": 0.125}
    assert result.bare_split == {"backbone": 0.5, "head": 0.25, "logits": 0.25}


@pytest.mark.parametrize("option", ["rows", "sequence_length", "unroll_steps", "repeats"])
def test_numbers_below_one_are_named(tiny_model, option):
    with pytest.raises(ValueError, match=option):
        bench.bench_train(tiny_model(), **{option: 0})


@pytest.mark.parametrize("extra", [[], ["--gradient-checkpointing", "--bf16", "--choice-weight", "0.1"]])
def test_command_prints_json(tiny_model, tmp_path, capsys, extra):
    tiny_model().save_pretrained(tmp_path)
    sizes = ["--rows", "2", "--sequence-length", "16", "--unroll-steps", "2", "--repeats", "1", "--device", "cpu"]
    assert mrp(["bench", "train", str(tmp_path), *sizes, *extra, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    result = answer["result"]
    assert result["tokens"] == 32
    assert result["ratio"] == pytest.approx(result["step_seconds"] / result["bare_seconds"])  # one round
    assert sum(result["split"].values()) == pytest.approx(1)
    assert sum(result["bare_split"].values()) == pytest.approx(1)
    assert "backbone of 2 layers of 32 in float32, head of 1 in float32" in answer["network"]
    assert answer["step"].endswith("choice_weight 0.1, gradient checkpointing" if extra else "K = 2")


def test_step_runs_with_the_attention_that_training_takes(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "mrp_trainer.checkpoints.loading.default_attention", lambda device, autocast: "eager" if autocast else "sdpa"
    )
    tiny_model().save_pretrained(tmp_path)
    sizes = ["--rows", "1", "--sequence-length", "8", "--unroll-steps", "1", "--repeats", "1", "--device", "cpu"]
    for extra, attention in ([], "sdpa"), (["--bf16"], "eager"):
        assert mrp(["bench", "train", str(tmp_path), *sizes, *extra]) == 0
        assert f"attention {attention}" in capsys.readouterr().out


def test_a_gpu_that_training_would_not_take_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("mrp_trainer.checkpoints.loading.usable_device", lambda name: torch.device("cuda:1"))
    assert mrp(["bench", "train", "--shape", "4b", "--device", "cuda:1"]) == 2
    assert "got cuda:1: training takes the first GPU that it sees, so set CUDA_VISIBLE_DEVICES=1" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--layers", "--block-size"])
def test_sizes_of_a_shape_are_refused_for_a_checkpoint(capsys, option):
    """They were ignored."""
    assert mrp(["bench", "train", "words", option, "2", "--device", "cpu"]) == 2
    assert f"{option} is for --shape, and MODEL words has its own: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--layers", "--head-layers", "--block-size"])
def test_zero_is_not_taken_for_the_default(capsys, option):
    assert mrp(["bench", "train", "--shape", "1.7b", option, "0", "--device", "cpu"]) == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_recorded_settings_are_the_parameters_of_the_command(tiny_model, tmp_path, monkeypatch):
    """`model` was overwritten with the sentence of the heading."""
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("model")
    sizes = ["--rows", "1", "--sequence-length", "8", "--unroll-steps", "1", "--repeats", "1", "--device", "cpu"]
    assert mrp(["bench", "train", "model", *sizes, "--record", "result.json"]) == 0
    settings = json.loads((tmp_path / "result.json").read_text())["settings"]
    assert settings["model"] == "model" and settings["network"].startswith("model: backbone of 2 layers of 32")


def test_model_or_shape_but_not_both(capsys):
    assert mrp(["bench", "train"]) == 2
    assert mrp(["bench", "train", "somewhere", "--shape", "4b"]) == 2
    assert mrp(["bench", "train", "--shape", "2b"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("give either MODEL or --shape") == 2
    assert "--shape must be one of '1.7b', '4b', '8b', got '2b'" in shown

"""Options of transformers' TrainingArguments: each works here, with a test, or is refused with the reason."""

import json
import math
import shutil
from dataclasses import fields

import pytest
import torch
from datasets import Dataset
from test_mrp_trainer import rows
from torch._dynamo.utils import counters
from train_runs import head, logs, losses, same, write_data

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.checkpoints.head_files import load_head
from mrp_trainer.refused_options import REFUSED, REFUSED_WITH_MUON
from mrp_trainer.train import main

OTHER = {
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 0.5,
    "debug": "underflow_overflow",
    "deepspeed": {"stage": 2},
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "label_names": ["labels"],
    "label_smoothing_factor": 0.1,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "optim_target_modules": ["q_proj"],
    "parallelism_config": {"tp_size": 2},
}
CPP_COMPILER = shutil.which("g++") or shutil.which("clang++")
KNOWN = {field.name: field for field in fields(MRPTrainingArguments)}


def other(name):
    """A value that is not the default."""
    return OTHER[name] if name in OTHER else not KNOWN[name].default


@pytest.mark.parametrize("name", [name for name in REFUSED if name in KNOWN])
def test_option_without_a_place_here_is_refused_with_the_reason(tmp_path, name):
    """Most of them were taken silently: the head and the log were those of a run without the option."""
    with pytest.raises(ValueError) as raised:
        MRPTrainingArguments(str(tmp_path), **{name: other(name)})
    assert str(raised.value) == f"{name}={other(name)!r} is not supported: {REFUSED[name]}"


@pytest.mark.parametrize("name", REFUSED_WITH_MUON)
def test_option_of_another_optimizer_is_refused_with_muon(tmp_path, name):
    with pytest.raises(ValueError, match=f"^{name}=.* is not supported: muon_learning_rate chooses the optimizers"):
        MRPTrainingArguments(str(tmp_path), muon_learning_rate=0.02, **{name: other(name)})
    MRPTrainingArguments(str(tmp_path), muon_learning_rate=0.02, optim=KNOWN["optim"].default)


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise"])
def test_optimizer_that_steps_before_its_gradient_is_checked_is_refused(tmp_path, optim):
    with pytest.raises(ValueError, match=f"optim={optim} is not supported"):
        MRPTrainingArguments(str(tmp_path), optim=optim)


@pytest.mark.parametrize(("name", "value"), [("split_batches", True), ("even_batches", False)])
def test_batches_under_which_rows_count_twice_or_never_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"accelerator_config: {name} must be"):
        MRPTrainingArguments(str(tmp_path), accelerator_config={name: value})


@pytest.mark.parametrize("name", ["compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_function_that_would_never_be_called_is_refused(tiny_model, tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        MRPTrainer(tiny_model(), MRPTrainingArguments(str(tmp_path), use_cpu=True), **{name: print})


def test_arguments_can_be_made_again_from_their_own_values(tmp_path):
    args = MRPTrainingArguments(str(tmp_path), use_cpu=True)
    again = MRPTrainingArguments(**{f.name: getattr(args, f.name) for f in fields(args) if f.init})
    assert again.to_dict() == args.to_dict()


METRICS = {"loss": False, "eval_loss": False, "kl_after_1": False, "kl_removed_2": True, "eval_accepted_1": True}


@pytest.mark.parametrize(("metric", "greater"), METRICS.items())
def test_figure_that_chooses_the_best_head_has_the_right_direction(tmp_path, metric, greater):
    """transformers takes every figure whose name does not end in "loss" to be better when greater, a KL too."""
    assert MRPTrainingArguments(str(tmp_path), metric_for_best_model=metric).greater_is_better is greater
    given = MRPTrainingArguments(str(tmp_path), metric_for_best_model=metric, greater_is_better=not greater)
    assert given.greater_is_better is not greater


def test_figure_that_does_not_exist_is_refused_before_the_first_evaluation(tmp_path):
    with pytest.raises(ValueError, match="metric_for_best_model=perplexity is no figure of an evaluation"):
        MRPTrainingArguments(str(tmp_path), metric_for_best_model="perplexity")


# --- options that work


@pytest.fixture
def held_out(project, tmp_path):
    """Write the config of a run with held-out data."""
    write_data(tmp_path / "held-out.jsonl", [{"prompt": "what is one ?", "completion": "so one . two"}] * 6)

    def write(name="run", **options):
        defaults = {"eval_data": str(tmp_path / "held-out.jsonl"), "eval_steps": 2, "decode_new_tokens": 8}
        return project(name, **defaults | options)

    return write


@pytest.mark.parametrize("option", [{"torch_compile_backend": "eager"}, {"full_determinism": True}], ids=str)
def test_options_of_speed_and_determinism_give_the_same_head(project, tmp_path, option):
    main([project("plain", max_steps=2)])
    try:
        main([project("other", max_steps=2, **option)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(head(tmp_path / "other"), head(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.skipif(CPP_COMPILER is None, reason="inductor needs a C++ compiler (g++ or clang++) for the CPU")
def test_compiled_training_gives_the_head_of_plain_training(project, tmp_path):
    """With inductor, the default. It rounds in another order, which Adam would magnify at gradients near zero."""
    options = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "unroll_steps": 1}
    main([project("plain", **options)])
    graphs = counters["stats"]["unique_graphs"]
    main([project("other", **options, torch_compile=True)])
    assert counters["stats"]["unique_graphs"] > graphs  # it was compiled
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    plain, compiled = head(tmp_path / "plain"), head(tmp_path / "other")
    assert compiled.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("metric", ["loss", "kl_after_1"])
def test_best_head_is_saved_at_the_end(held_out, tmp_path, metric):
    """The learning rate is so high that the head gets worse, so the best one is not the last."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": metric, "learning_rate": 0.3}
    main([held_out(**options)])
    evaluated = {log["step"]: log[f"eval_{metric}"] for log in logs(tmp_path / "run") if f"eval_{metric}" in log}
    best = min(evaluated, key=evaluated.get)
    assert best < 6
    assert same(head(tmp_path / "run"), head(tmp_path / "run" / f"checkpoint-{best}"))


def test_figure_that_could_not_be_measured_does_not_end_the_run(held_out, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("mrp_trainer.mrp_trainer.decode_figures", fail)
    assert main([held_out(load_best_model_at_end=True, metric_for_best_model="tokens_per_forward")]) == 0
    found = [log["eval_tokens_per_forward"] for log in logs(tmp_path / "run") if "eval_loss" in log]
    assert len(found) == 3 and all(map(math.isnan, found))
    assert same(head(tmp_path / "run"), head(tmp_path / "run" / "checkpoint-6"))


def test_evaluation_on_start_measures_the_initial_head(held_out, tmp_path):
    main([held_out(eval_on_start=True, learning_rate=0.0)])
    found = {log["step"]: log["eval_loss"] for log in logs(tmp_path / "run") if "eval_loss" in log}
    assert sorted(found) == [0, 2, 4, 6] and len(set(found.values())) == 1


def test_checkpoint_of_the_model_only_is_a_head_that_is_not_resumed_from(project, tmp_path):
    main([project("plain")])
    main([project(save_only_model=True)])
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert same(head(checkpoint), head(tmp_path / "plain" / "checkpoint-4"))
    assert not list(checkpoint.glob("optimizer*"))
    with pytest.raises(ValueError, match="lacks optimizer.pt"):
        main([project(resume_from_checkpoint=str(checkpoint))])


def test_rows_grouped_by_length_fill_batches_of_like_lengths(tiny_model, tmp_path):
    """Of 64 rows of two lengths, four random mega-batches of 16 are sorted: at most one batch in each is mixed."""
    data = [{**rows(1, length, seed=number)[0], "sample_ids": [number]} for number, length in enumerate([8, 40] * 32)]
    mixed = {}
    for strategy in ("random", "group_by_length"):
        options = {"per_device_train_batch_size": 4, "train_sampling_strategy": strategy, "use_cpu": True}
        args = MRPTrainingArguments(str(tmp_path), **options)
        trainer = MRPTrainer(tiny_model(), args, train_dataset=Dataset.from_list(data))
        batches = [(batch["segment_ids"] >= 0).sum(1) for batch in trainer.get_train_dataloader()]
        mixed[strategy] = sum(bool(lengths.min() < lengths.max()) for lengths in batches)
    assert mixed["group_by_length"] <= 4 < mixed["random"]


def test_tokens_seen_are_those_of_the_noisy_stream(project, tmp_path):
    main([project(max_steps=2, include_num_input_tokens_seen=True)])
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["num_input_tokens_seen"] == 2 * 4 * 16
    assert sorted(losses(tmp_path / "run")) == [1, 2]


def test_prediction_loss_only_is_how_every_evaluation_works(held_out, tmp_path):
    main([held_out("plain", max_steps=2)])
    main([held_out("only", max_steps=2, prediction_loss_only=True)])
    plain, only = ([log["eval_loss"] for log in logs(tmp_path / n) if "eval_loss" in log] for n in ("plain", "only"))
    assert plain == only


def test_head_of_a_best_checkpoint_loads_onto_its_backbone(held_out, tmp_path):
    main([held_out(save_strategy="best", metric_for_best_model="loss")])
    [*_, checkpoint] = sorted((tmp_path / "run").glob("checkpoint-*"))
    model = MRPForDiffusionLM.from_backbone(tmp_path / "base", num_mrp_layers=1)
    load_head(model, checkpoint)
    assert same(dict(model.mrp_head.state_dict()), head(checkpoint))

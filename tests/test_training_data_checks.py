"""What could end a run after hours, or make it worthless, is found before the first step or costs a figure only."""

import json

import pytest
from datasets import Dataset
from train_runs import head, logs, write_data

from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.argument_parsing import parse_arguments
from mrp_trainer.checkpoints.head_files import read_head_config
from mrp_trainer.data.collator import MRPCollator
from mrp_trainer.evaluation.acceptance import decodable
from mrp_trainer.train import build_trainer, main

GOOD = {"prompt": "what is one ?", "completion": "so one . two and two . three then four . five"}
BAD = {
    "mask token": ("what is [MASK] ?", r"1 held-out prompt is not decoded: input_ids holds the mask token 3"),
    "too long": (
        "what is one plus two plus three minus four",
        r"1 held-out prompt is not decoded: input_ids has a prompt of 9 tokens, more than max_position_embeddings=8",
    ),
}


@pytest.fixture
def with_held_out(project, tmp_path):
    """Write a config of a run over a backbone with 8 positions that evaluates these held-out samples."""

    def write(*records, **options):
        config = tmp_path / "base" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 8}))
        write_data(tmp_path / "held-out.jsonl", records)
        defaults = {"eval_data": str(tmp_path / "held-out.jsonl"), "eval_steps": 3, "decode_new_tokens": 24}
        return project(**defaults | options)

    return write


def evaluations(folder):
    return [log for log in logs(folder) if "eval_loss" in log]


@pytest.mark.parametrize("kind", BAD)
def test_held_out_prompt_that_cannot_be_decoded_is_left_out_and_counted(with_held_out, tmp_path, capsys, kind):
    """Such a prompt ended the run at its first evaluation, or after training before anything was saved."""
    prompt, message = BAD[kind]
    config = with_held_out(GOOD, GOOD | {"prompt": prompt})
    trainer = build_trainer(*parse_arguments([config]))
    kept, refused = decodable([[5, 6], [5, 3] if kind == "mask token" else [5] * 9], trainer.model.config)
    assert kept == [[5, 6]] and sum(refused.values()) == 1
    assert main([config]) == 0
    assert capsys.readouterr().err.count(message) == 1
    assert [log["eval_tokens_per_forward"] > 0 for log in evaluations(tmp_path / "run")] == [True, True]
    assert read_head_config(tmp_path / "run")["trained_acceptance"] is not None


def test_without_any_prompt_that_can_be_decoded_the_run_has_no_figures_of_decoding(with_held_out, tmp_path):
    assert main([with_held_out(GOOD | {"prompt": BAD["mask token"][0]})]) == 0
    assert ["eval_tokens_per_forward" in log for log in evaluations(tmp_path / "run")] == [False, False]
    assert read_head_config(tmp_path / "run")["trained_acceptance"] is None


def test_failure_in_measuring_is_a_warning_and_the_head_was_saved_before(with_held_out, tmp_path, capsys, monkeypatch):
    """The acceptance of the trained head was once measured before the head was saved."""
    saved = []

    def fail(*arguments):
        saved.append((tmp_path / "run" / "mrp_head.safetensors").exists())
        raise RuntimeError("out of memory")

    monkeypatch.setattr("mrp_trainer.mrp_trainer.decode_figures", fail)
    monkeypatch.setattr("mrp_trainer.mrp_trainer.acceptance_range", fail)
    assert main([with_held_out(GOOD)]) == 0
    assert saved == [False, False, True]  # two evaluations, and the measurement after training
    assert (
        "could not be decoded, and their figures are missing: RuntimeError('out of memory')" in capsys.readouterr().err
    )
    assert len(evaluations(tmp_path / "run")) == 2
    assert head(tmp_path / "run") and read_head_config(tmp_path / "run")["trained_acceptance"] is None


@pytest.mark.parametrize("limit", [{"max_steps": -1}, {"max_steps": 3}])
def test_fewer_rows_than_a_batch_are_refused_when_incomplete_batches_are_dropped(project, tmp_path, limit):
    """This trained nothing and saved an untrained head with status 0."""
    config = project(per_device_train_batch_size=26, dataloader_drop_last=True, **limit)
    with pytest.raises(
        ValueError, match="train_dataset has 25 rows, and dataloader_drop_last .* batch of 26 on each of 1 device:"
    ):
        main([config])
    assert not (tmp_path / "run" / "mrp_head.safetensors").exists()
    assert main([project(per_device_train_batch_size=25, dataloader_drop_last=True, **limit)]) == 0


def test_held_out_rows_that_do_not_fill_a_batch_are_refused_too(with_held_out):
    """Their loss would be that of no row at all: 0."""
    config = with_held_out(GOOD, per_device_eval_batch_size=3, dataloader_drop_last=True)
    with pytest.raises(ValueError, match="eval_dataset has 2 rows"):  # the sample is cut into two
        main([config])


def test_data_sets_without_rows_are_named(tiny_model, tmp_path):
    trainer = MRPTrainer(tiny_model(), MRPTrainingArguments(str(tmp_path), use_cpu=True), train_dataset=[])
    with pytest.raises(ValueError, match="train_dataset has no rows"):
        trainer.train()


def test_rows_longer_than_those_of_the_collator_are_refused_when_the_trainer_is_built(tiny_model, tmp_path):
    """A held-out row that does not fit ended the run at the first evaluation."""
    row = {"input_ids": [5] * 12, "answer_mask": [1] * 12, "lengths": [12], "sample_ids": [0]}
    collator = MRPCollator(block_size=4, mask_token_id=3, steps=3, sequence_length=8)
    with pytest.raises(ValueError, match="1 of 1 prepared rows are longer than 8 tokens"):
        MRPTrainer(
            tiny_model(),
            MRPTrainingArguments(str(tmp_path), use_cpu=True),
            data_collator=collator,
            eval_dataset=Dataset.from_list([row]),
        )


LONGEST = [({}, 13), ({"packing": True, "sequence_length": 64}, 13), ({"streaming": True}, 16)]


@pytest.mark.parametrize("enough", [False, True])
@pytest.mark.parametrize(("options", "longest"), LONGEST, ids=str)
def test_samples_beyond_the_positions_of_the_backbone_are_said_once(
    project, tmp_path, capsys, options, longest, enough
):
    """Packed rows are longer than 13 tokens, but positions restart at each sample. Of a stream only rows are known."""
    path = project(**options, max_steps=2)
    config = tmp_path / "base" / "config.json"
    limit = longest if enough else longest - 1
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": limit}))
    main([path])
    message = f"up to {longest} tokens, but the backbone's max_position_embeddings is {limit}"
    assert capsys.readouterr().err.count(message) == (not enough)

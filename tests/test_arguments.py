"""Options of training: YAML and command line, defaults that depend on others, ranges, help, errors."""

import dataclasses

import pytest
from transformers import TrainingArguments

from hub_cards.tasks.tasks import TASKS
from mrp_trainer.argument_parsing import ARGUMENTS, OTHER_NAMES, argument_parser, option_names, parse_arguments
from mrp_trainer.arguments import DataArguments, ModelArguments, MRPTrainingArguments


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_yaml_sets_options_of_all_groups_and_the_command_line_wins(config):
    path = config("base_model: some/model\nsequence_length: 64\nunroll_steps: 2\nreveal_counts: [1, 3]\n")
    model, data, training = parse_arguments([path, "--unroll_steps", "4", "--kl_temperature", "0.5"])
    assert (model.base_model, data.sequence_length, training.reveal_counts) == ("some/model", 64, [1, 3])
    assert (training.unroll_steps, training.kl_temperature) == (4, 0.5)


@pytest.mark.parametrize("spelling", ["unroll_steps", "unroll-steps"])
def test_options_are_accepted_in_kebab_case_and_snake_case(spelling):
    assert parse_arguments([f"--{spelling}", "4"])[2].unroll_steps == 4
    assert parse_arguments([f"--{spelling}=4"])[2].unroll_steps == 4


@pytest.mark.parametrize("name", ["words", "sdar-tiny-mrp"])
def test_base_model_may_be_an_embedded_checkpoint(config, name):
    expected = str(TASKS["words"].folder)
    assert parse_arguments(["--base-model", name])[0].base_model == expected
    assert parse_arguments([config(f"base_model: {name}\n")])[0].base_model == expected


@pytest.mark.parametrize("none", ["none", "None"])
def test_none_overrides_what_the_file_sets(config, none):
    path = config("num_mrp_layers: 2\nlora_rank: 4\nmrp_residual: false\n")
    model = parse_arguments([path, "--num-mrp-layers", none, f"--lora_rank={none}", "--mrp-residual", none])[0]
    assert model.num_mrp_layers is model.lora_rank is model.mrp_residual is None
    assert parse_arguments([config(f"num_mrp_layers: {none}\n")])[0].num_mrp_layers is None
    assert parse_arguments(["--report-to", "none"])[2].report_to == []  # here none is a value of its own


def test_number_that_yaml_reads_as_text_is_still_a_number(config):
    assert parse_arguments([config("learning_rate: 5e-4\n")])[2].learning_rate == 5e-4


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("unrol_steps", "unroll_steps"), ("sequence_len", "sequence_length"), ("learnin_rate", "learning_rate")],
)
def test_unknown_key_is_an_error_that_names_the_nearest(config, given, nearest):
    with pytest.raises(ValueError, match=f"'{given}'.*'{nearest}'"):
        parse_arguments([config(f"{given}: 1\n")])
    with pytest.raises(ValueError, match=f"'{given}'.*'{nearest}'"):
        parse_arguments([f"--{given}", "1"])


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("lr", "learning_rate"),
        ("epochs", "num_train_epochs"),
        ("batch-size", "per_device_train_batch_size"),
        ("lora_r", "lora_rank"),
    ],
)
def test_names_of_other_trainers_are_answered_with_ours(config, given, ours):
    with pytest.raises(ValueError, match=f"unknown option '{given}' on the command line: did you mean '{ours}'"):
        parse_arguments([f"--{given}", "1"])
    with pytest.raises(ValueError, match=f"unknown option '{given}' in .*config.yaml: did you mean '{ours}'"):
        parse_arguments([config(f"{given}: 1\n")])


def test_every_name_of_another_trainer_leads_to_an_option():
    assert set(OTHER_NAMES.values()) <= set(option_names())
    assert not set(OTHER_NAMES) & set(option_names())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unroll_steps", "0"),
        ("unroll_steps", "two"),
        ("reveal", "best"),
        ("reveal_counts", "0"),
        ("noise_eps", "1"),
        ("kl_temperature", "0"),
        ("kl_chunk_rows", "some"),
        ("kl_backend", "numpy"),
        ("choice_weight", "-0.1"),
        ("gradient_checkpointing_kwargs", '{"use_reentrant": true}'),
        ("remove_unused_columns", "true"),
        ("long_samples", "cut"),
        ("sequence_length", "0"),
        ("head_init", "zeros"),
        ("num_mrp_layers", "0"),
        ("backbone_dtype", "int8"),
    ],
)
def test_value_out_of_range_is_an_error_that_names_the_option(name, value):
    with pytest.raises(ValueError, match=name):
        parse_arguments([f"--{name}", value])


@pytest.mark.parametrize("option", [("--kl_temperature", "0.5"), ("--choice_weight", "0.1")])
def test_options_of_the_kl_are_refused_with_another_divergence(option):
    with pytest.raises(ValueError, match=f"{option[0][2:]}={option[1]} needs divergence: kl, got total_variation"):
        parse_arguments(["--divergence", "total_variation", *option])


@pytest.mark.parametrize("given", [[], ["--gradient_checkpointing_kwargs", '{"preserve_rng_state": false}']])
def test_gradient_checkpointing_is_not_reentrant_by_default(given):
    _, _, training = parse_arguments(["--gradient_checkpointing", "true", *given])
    assert training.gradient_checkpointing_kwargs["use_reentrant"] is False


def test_config_that_is_missing_invalid_or_not_a_mapping_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        parse_arguments([str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="not valid YAML"):
        parse_arguments([config("a: [1\n")])
    with pytest.raises(ValueError, match="list"):
        parse_arguments([config("- unroll_steps\n")])


def test_stray_word_on_the_command_line_is_refused(config):
    with pytest.raises(ValueError, match="'again'"):
        parse_arguments([config("unroll_steps: 2\n"), "again"])


def test_no_two_groups_share_an_option_and_ours_have_help_text():
    names = option_names()
    assert len(names) == len(set(names))
    own = [f for group in (ModelArguments, DataArguments) for f in dataclasses.fields(group)]
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    own += [f for f in dataclasses.fields(MRPTrainingArguments) if f.name not in inherited]
    assert [f.name for f in own if not f.metadata.get("help")] == []


def test_help_lists_every_option_with_its_default():
    text = " ".join(argument_parser().format_help().split())
    for name in option_names():
        if name != "remove_unused_columns":
            assert f"--{name.replace('_', '-')}" in text
    assert "Number of tokens per row. [default: 1024]" in text
    assert "mrp train hub_cards/recipes/tiny.yaml" in text


def test_help_describes_a_boolean_option_once_with_its_negation():
    text = argument_parser().format_help()
    assert "--packing / --no-packing" in text and text.count("Put several samples into one row.") == 1
    assert parse_arguments(["--no-packing"])[1].packing is False
    assert parse_arguments(["--packing"])[1].packing is True


def test_schedule_of_another_type_gets_no_minimum():
    assert MRPTrainingArguments().lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert not MRPTrainingArguments(lr_scheduler_type="linear").lr_scheduler_kwargs


def test_every_default_is_valid():
    for group in ARGUMENTS:
        group()


def test_held_out_data_are_evaluated_whenever_a_checkpoint_is_saved(config):
    path = config("train_data: a.jsonl\neval_data: b.jsonl\nsave_steps: 70\nper_device_train_batch_size: 3\n")
    args = parse_arguments([path])[2]
    assert (args.eval_strategy, args.eval_steps, args.per_device_eval_batch_size) == ("steps", 70, 3)
    assert parse_arguments([path, "--eval_steps", "20"])[2].eval_steps == 20
    assert parse_arguments([path, "--eval_strategy", "steps"])[2].eval_steps == 70
    assert parse_arguments([path, "--eval_strategy", "epoch"])[2].eval_strategy == "epoch"


def test_training_data_are_refused_as_held_out_data(config):
    path = config("train_data: some/data\neval_data: some/data\n")
    with pytest.raises(ValueError, match="eval_data some/data with eval_split 'train' is the training data"):
        parse_arguments([path])
    assert parse_arguments([path, "--eval_split", "test"])[1].eval_split == "test"


def test_one_reveal_count_needs_no_list(config):
    assert parse_arguments([config("reveal_counts: 2\n")])[2].reveal_counts == [2]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_grad_norm", float("nan"), "max_grad_norm must be at least 0 .0: no clipping., got nan"),
        ("max_grad_norm", -1.0, "max_grad_norm must be at least 0 .0: no clipping., got -1.0"),
        ("save_total_limit", 0, "save_total_limit must be a whole number of at least 1, got 0"),
    ],
)
def test_values_that_would_switch_an_option_off_in_silence_are_refused(tmp_path, option, value, message):
    with pytest.raises(ValueError, match=message):
        MRPTrainingArguments(str(tmp_path), **{option: value})

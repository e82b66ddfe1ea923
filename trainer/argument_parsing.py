"""How the options of training are read: from a YAML file and the command line; their help and errors."""

import difflib
import textwrap
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from .arguments import DataArguments, ModelArguments, MRPTrainingArguments
from .checkpoints.weight_files import local_source

ARGUMENTS = (ModelArguments, DataArguments, MRPTrainingArguments)
# Options that a config file may give as a path relative to its own folder.
PATH_OPTIONS = ("base_model", "base_adapter", "head", "train_data", "eval_data")
# Names of options in other trainers (peft, trl, axolotl), and what the same thing is called here.
OTHER_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "seq_length": "sequence_length",
    "cutoff_len": "sequence_length",
    "sample_packing": "packing",
    "lora_r": "lora_rank",
    "model": "base_model",
    "model_name_or_path": "base_model",
    "dtype": "backbone_dtype",
    "torch_dtype": "backbone_dtype",
    "adapter": "base_adapter",
    "data": "train_data",
    "dataset": "train_data",
    "dataset_name": "train_data",
    "dataset_path": "train_data",
    "eval_dataset": "eval_data",
    "dataset_num_proc": "preprocessing_processes",
    "output": "output_dir",
    "resume": "resume_from_checkpoint",
    "steps": "max_steps",
    "temperature": "kl_temperature",
}
NONE = ("none", "None")


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(message)

    def format_help(self) -> str:
        """The options in groups; transformers' own would also describe `--no-x` as it describes `--x`."""
        parts = [self.format_usage(), textwrap.fill(self.description, 100), ""]
        for heading, rows in describe_options().items():
            parts.append(f"{heading}:")
            for name, text in rows:
                parts += [f"  {name}", textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)]
            parts.append("")
        return "\n".join([*parts, self.epilog, ""])


def argument_parser() -> HfArgumentParser:
    """The parser of `CONFIG.yaml --key value ...`; its help lists every option with its default."""
    parser = _Parser(
        ARGUMENTS,
        prog="mrp train",
        usage="%(prog)s [CONFIG.yaml] [--key value ...]",
        description="Train a head on a frozen backbone. Options come from a YAML file and are overridden by --key "
        "value, in kebab-case or snake_case.",
        epilog="Example:\n  mrp train hub_cards/recipes/tiny.yaml --learning-rate 5e-4 --output-dir heads/tiny",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml")
    return parser


def describe_options() -> dict[str, list[tuple[str, str]]]:
    """Name and help text of every option, by the heading of its group; this package's own options come first.

    Options of `TrainingArguments` that have another default or meaning here count as this package's own.
    """
    inherited = {one.name: one for one in fields(TrainingArguments)}
    own = [one for one in fields(MRPTrainingArguments) if inherited.get(one.name) is not one]
    groups = {
        "Model": fields(ModelArguments),
        "Data": fields(DataArguments),
        "Training": own,
        "Options of transformers' TrainingArguments": [one for one in fields(MRPTrainingArguments) if one not in own],
    }
    return {
        heading: [_describe(one) for one in group if one.init and one.metadata.get("help") != SUPPRESS]
        for heading, group in groups.items()
    }


def _describe(option: Field) -> tuple[str, str]:
    """How an option is written on the command line, and its help text with the default."""
    name = option.name.replace("_", "-")
    default = option.default_factory() if option.default is MISSING else option.default
    default = default.value if isinstance(default, Enum) else default
    text = " ".join(str(option.metadata.get("help", "")).replace("%%", "%").split())
    shown = [] if default is None else [f"[default: {str(default).lower() if isinstance(default, bool) else default}]"]
    return f"--{name} / --no-{name}" if default is True else f"--{name}", " ".join([text, *shown])


def parse_arguments(argv: Sequence[str]) -> tuple[ModelArguments, DataArguments, MRPTrainingArguments]:
    """Read the options from a YAML file and the command line, which overrides the file.

    Args:
        argv: `[CONFIG.yaml] [--key value ...]`. The value none sets an option to None whose default is None.

    Raises:
        ValueError: for an unknown option (naming the nearest one), a value of the wrong type or out of range.
    """
    parser = argument_parser()
    words, unset = _without_none(argv)
    known, unknown = parser.parse_known_args(words)
    for word in sorted(unknown, key=lambda word: not word.startswith("--")):
        if word.startswith("--"):
            raise _unknown_option(word[2:].split("=")[0], "on the command line")
        raise ValueError(f"unexpected {word!r} on the command line: options are given as --key value")
    if known.config is not None:
        parser.set_defaults(**read_config(known.config))
    parser.set_defaults(**dict.fromkeys(unset))
    given = parser.parse_known_args(words)[0]
    if given.eval_data is not None and given.eval_strategy == "no":  # load_best_model_at_end needs to know it
        parser.set_defaults(eval_strategy="steps")
    model_args, data_args, args, _ = parser.parse_args_into_dataclasses(words)
    if model_args.base_model is not None:
        model_args.base_model = local_source(model_args.base_model)
    if data_args.eval_data is not None and args.eval_strategy == "no":
        args.eval_strategy, args.eval_steps = IntervalStrategy.STEPS, args.eval_steps or args.save_steps
    return model_args, data_args, args


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a flat YAML file of options.

    A relative path in `PATH_OPTIONS` is looked up in the folder of the file first. If nothing is there it is left
    unchanged: relative to the current folder, or a Hub id. `output_dir` is always relative to the current folder.

    Args:
        path: path of the file. The value none sets an option to None whose default is None.

    Raises:
        ValueError: when it is not a mapping, or has a key that is not an option, naming the nearest one.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got a {type(values).__name__}")
    for key in values:
        if key not in option_names():
            raise _unknown_option(str(key), f"in {path}")
    for name in PATH_OPTIONS:
        beside = path.parent / str(values.get(name))
        if name in values and beside.exists():
            values[name] = str(beside)
    optional = _optional_names()
    return {key: None if key in optional and value in NONE else value for key, value in values.items()}


def option_names() -> list[str]:
    """Names of all options, in snake_case."""
    return [one.name for arguments in ARGUMENTS for one in fields(arguments) if one.init]


def _optional_names() -> set[str]:
    """Names of the options whose default is None; for others, such as report_to, none may be a value."""
    return {one.name for arguments in ARGUMENTS for one in fields(arguments) if one.default is None}


def _without_none(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--name none` of options whose default is None from the other words; returns those words and names."""
    optional, words, unset = _optional_names(), [], []
    for word in argv:
        option = words[-1][2:].replace("-", "_") if words and words[-1].startswith("--") else None
        name, _, value = word.removeprefix("--").partition("=")
        if word in NONE and option in optional:
            words.pop()
            unset.append(option)
        elif word.startswith("--") and value in NONE and name.replace("-", "_") in optional:
            unset.append(name.replace("-", "_"))
        else:
            words.append(word)
    return words, unset


def _unknown_option(given: str, where: str) -> ValueError:
    name = given.replace("-", "_")
    near = OTHER_NAMES.get(name) or difflib.get_close_matches(name, option_names(), n=1, cutoff=0.0)[0]
    return ValueError(f"unknown option {given!r} {where}: did you mean {near!r}?")

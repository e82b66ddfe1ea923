"""The `mrp` command as a whole: its help, how it reports errors, and what may be written on its command line."""

import ast
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mrp_trainer.commands import cli
from mrp_trainer.commands.cli import app, main
from mrp_trainer.commands.parsing import generate_options

ROOT = Path(__file__).parents[1]
BLOCK4 = ROOT / "tests" / "golden" / "block4"
COMMANDS = [
    "demo",
    "convert",
    "train",
    "trajectories",
    "generate",
    "eval",
    "calibrate",
    "claims",
    "verify",
    "push",
    "bench",
]
BENCHMARKS = ["loss", "decode", "rules", "shapes", "train"]


def shown_help(*words) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="mrp")
    assert result.exit_code == 0, result.output
    return result.output


def expect_error(capsys, *argv) -> str:
    """Run a command that must fail; returns the one line on stderr."""
    status = main(list(map(str, argv)))
    shown = capsys.readouterr()
    assert status == 2 and shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert line.startswith("mrp: error: ")
    return line


# --- help


def test_help_lists_every_command():
    text = shown_help()
    assert [
        line.split()[0] for line in text[text.index("Commands:") :].splitlines()[1 : 1 + len(COMMANDS)]
    ] == COMMANDS
    text = shown_help("bench")
    assert [
        line.split()[0] for line in text[text.index("Commands:") :].splitlines()[1 : 1 + len(BENCHMARKS)]
    ] == BENCHMARKS


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_command_shows_the_help(capsys, words):
    assert main(words) == 0
    assert "Usage: mrp" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--help", "", "bench", "eval --help", "bench train --help", "genrate"])
def test_help_and_usage_errors_load_neither_torch_nor_transformers(words):
    code = (
        f"import sys; from mrp_trainer.commands.cli import main; main({words.split()}); "
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*COMMANDS, *(f"bench {name}" for name in BENCHMARKS)])
def test_every_command_has_help_that_ends_with_an_example(name):
    text = shown_help(*name.split())
    assert text.startswith(f"Usage: mrp {name} ")
    heading, example = text.rstrip().splitlines()[-2:]
    assert heading.strip() == "Example:" and example.strip().startswith(f"mrp {name} ".rstrip())


def test_options_of_training_come_before_those_of_transformers():
    text = shown_help("train")
    ours, theirs = text.index("--unroll-steps"), text.index("Options of transformers' TrainingArguments:")
    assert ours < theirs < text.index("--weight-decay")


def test_the_installed_command_is_this_one():
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("mrp = "))
    module, function = line.split('"')[1].split(":")
    assert getattr(import_module(module), function) is main


def test_python_runs_the_package_as_the_command():
    command = [sys.executable, "-m", "mrp_trainer.commands", "push", str(BLOCK4)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Missing argument 'REPO_ID'" in done.stderr


def test_no_other_part_of_the_package_imports_the_commands():
    for path in (ROOT / "trainer").rglob("*.py"):
        if path.parent.name != "commands":
            imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            assert not any("commands" in (node.module or "").split(".") for node in imports), path


# --- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?; see mrp --help"),
        (["bench", "los"], "No such command 'los'. Did you mean 'loss'?"),
        (["convert", "only-one"], "Missing argument 'DST'; see mrp convert --help"),
        (["convert", "a", "b", "--overwrit"], "--overwrite"),
        (["convert", "a", "b", "--head"], "Invalid value for --head: a value must follow it"),
        (["convert", "a", "b", "--head", "--json"], "Invalid value for --head: a value must follow it"),
        (["verify", "words", "--draft", "tail"], "Invalid value for '--draft'"),
        (["eval", "words", "--data", "a", "--scorer", "exact", "--skip", "-1"], "Invalid value for '--skip'"),
        (["convert", "no/such/place", "out"], "folder no/such/place does not exist"),
        (["convert", BLOCK4 / "config.json", "out"], "config.json is a file: expected the folder of a checkpoint"),
        (
            ["convert", "words", "out", "--revision", "main"],
            "revision main is for Hub ids, but words is a local folder",
        ),
        (
            ["generate", "words", "--prompt", "a", "--head", BLOCK4],
            "holds no head: mrp_head_config.json is missing (it",
        ),
        (
            ["convert", "no/such/place", "out"],
            "(embedded checkpoints: words (sdar-tiny-mrp), code (sdar-tiny-code-mrp)",
        ),
        (["convert", BLOCK4, BLOCK4], "exists already: choose another folder, or replace it with --overwrite"),
        (["convert", BLOCK4, BLOCK4, "--overwrite"], "overlaps with"),
        (["generate", "no/such/place", "--prompt", "a"], "folder no/such/place does not exist"),
        (["generate", BLOCK4], "there is no prompt: give --prompt TEXT or --prompt-file FILE"),
        (["generate", BLOCK4, "--prompt-file", "missing.txt"], "missing.txt does not exist"),
        (["generate", BLOCK4, "--prompt", "a", "--mrp-mode"], "--mrp-mode has no value"),
        (["generate", BLOCK4, "--prompt", "a", "--mrp_mode", "--json"], "--mrp_mode has no value"),
        (["generate", BLOCK4, "--prompt", "a", "--eos-token-id", "["], "--eos-token-id: '[' is not valid YAML"),
        (["generate", BLOCK4, "--prompt", "a", "b"], "Got unexpected extra argument"),
        (["trajectories", BLOCK4, "--data", "a", "--out", "b.json"], "--out must end in .parquet, got b.json"),
        (
            ["trajectories", BLOCK4, "--data", "a", "--out", "b.parquet", "--options", "x"],
            "--options is not valid JSON",
        ),
        (["demo", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["push", BLOCK4, "org/name"], "run `mrp convert` on it first"),
        (["train", "missing.yaml"], "config file missing.yaml does not exist"),
        (["train", "--lr", "1e-4"], "unknown option 'lr' on the command line: did you mean 'learning_rate'?"),
        (["eval", "words", "--data", "nofile.jsonl", "--scorer", "exact"], "data file nofile.jsonl does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, argv, message):
    assert message in expect_error(capsys, *argv)


@pytest.fixture
def run_raising(monkeypatch):
    """A function that runs a command which raises the given error."""

    def run(error):
        def command():
            raise error

        one = typer.Typer()
        one.callback(invoke_without_command=True)(command)
        monkeypatch.setattr(cli, "app", one)
        return main([])

    return run


def test_a_bug_is_not_reported_as_bad_input(run_raising):
    with pytest.raises(RuntimeError, match="a bug"):
        run_raising(RuntimeError("a bug"))


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\nlines"), 2, "mrp: error: two lines\n"),
        (FileNotFoundError(2, "No such file", "here.txt"), 2, "mrp: error: here.txt does not exist\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "mrp: error: x: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_status_and_a_line(run_raising, capsys, error, status, line):
    assert run_raising(error) == status
    assert capsys.readouterr().err == line


def test_a_closed_pipe_is_quiet():
    code = "import sys; from mrp_trainer.commands.cli import main; sys.exit(main(['eval', '--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


# --- what may be written


def values_of(name: str, *words) -> dict:
    """The parameters that a command would be called with."""
    command = typer.main.get_command(app)
    with command.make_context("mrp", [*name.split(), *words], resilient_parsing=True) as context:
        for part in name.split():
            command = command.commands[part]
        return command.make_context(part, list(words), parent=context).params


@pytest.mark.parametrize(
    "words",
    [
        ["words", "--steps", "2,4", "--modes", "spec,direct"],
        ["words", "--steps", "2", "4", "--modes", "spec", "direct"],
        ["--modes", "spec,direct", "words", "--steps=2,4"],
        ["--modes", "spec,", "direct", "--steps", "2", "--steps", "4", "--", "words"],
    ],
)
def test_lists_are_written_with_commas_or_spaces(words):
    found = values_of("eval", "--data", "a.jsonl", "--scorer", "exact", *words)
    assert (list(found["steps"]), list(found["modes"]), found["model"]) == ([2, 4], ["spec", "direct"], "words")


@pytest.mark.parametrize(
    ("name", "option", "words", "expected"),
    [
        ("bench decode", "batch_sizes", ["words", "--batch-sizes", "1", "4", "16"], [1, 4, 16]),
        ("bench decode", "batch_sizes", ["words", "--batch_sizes", "1,4"], [1, 4]),
        ("bench decode", "batch_sizes", ["words"], [1, 4, 16]),
        ("bench rules", "rules", ["words", "--rules", "entropy-0.1", "sequential"], ["entropy-0.1", "sequential"]),
        ("bench shapes", "shapes", ["--shapes", "4b", "8b", "--json"], ["4b", "8b"]),
        ("bench shapes", "candidates", ["--candidates", "1,2"], [1, 2]),
        ("claims", "only", ["words", "--only", "gain", "remask"], ["gain", "remask"]),
        ("claims", "only", ["words", "--only", "gain,remask"], ["gain", "remask"]),
        ("verify", "prompt", ["words", "--prompt", "one, two", "--prompt", "three"], ["one, two", "three"]),
    ],
)
def test_lists_of_every_command(name, option, words, expected):
    assert list(values_of(name, *words)[option]) == expected


def test_options_are_accepted_in_snake_case_too():
    found = values_of(
        "convert", "a", "b", "--num_mrp_layers", "0", "--head_init=backbone_layers", "--mask-token-id", "3"
    )
    assert (found["num_mrp_layers"], found["head_init"], found["mask_token_id"]) == (0, "backbone_layers", 3)
    assert values_of("verify", "words", "--max_new_tokens", "9")["max_new_tokens"] == 9


@pytest.mark.parametrize("none", ["none", "None"])
def test_none_leaves_an_option_unset(none):
    found = values_of("convert", "a", "b", "--head", none, "--num-mrp-layers", none)
    assert found["head"] is found["num_mrp_layers"] is None
    assert list(values_of("generate", "words", "--prompt", none)["prompt"]) == [none]


@pytest.mark.parametrize(
    ("words", "count"), [(["--calibrate"], 32), (["--calibrate", "--json"], 32), (["--calibrate", "2"], 2)]
)
def test_calibration_needs_no_number(words, count):
    assert values_of("eval", "words", "--data", "a", "--scorer", "exact", *words)["calibrate"] == count


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("--suppress-tokens=5", {"suppress_tokens": [5]}),
        ("--suppress_tokens=[5, 6]", {"suppress_tokens": [5, 6]}),
        ("--stop-strings=7", {"stop_strings": "7"}),
        ("--stop-strings=[a, b]", {"stop_strings": ["a", "b"]}),
        ("--stop-strings=none", {"stop_strings": None}),
    ],
)
def test_one_token_and_one_stop_string_need_no_brackets(word, options):
    """They ended in transformers with "'int' object is not iterable"."""
    assert generate_options([word]) == options


@pytest.mark.parametrize("name", ["sdar-tiny-mrp", "words"])
def test_an_embedded_checkpoint_is_found_by_either_name(capsys, name):
    prompt = "Tom has 23 apples, buys 14. How many?"
    command = ["generate", name, "--prompt", prompt, "--raw", "--max-new-tokens", "48", "--json"]
    assert main([*command, "--mrp-mode", "none", "--denoising-steps", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "37" in found["results"][0]["text"]
    assert found["options"] == {"max_new_tokens": 48, "mrp_mode": None, "denoising_steps": 8}

"""The `mrp` command: what it lists, what it prints, how it fails."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from local_hub import LocalHub
from transformers import AutoTokenizer

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.commands import cli
from mrp_trainer.commands.cli import BENCHMARKS, COMMANDS, main

ROOT = Path(__file__).parents[1]
BLOCK4 = ROOT / "tests" / "golden" / "block4"
PROMPTS = ["what is one plus two ?", "four minus one ?"]


@pytest.fixture
def folder(tmp_path, tiny_model, word_tokenizer):
    """One of our own checkpoints, with a tokenizer that has a chat template."""
    tiny_model(vocab_size=20).save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run_json(capsys, *argv) -> dict:
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expect_error(capsys, *argv) -> str:
    """The one line that bad input leaves on stderr, with exit status 2."""
    try:
        status = main(list(map(str, argv)))
    except SystemExit as stop:  # argparse's own
        status = stop.code
    shown = capsys.readouterr()
    assert status == 2 and shown.out == "" and "Traceback" not in shown.err
    return shown.err.strip().splitlines()[-1]


# --- help


def test_help_lists_every_command_and_answers_without_loading_transformers():
    code = "import sys; from mrp_trainer.commands import cli; cli.main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout and summary in done.stdout for name, (_, _, summary) in COMMANDS.items())


@pytest.mark.parametrize("name", [*COMMANDS, *(f"bench {name}" for name in BENCHMARKS)])
def test_every_command_has_help_with_an_example(capsys, name):
    try:
        assert main([*name.split(), "--help"]) == 0
    except SystemExit as stop:
        assert stop.code == 0
    shown = capsys.readouterr().out.lower()
    assert "usage: mrp" in shown
    assert f"mrp {name}" in shown[shown.index("example:") :]


def test_the_installed_command_is_this_one():
    scripts = (ROOT / "pyproject.toml").read_text()
    module, function = (
        next(line for line in scripts.splitlines() if line.startswith("mrp = ")).split('"')[1].split(":")
    )
    assert vars(import_module(module))[function] is main


# --- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "unknown command 'genrate', did you mean 'generate'?"),
        (["bench", "los"], "unknown command 'los', did you mean 'loss'?"),
        (["convert", "only-one"], "the following arguments are required: DST"),
        (["convert", "no/such/place", "out"], "no/such/place is no folder here and cannot be fetched from the Hub"),
        (["convert", BLOCK4, BLOCK4], "exists already"),
        (["generate", "no/such/place", "--prompt", "a"], "no/such/place is no folder here"),
        (["generate", BLOCK4], "there is no prompt: give --prompt TEXT or --prompt-file FILE"),
        (["generate", BLOCK4, "--prompt-file", "missing.txt"], "missing.txt"),
        (["generate", BLOCK4, "--prompt", "a", "--mrp_mode"], "--mrp_mode has no value"),
        (["generate", BLOCK4, "--prompt", "a", "b"], "unexpected argument 'b'"),
        (["push", BLOCK4, "org/name"], "run `mrp convert` on it first"),
        (["train", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, argv, message):
    assert message in expect_error(capsys, *argv)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--mrp_mode", "specc"], "Did you mean 'spec'?"),
        (["--mrp_step", "3"], "Did you mean 'mrp_steps'?"),
        (["--mrp_steps", "0"], "mrp_steps must be an integer of at least 1, got 0"),
        (["--head", "."], "holds no head"),
        (["--stream", "--json"], "--stream shows one prompt as text"),
    ],
)
def test_bad_options_of_generate_are_one_clear_line(capsys, folder, option, message):
    assert message in expect_error(capsys, "generate", folder, "--prompt", "one", *option)


def test_a_bug_is_not_dressed_up_as_bad_input(monkeypatch):
    def broken(argv):
        raise RuntimeError("a bug")

    monkeypatch.setitem(COMMANDS, "convert", (".cli", "broken", ""))
    monkeypatch.setattr(cli, "broken", broken, raising=False)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["convert"])


# --- commands


def test_convert_reports_what_it_wrote(capsys, tmp_path):
    report = run_json(capsys, "convert", BLOCK4, tmp_path / "out")
    assert (report["head"], report["num_mrp_layers"], report["dtype"]) == ("kept", 2, "float32")
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "out")
    assert report["parameters"] == model.num_parameters()
    assert main(["convert", str(BLOCK4), str(tmp_path / "out"), "--overwrite", "--num-mrp-layers", "0"]) == 0
    assert "none" in capsys.readouterr().out
    assert MRPForDiffusionLM.from_pretrained(tmp_path / "out").mrp_head is None


@pytest.mark.parametrize("raw", [True, False])
def test_generate_decodes_a_batch_as_the_model_does_row_by_row(capsys, folder, raw):
    """Left padding and the chat template included; the reference feeds each prompt alone, ids from the tokenizer."""
    options = {"mrp_mode": "direct", "mrp_steps": 2, "max_new_tokens": 10}
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    flags = ["--mrp-mode", "direct", "--mrp_steps", "2", "--max-new-tokens", "10", *(["--raw"] if raw else [])]
    found = run_json(capsys, "generate", folder, *prompts, *flags)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), MRPForDiffusionLM.from_pretrained(folder)
    for prompt, result in zip(PROMPTS, found["results"], strict=True):
        ids = tokenizer(prompt if raw else f"{prompt} . so", return_tensors="pt").input_ids
        out = model.generate(ids, **options, return_dict_in_generate=True)
        assert result["text"] == tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        assert result["backbone_forwards"] == out.stats.backbone_forwards.item()
        assert result["prompt"] == prompt
    assert found["options"] == options


def test_generate_prints_and_streams_the_same_text(capsys, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"{PROMPTS[0]}\n\n")
    common = ["generate", str(folder), "--prompt-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "9"]
    assert main(common) == 0
    printed = capsys.readouterr().out
    assert main([*common, "--stream"]) == 0
    assert capsys.readouterr().out.split() == printed.split() != []


def test_generate_samples_by_seed(capsys, folder):
    common = ["generate", folder, "--prompt", PROMPTS[0], "--do_sample", "true", "--temperature", "3.0"]
    first, again, other = (run_json(capsys, *common, "--seed", seed)["results"][0]["text"] for seed in (1, 1, 2))
    assert first == again != other


def test_generate_puts_a_trained_head_on_its_backbone(capsys, tmp_path, tiny_model, word_tokenizer):
    model = tiny_model(vocab_size=20)
    save_head(model, tmp_path / "head")
    with torch.no_grad():
        model.mrp_head.norm.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    common = ["--prompt", PROMPTS[0], "--mrp_mode", "direct", "--mrp_steps", "3", "--max-new-tokens", "24"]
    with_head = run_json(capsys, "generate", tmp_path / "model", *common, "--head", tmp_path / "head")
    without = run_json(capsys, "generate", tmp_path / "model", *common)
    assert with_head["results"][0]["text"] != without["results"][0]["text"]


def test_push_uploads_from_the_command_line(tmp_path):
    convert(BLOCK4, tmp_path / "out")
    with LocalHub() as hub:
        command = [
            sys.executable,
            "-m",
            "mrp_trainer.commands.cli",
            "push",
            str(tmp_path / "out"),
            "org/mine",
            "--json",
        ]
        environment = {**os.environ, **hub.environment(tmp_path / "cache")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["commit_url"].endswith(hub.repositories["org/mine"][-1].sha)
        assert "modeling_mrp.py" in hub.repositories["org/mine"][-1].files


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["eval", "sdar-tiny-mrp", "--data", "nofile.jsonl", "--scorer", "exact"]) == 2
    assert capsys.readouterr().err == "mrp: error: nofile.jsonl is not there: check the name\n"

"""`mrp convert`, `generate` and `push`: what they do and print."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden_checkpoints import plain_sdar
from local_hub import LocalHub
from transformers import AutoTokenizer

from hub_cards.tasks.tasks import TASKS
from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.checkpoints.weight_files import EMBEDDED_NAMES, fetch, local_source
from mrp_trainer.commands.cli import main

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


def test_embedded_checkpoints_are_found_by_the_names_of_their_tasks():
    assert {name: task.folder.name for name, task in TASKS.items()} == EMBEDDED_NAMES
    for name, task in TASKS.items():
        assert fetch(name) == fetch(task.folder.name) == (task.folder, None)
        assert local_source(name) == str(task.folder)


def test_a_local_folder_comes_before_an_embedded_checkpoint_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    assert fetch("words") == (Path("words"), None)
    assert local_source("org/model") == "org/model"


def test_a_conversion_with_a_fresh_head_prints_nothing_but_its_report(tmp_path, capfd):
    """transformers printed a table of the head's missing tensors, as if something had gone wrong."""
    source = plain_sdar(tmp_path / "source", BLOCK4)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines()[0].split() == ["destination", str(tmp_path / "out")]
    assert "REPORT" not in shown.err and "MISSING" not in shown.err


def test_convert_reports_what_it_wrote(capsys, tmp_path):
    report = run_json(capsys, "convert", BLOCK4, tmp_path / "out")
    assert (report["head"], report["num_mrp_layers"], report["dtype"]) == ("kept", 2, "float32")
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "out")
    assert report["parameters"] == model.num_parameters()
    assert main(["convert", str(BLOCK4), str(tmp_path / "out"), "--overwrite", "--num-mrp-layers", "0"]) == 0
    assert re.search("^head +dropped$", capsys.readouterr().out, re.MULTILINE)
    assert MRPForDiffusionLM.from_pretrained(tmp_path / "out").mrp_head is None


@pytest.mark.parametrize("raw", [True, False])
def test_generate_decodes_a_batch_as_the_model_decodes_each_row(capsys, folder, raw):
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


def test_options_of_generate_may_come_before_the_model(capsys, folder):
    words = ["--mrp-mode", "direct", "--mrp-steps=2", "--prompt", PROMPTS[0], "--max-new-tokens", "8"]
    before = run_json(capsys, "generate", *words, folder)
    assert before == run_json(capsys, "generate", folder, *words)
    assert before["options"] == {"max_new_tokens": 8, "mrp_mode": "direct", "mrp_steps": 2}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--mrp_mode", "specc"], "Did you mean 'spec'?"),
        (["--mrp-step", "3"], "Did you mean 'mrp_steps'?"),
        (["--mrp_steps", "0"], 'mrp_steps must be an integer of at least 1 or "auto", got 0'),
        (["--head", "."], "holds no head"),
        (["--stream", "--json"], "--stream shows a single prompt as text"),
    ],
)
def test_bad_options_of_generate_are_one_clear_line(capsys, folder, option, message):
    assert main(["generate", str(folder), "--prompt", "one", *option]) == 2
    shown = capsys.readouterr()
    line = shown.err.splitlines()[-1]  # after the progress bars of saving and loading the model
    assert message in line and line.startswith("mrp: error: ") and shown.out == ""


def test_generate_prints_and_streams_the_same_text(capsys, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"{PROMPTS[0]}\n\n")
    common = ["generate", str(folder), "--prompt-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "9"]
    assert main(common) == 0
    printed = capsys.readouterr().out
    assert main([*common, "--stream"]) == 0
    assert capsys.readouterr().out.split() == printed.split() != []


def test_generate_samples_by_seed(capsys, folder):
    common = ["generate", folder, "--prompt", PROMPTS[0], "--do-sample", "true", "--temperature", "3.0"]
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
    (tmp_path / "out" / "notes").mkdir()
    with LocalHub() as hub:
        command = [sys.executable, "-m", "mrp_trainer.commands", "push", str(tmp_path / "out"), "org/mine", "--json"]
        environment = {**os.environ, **hub.environment(tmp_path / "cache")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["commit_url"].endswith(hub.repositories["org/mine"][-1].sha)
        assert "modeling_mrp.py" in report["files"] and report["left_out"] == ["notes/"]
        assert {*report["files"], ".gitattributes"} == hub.repositories["org/mine"][-1].files.keys()
        done = subprocess.run(command[:-1], cwd=ROOT, env=environment, capture_output=True, text=True)
        sending, left_out, url = done.stdout.splitlines()
        assert sending == f"sending {', '.join(report['files'])}" and left_out == "not sending notes/"
        assert url.startswith("http")

"""A converted folder on its own: an environment without this package, another place, three generations of saves."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert

BLOCK4 = Path(__file__).parent / "golden" / "block4"
MODES = {
    "default": {},
    "backbone": {"mrp_mode": None},
    "direct": {"mrp_mode": "direct", "mrp_steps": 2},
    "spec": {"mrp_mode": "spec", "mrp_steps": 4},
    "spec-self": {"mrp_mode": "spec", "mrp_draft": "self"},
    "spec-token": {"mrp_mode": "spec", "mrp_acceptance": "token", "mrp_acceptance_floor": 0.1},
    "leave_one_out": {"mrp_mode": "remask", "confidence_threshold": 0.02},
    "confidence": {"mrp_mode": "remask", "confidence_threshold": 0.02, "remask_criterion": "confidence"},
    "residual": {"mrp_mode": "remask", "confidence_threshold": 0.02, "remask_criterion": "residual"},
}
PROMPT = "what is one plus two ?"
CHAT = [{"role": "user", "content": "one plus one"}]

# Runs in the bare environment: loads `folder`, records what it gives, saves it as `next_folder`.
CHILD = """
import importlib.util, json, sys
folder, next_folder, results, modes, prompt, chat, blocked = json.loads(sys.argv[1])
assert not [name for name in ("modeling_mrp", "mrp_trainer", "hub_cards") if importlib.util.find_spec(name)]
sys.modules.update({name: None for name in blocked})  # importing them fails
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
torch.set_num_threads(1)
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
causal = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
with torch.no_grad():
    out = model(inputs.input_ids, revealed_ids=inputs.input_ids[:, None])
    causal_logits = causal(inputs.input_ids).logits
found = {
    "classes": [type(part).__name__ for part in (config, model, causal)],
    "modules": [type(part).__module__.split(".")[0] for part in (config, model, causal)],
    "block_size": config.block_size,
    "logits": out.logits, "corrected": out.corrected_logits, "causal": causal_logits,
    "sequences": {name: model.generate(**inputs, max_new_tokens=14, **mode) for name, mode in modes.items()},
}
options = {"max_new_tokens": 14, "do_sample": False, **modes["direct"]}  # pipelines sample unless told not to
generate = pipeline("text-generation", model=folder, trust_remote_code=True)
found["text"] = generate(prompt, return_full_text=False, **options)[0]["generated_text"]
found["chat"] = generate(chat, **options)[0]["generated_text"]
model.save_pretrained(next_folder)
tokenizer.save_pretrained(next_folder)
torch.save(found, results)
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    """Interpreter of an environment that sees the installed packages but not this one.

    Folders named in a .pth file are searched, but .pth files inside them are not read: an editable install stays out.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (folder / "lib" / version / "site-packages" / "installed.pth").write_text("\n".join(packages))
    return folder / "bin" / "python"


def load_in_bare_environment(python: Path, folder: Path, next_folder: Path, blocked=()) -> dict:
    """What a fresh process in the bare environment finds in `folder`, which it saves again as `next_folder`."""
    work = next_folder.parent
    arguments = [folder, next_folder, work / f"{folder.name}.pt", MODES, PROMPT, CHAT, list(blocked)]
    environment = {**os.environ, "HF_HOME": str(work / f"{folder.name}-cache"), "OMP_NUM_THREADS": "1"}
    command = [python, "-I", "-c", CHILD, json.dumps(arguments, default=str)]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return torch.load(work / f"{folder.name}.pt")


def make_folder(folder: Path, tokenizer) -> Path:
    """A converted golden checkpoint with a tokenizer."""
    source = folder.parent / f"{folder.name}-source"
    shutil.copytree(BLOCK4, source)
    tokenizer.save_pretrained(source)
    convert(source, folder)
    shutil.rmtree(source)
    return folder


def check(found: dict, expected: MRPForDiffusionLM, tokenizer):
    """The results of the bare environment against this package's own, bit for bit."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        out = expected(inputs.input_ids, revealed_ids=inputs.input_ids[:, None])
    assert found["classes"] == ["MRPConfig", "MRPForDiffusionLM", "MRPForDiffusionLM"]
    assert set(found["modules"]) == {"transformers_modules"}
    assert torch.equal(found["logits"], out.logits) and torch.equal(found["causal"], out.logits)
    assert torch.equal(found["corrected"], out.corrected_logits)
    for name, mode in MODES.items():
        sequence = expected.generate(**inputs, max_new_tokens=14, **mode)
        assert torch.equal(found["sequences"][name], sequence), name
    new = found["sequences"]["direct"][0, inputs.input_ids.shape[1] :]
    assert found["text"].split() == tokenizer.decode(new, skip_special_tokens=True).split()
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = expected.generate(**chat, max_new_tokens=14, **MODES["direct"])[0, chat["input_ids"].shape[1] :]
    assert found["chat"][:-1] == CHAT
    assert found["chat"][-1]["content"].split() == tokenizer.decode(new, skip_special_tokens=True).split()


@pytest.mark.slow
def test_three_generations_in_a_bare_environment_give_the_same_bits(bare_python, tmp_path, word_tokenizer):
    """Every generation is loaded by a fresh process, from a folder that was moved after it was written, and saved."""
    first = make_folder(tmp_path / "written", word_tokenizer)
    expected = MRPForDiffusionLM.from_pretrained(first)
    for generation in range(3):
        moved = tmp_path / "elsewhere" / f"generation_{generation}"
        moved.parent.mkdir(exist_ok=True)
        shutil.move(tmp_path / "written", moved)
        found = load_in_bare_environment(
            bare_python, moved, tmp_path / "written", blocked=["triton"] * (generation == 0)
        )
        check(found, expected, word_tokenizer)
    code = {path.name: path.read_bytes() for path in (tmp_path / "written").glob("*.py")}
    assert code == {path.name: path.read_bytes() for path in moved.glob("*.py")}
    assert json.loads((tmp_path / "written" / "generation_config.json").read_text())["mrp_mode"] == "spec"
    before, after = (load_file(folder / "model.safetensors") for folder in (moved, tmp_path / "written"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_the_folder_holds_all_code_it_imports_and_no_more(tmp_path, word_tokenizer):
    folder = make_folder(tmp_path / "out", word_tokenizer)
    package = Path(__file__).parents[1] / "modeling_mrp"
    assert {path.name for path in folder.glob("*.py")} == {
        path.name for path in package.glob("*.py") if path.name != "__init__.py"
    }


def test_with_the_package_the_registered_classes_load_a_folder(tmp_path, word_tokenizer):
    folder = make_folder(tmp_path / "out", word_tokenizer)
    assert type(AutoConfig.from_pretrained(folder)) is MRPConfig
    for auto in (AutoModel, AutoModelForCausalLM):
        assert type(auto.from_pretrained(folder)) is MRPForDiffusionLM

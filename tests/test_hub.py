"""Downloads from the Hub and uploads to it, against a local server, and the folders that are complete enough."""

import json
import shutil

import pytest
import torch
import yaml
from golden_checkpoints import BLOCK4, HEAD, golden_step, plain_sdar, run, write_source
from local_hub import LocalHub
from safetensors.torch import load_file

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.checkpoints.push import push, selected_files
from mrp_trainer.checkpoints.weight_files import fetch


@pytest.fixture
def hub(tmp_path):
    with LocalHub() as server:
        server.variables = server.environment(tmp_path / "cache")
        yield server


def test_a_hub_id_converts_and_its_commit_is_recorded(hub, tmp_path):
    source = write_source(tmp_path / "source", BLOCK4, shards=2)
    commit = hub.add("org/base", source)
    out = tmp_path / "out"
    run(f"from mrp_trainer.checkpoints.convert import convert; convert('org/base', {str(out)!r})", **hub.variables)
    found, expected = golden_step(MRPForDiffusionLM.from_pretrained(out), BLOCK4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    config = json.loads((out / "config.json").read_text())
    assert (config["base_model"], config["base_revision"]) == ("org/base", commit)
    front_matter = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert front_matter["base_model"] == "org/base"


def test_from_backbone_takes_a_hub_id_at_a_revision(hub, tmp_path):
    first = hub.add("org/base", plain_sdar(tmp_path / "source", BLOCK4))
    hub.commit("org/base", {"config.json": b"{}"})
    head = tmp_path / "head"
    run(
        f"""
from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.head_files import save_head
model = MRPForDiffusionLM.from_backbone("org/base", num_mrp_layers=1, revision={first!r})
save_head(model, {str(head)!r})
""",
        **hub.variables,
    )
    config = json.loads((head / "mrp_head_config.json").read_text())
    assert (config["base_model"], config["base_revision"]) == ("org/base", first)


def test_a_push_is_one_commit_that_replaces_old_weights_and_can_be_loaded(hub, tmp_path):
    convert(BLOCK4, tmp_path / "cut", max_shard_size="200KB")
    convert(BLOCK4, tmp_path / "whole")
    code = "from mrp_trainer.checkpoints.push import push; push({!r}, 'org/mine')"
    run(code.format(str(tmp_path / "cut")), **hub.variables)
    run(code.format(str(tmp_path / "whole")), **hub.variables)
    commits = hub.repositories["org/mine"]
    assert len(commits) == 3  # the empty repository and two uploads
    assert {path.name for path in (tmp_path / "cut").iterdir()} <= commits[1].files.keys()
    assert [name for name in commits[2].files if "safetensors" in name] == ["model.safetensors"]
    loaded = run(
        """
from transformers import AutoModel
model = AutoModel.from_pretrained("org/mine", trust_remote_code=True)
print(type(model).__module__, model.mrp_head.norm.weight.double().sum().item())
""",
        **hub.variables,
    ).stdout.split()
    weights = load_file(BLOCK4 / "model.safetensors")
    assert float(loaded[1]) == weights[HEAD + "norm.weight"].double().sum().item()


def test_a_failed_push_leaves_the_repository_unchanged(hub, tmp_path):
    convert(BLOCK4, tmp_path / "out")
    old = hub.commit("org/mine", {"model.safetensors": b"old", "README.md": b"old"})
    hub.refuse_commits = True
    code = f"""
from mrp_trainer.checkpoints.push import push
try:
    push({str(tmp_path / "out")!r}, "org/mine")
except OSError as error:
    print("refused", error)
"""
    assert "refused" in run(code, **hub.variables).stdout
    assert [commit.sha for commit in hub.repositories["org/mine"]] == [old]


def after_training(folder):
    """Add to a folder of a head what a training run leaves there, and a card that shows plots."""
    save_head(MRPForDiffusionLM.from_backbone(BLOCK4), folder)
    for step in (2, 4):
        (folder / f"checkpoint-{step}").mkdir()
        for name in ("mrp_head.safetensors", "optimizer.pt", "notes.json"):
            (folder / f"checkpoint-{step}" / name).write_bytes(b"private")
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json", "mrp_run.json", ".env"):
        (folder / name).write_bytes(b"private")
    for name in ("shown.png", "shown too.svg", "not shown.png", "tokenizer.json", "LICENSE"):
        (folder / name).write_bytes(b"{}")
    (folder / "README.md").write_text(
        '![a](shown.png)\n<img width="1" src="./shown%20too.svg">\n![c](gone.png) ![d](../../out.png) '
        "![e](checkpoint-2/plot.png) ![f](https://example.com/far.png)"
    )
    return folder


SENT = {"mrp_head.safetensors", "mrp_head_config.json", "tokenizer.json", "README.md", "LICENSE"}
SENT |= {"shown.png", "shown too.svg"}


def test_only_known_files_are_selected_and_the_others_named(tmp_path):
    """Checkpoints of the training run, with optimizer states, were uploaded with the head."""
    folder = after_training(tmp_path / "head")
    selection = selected_files(folder)
    assert set(selection.files) == SENT
    assert {"checkpoint-2/", "checkpoint-4/", "optimizer.pt", "training_args.bin", ".env"} <= set(selection.left_out)
    assert set(selection.left_out) | SENT == {
        f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()
    }


def test_an_index_beside_whole_weights_is_not_sent(tmp_path):
    """transformers reads model.safetensors then, and so must whoever downloads the folder."""
    convert(BLOCK4, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")
    assert selected_files(tmp_path / "out").left_out == ["model.safetensors.index.json"]


def test_a_push_sends_known_files_and_deletes_nothing_in_nested_folders(hub, tmp_path):
    folder = after_training(tmp_path / "head")
    hub.commit("org/mine", {"old.safetensors": b"1", "plots/draw.py": b"2", "notes.md": b"3"})
    run(f"from mrp_trainer.checkpoints.push import push; push({str(folder)!r}, 'org/mine')", **hub.variables)
    assert hub.repositories["org/mine"][-1].files.keys() == SENT | {"plots/draw.py", "notes.md"}


@pytest.mark.parametrize("repo_id", ["mine", "a/b/c", "my name/model", "org/", "/model", "org/name.git", "", "org/-a"])
def test_a_name_that_is_no_repository_id_is_refused_without_asking_the_hub(tmp_path, monkeypatch, repo_id):
    monkeypatch.setattr("mrp_trainer.checkpoints.push.HfApi", None)  # whoever calls it fails
    folder = after_training(tmp_path / "head")
    with pytest.raises(ValueError, match=f"REPO_ID must be owner/name, got '{repo_id}'"):
        push(folder, repo_id, token="any")


def test_without_a_token_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("mrp_trainer.checkpoints.push.HfApi", None)
    monkeypatch.setattr("mrp_trainer.checkpoints.push.get_token", lambda: None)
    with pytest.raises(ValueError, match="uploading needs a token: log in with `hf auth login`, or set HF_TOKEN"):
        push(after_training(tmp_path / "head"), "org/mine")


@pytest.mark.parametrize(
    ("status", "offline", "line"),
    [
        (401, "0", "pushing to org/mine failed: access is refused (status 401): log in with `hf auth login`"),
        (403, "0", "pushing to org/mine failed: access is refused (status 403): log in with `hf auth login`"),
        (404, "0", "pushing to org/mine failed: there is no such repository or revision"),
        (None, "0", "pushing to org/mine failed: no connection to http://127.0.0.1:"),
        (None, "1", "pushing to org/mine failed: the Hub is switched off by HF_HUB_OFFLINE=1: unset it"),
    ],
)
def test_what_keeps_a_push_from_the_hub_is_one_line(hub, tmp_path, status, offline, line):
    folder = after_training(tmp_path / "head")
    hub.refuse_token = status
    if status is None:
        hub.__exit__()  # its port is closed from here on
    code = f"from mrp_trainer.commands.cli import main; print(main(['push', {str(folder)!r}, 'org/mine', '--json']))"
    done = run(code, **hub.variables | {"HF_HUB_OFFLINE": offline})
    (error,) = done.stderr.strip().splitlines()
    assert error.startswith(f"mrp: error: {line}") and done.stdout == "2\n"


def test_an_incomplete_folder_is_not_pushed(tmp_path):
    convert(BLOCK4, tmp_path / "out", max_shard_size="200KB")
    shard = min(path.name for path in (tmp_path / "out").glob("model-*.safetensors"))
    for lost in ("decoding.py", "block_state.py", shard):
        shutil.copytree(tmp_path / "out", tmp_path / lost)
        (tmp_path / lost / lost).unlink()
        with pytest.raises(ValueError, match=f"missing {lost}"):
            push(tmp_path / lost, "org/mine")
    with pytest.raises(ValueError, match="mrp convert"):
        push(BLOCK4, "org/mine")
    with pytest.raises(ValueError, match="neither config.json"):
        push(tmp_path, "org/mine")


@pytest.mark.parametrize("auto_map", [3, {"AutoModel": 3}, ["modeling_mrp.MRPForDiffusionLM"]])
def test_a_damaged_auto_map_is_named(tmp_path, auto_map):
    """It ended with "'int' object has no attribute 'values'"."""
    convert(BLOCK4, tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": auto_map}))
    with pytest.raises(ValueError, match=f"{config}: auto_map must map names to classes in files, got"):
        selected_files(tmp_path / "out")


def test_a_head_folder_is_complete_only_with_readable_weights(tmp_path, tiny_model):
    folder = save_head(tiny_model(), tmp_path / "head")
    selected_files(folder)  # raises if it is incomplete, as below
    weights = folder / "mrp_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="cut short"):
        push(folder, "org/mine")
    weights.unlink()
    with pytest.raises(ValueError, match="missing mrp_head.safetensors"):
        push(folder, "org/mine")


def test_fetch_finds_an_embedded_checkpoint_by_name_unless_a_local_folder_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, commit = fetch("sdar-tiny-mrp")
    assert (folder / "model.safetensors").is_file() and commit is None
    (tmp_path / "sdar-tiny-mrp").mkdir()
    assert fetch("sdar-tiny-mrp")[0].resolve() == tmp_path / "sdar-tiny-mrp"

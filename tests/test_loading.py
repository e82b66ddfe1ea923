"""Loading a model for a command: each checkpoint is read once, and no code of a folder runs."""

import json
from argparse import Namespace

import pytest
import torch
from torch.torch_version import TorchVersion

from modeling_mrp import MRPConfig, MRPForDiffusionLM, checkpoint_files, checkpoints
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.checkpoints.loading import default_attention, load, load_tokenizer


@pytest.mark.parametrize(
    ("device", "autocast", "version", "attention"),
    [
        ("cpu", False, "2.13.0+cpu", "sdpa"),
        ("cpu", True, "2.13.0+cpu", "sdpa"),
        ("cuda", False, "2.6.0+cu124", "flex_attention"),
        ("cuda", True, "2.10.1+cu128", "sdpa"),
        ("cuda", True, "2.11.0+cu128", "flex_attention"),
        ("cuda:1", True, "2.13.0", "flex_attention"),
    ],
)
def test_flex_attention_trains_on_gpus_unless_it_would_refuse_the_dtypes(
    monkeypatch, device, autocast, version, attention
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert default_attention(torch.device(device), autocast) == attention


@pytest.fixture
def folders(tiny_model, word_tokenizer, tmp_path):
    """A function that saves a model with the given number of head layers with a tokenizer, and returns the folder."""

    def save(layers):
        folder = tmp_path / f"layers_{layers}"
        tiny_model(num_mrp_layers=layers).save_pretrained(folder)
        word_tokenizer.save_pretrained(folder)
        return folder

    return save


def arguments(model, head=None):
    return Namespace(model=str(model), revision=None, head=head, dtype=torch.float32, device="cpu")


@pytest.fixture
def reads(monkeypatch):
    """Sources whose config and tensor names are read, one entry per reading."""
    sources, read = [], checkpoints.read_checkpoint
    monkeypatch.setattr(
        checkpoints, "read_checkpoint", lambda source, *rest: sources.append(source) or read(source, *rest)
    )
    return sources


@pytest.mark.parametrize("layers", [0, 2])
def test_a_checkpoint_is_read_once_and_keeps_the_head_it_has_or_has_not(folders, reads, layers):
    model, _ = load(arguments(folders(layers)))
    assert len(reads) == 1
    assert model.config.num_mrp_layers == layers and (model.mrp_head is None) == (layers == 0)
    assert model.generation_config.to_dict().get("mrp_mode") == ("spec" if layers else None)


def test_a_separate_head_is_downloaded_once(folders, reads, monkeypatch, tiny_model, tmp_path):
    """The head comes from the Hub, the backbone from a folder without a head."""
    base, trained = folders(0), tiny_model(num_mrp_layers=1)
    trained.load_state_dict(tiny_model(num_mrp_layers=0).state_dict(), strict=False)  # the same backbone
    save_head(trained, tmp_path / "head")
    downloads = []

    def download(name, **options):
        downloads.append(name)
        return str(tmp_path / "head")

    monkeypatch.setattr(checkpoint_files, "snapshot_download", download)
    model, _ = load(arguments(base, head="someone/head"))
    assert downloads == ["someone/head"] and len(reads) == 1
    for name, tensor in trained.mrp_head.state_dict().items():
        assert torch.equal(model.mrp_head.state_dict()[name], tensor)


@pytest.mark.parametrize("load_from", [MRPForDiffusionLM.from_pretrained, MRPForDiffusionLM.from_backbone])
def test_a_revision_of_a_local_folder_is_refused(folders, load_from):
    """It was ignored: whoever asked for an older commit got the files as they are now."""
    with pytest.raises(ValueError, match="revision v1 is for Hub ids, but .* is a local folder: omit it"):
        load_from(folders(1), revision="v1")
    load_from(folders(1), revision="main")  # the default of many callers, which names no commit


def test_a_config_from_the_hub_loads_weights_of_a_local_folder(folders):
    config = MRPConfig.from_pretrained(folders(1))
    config._commit_hash = "0" * 40  # where the config came from
    MRPForDiffusionLM.from_pretrained(folders(1), config=config)


def test_a_tokenizer_never_runs_the_code_of_its_folder(tmp_path, word_tokenizer):
    word_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenization_theirs.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "theirs", "auto_map": {"AutoConfig": "tokenization_theirs.Config"}})
    )
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    values["auto_map"] = {"AutoTokenizer": ["tokenization_theirs.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path, MRPConfig(), padding_side="left")
    assert tokenizer("what is one").input_ids == word_tokenizer("what is one").input_ids
    assert tokenizer.padding_side == "left"
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(("name", "text"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[]")])
def test_a_damaged_tokenizer_file_is_named(tmp_path, word_tokenizer, name, text):
    word_tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / name} "):
        load_tokenizer(tmp_path, MRPConfig())

"""Checkpoints whose files are damaged, missing or not what they should be, and sources that are not there."""

import json
import logging

import pytest
import torch
from edited_checkpoints import edit_config, edit_tensors
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from modeling_mrp import MRPForDiffusionLM, checkpoint_files

LOADS = (MRPForDiffusionLM.from_pretrained, MRPForDiffusionLM.from_backbone)


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A folder that a tiny model was saved to."""
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not the folder of a checkpoint: config.json is missing"),
        ("[]", r"config.json must hold a JSON object, got \[\]"),
        ("null", "config.json must hold a JSON object, got null"),
        ('{"model_type": ', "config.json is not valid JSON"),
        ("\udcff", "config.json is not valid JSON"),
    ],
)
def test_a_config_that_is_not_one_is_named(saved, text, message):
    path = saved / "config.json"
    path.unlink() if text is None else path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for load in LOADS:
        with pytest.raises(ValueError, match=message) as caught:
            load(saved)
        assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", None),
        ("num_attention_heads", 0),
        ("max_position_embeddings", -1),
        ("mask_token_id", "3"),
        ("mask_token_id", 3.5),
        ("mask_token_id", True),
        ("block_size", "4"),
        ("block_size", True),
        ("num_mrp_layers", "1"),
        ("rope_parameters", 3),
        ("rope_theta", "x"),
        ("hidden_act", "nope"),
        ("rms_norm_eps", "x"),
        ("eos_token_id", "x"),
        ("trained_acceptance", 3),
        ("calibrated_remask_threshold", "x"),
    ],
)
def test_a_config_value_of_a_wrong_type_is_named_with_its_file(saved, key, value):
    edit_config(saved, lambda values: (values.pop("rope_parameters", None), values.update({key: value})))
    for load in LOADS:
        with pytest.raises(ValueError, match=rf"config\.json: .*{key}"):
            load(saved)


def test_a_config_without_block_size_is_refused_unless_it_is_given(saved):
    """4 was assumed, in silence, for a model that had been trained with blocks of 8."""
    edit_config(saved, lambda values: values.pop("block_size"))
    for load in (*LOADS, AutoModel.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match="block_size is missing from the config: pass block_size=N"):
            load(saved)
    for load in LOADS:
        assert load(saved, block_size=8).config.block_size == 8


def test_a_head_that_the_config_promises_must_be_there(saved):
    """A checkpoint that had lost all tensors of its head loaded as a plain backbone."""
    edit_tensors(saved, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mrp_head" in name])
    with pytest.raises(
        ValueError, match=r"lacks its head: config.json states num_mrp_layers=1, but there is no tensor mrp_head"
    ):
        MRPForDiffusionLM.from_backbone(saved)
    with pytest.raises(ValueError, match="lacks its head"):
        MRPForDiffusionLM.from_backbone(saved, default_mrp_layers=0)
    assert MRPForDiffusionLM.from_backbone(saved, num_mrp_layers=0).mrp_head is None


@pytest.mark.parametrize("layers", [0, 1])
def test_without_generation_config_the_mode_is_spec_where_there_is_a_head(tiny_model, tmp_path, layers):
    tiny_model(num_mrp_layers=layers).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for load in (*LOADS, AutoModel.from_pretrained):
        options = {"num_mrp_layers": layers} if load == MRPForDiffusionLM.from_backbone else {}
        mode = load(tmp_path, **options).generation_config.to_dict().get("mrp_mode")
        assert mode == ("spec" if layers else None)


def test_a_damaged_generation_config_is_named(saved):
    """transformers goes on without a generation config that it cannot read, and so without its end of text."""
    (saved / "generation_config.json").write_text("{")
    for load in LOADS:
        with pytest.raises(ValueError, match="generation_config.json is not valid JSON"):
            load(saved)


@pytest.fixture
def sharded(tiny_model, tmp_path):
    """A folder with an index over several shards, and the path of that index."""
    tiny_model().save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    return tmp_path / "sharded" / "model.safetensors.index.json"


@pytest.mark.parametrize("values", [{}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_weight_map_is_named(sharded, values):
    sharded.write_text(json.dumps(values))
    for load in LOADS:
        with pytest.raises(ValueError, match="index.json has no weight_map"):
            load(sharded.parent)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", "weights.bin", 3])
def test_an_index_names_only_safetensors_of_its_own_folder(sharded, name):
    """The name was joined to the folder and read, wherever it led."""
    values = json.loads(sharded.read_text())
    values["weight_map"]["model.norm.weight"] = name
    sharded.write_text(json.dumps(values))
    for load in LOADS:
        with pytest.raises(ValueError, match="index.json places model.norm.weight in .*expected a .safetensors file"):
            load(sharded.parent)


def test_a_missing_shard_and_a_damaged_one_are_named(sharded):
    shard = min(sharded.parent.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    for load in LOADS:
        with pytest.raises(ValueError, match="cannot be read"):
            load(sharded.parent)
    shard.unlink()
    for load in LOADS:
        with pytest.raises(ValueError, match=f"missing {shard.name}"):
            load(sharded.parent)


def test_bin_files_are_not_read(saved):
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    for load in LOADS:
        with pytest.raises(OSError, match="model.safetensors is missing .only safetensors are read"):
            load(saved)


def test_a_head_is_not_a_model(tmp_path):
    (tmp_path / "mrp_head_config.json").write_text("{}")
    for load in LOADS:
        with pytest.raises(ValueError, match="holds a head, not a model"):
            load(tmp_path)


# -- sources that are not there


@pytest.fixture
def downloads(monkeypatch):
    """What is looked up on the Hub, which does not answer."""
    wanted = []

    def download(name, **options):
        wanted.append(name)
        raise ConnectionError("no answer")

    monkeypatch.setattr(checkpoint_files, "snapshot_download", download)
    return wanted


@pytest.mark.parametrize("source", ["no/such/place", "./folder", "/no/folder", "folder", "../org/name", "~/model"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(downloads, source):
    for load in LOADS:
        with pytest.raises(OSError, match=f"folder {source} does not exist"):
            load(source)
    assert downloads == []


def test_the_hub_is_asked_once(downloads):
    """transformers tried every file for half a minute, one after the other."""
    for load in LOADS:
        with pytest.raises(OSError, match="org/name is not a local folder, and .* no connection to .*no answer"):
            load("org/name")
    assert downloads == ["org/name"] * 2


def test_nothing_is_printed_about_the_tensors_of_a_fresh_head(tiny_model, tmp_path, caplog, monkeypatch):
    tiny_model(num_mrp_layers=0).save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        MRPForDiffusionLM.from_backbone(tmp_path, num_mrp_layers=1)
    assert not [record for record in caplog.records if "LOAD REPORT" in record.getMessage()]

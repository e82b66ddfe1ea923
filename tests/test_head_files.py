"""Heads saved on their own and loaded onto their backbone."""

import json

import pytest
import torch
from golden_checkpoints import BLOCK4, golden_step, plain_sdar
from safetensors.torch import load_file, save_file

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import load_head, save_head


def test_a_saved_head_loads_bit_for_bit(tmp_path, tiny_model):
    trained = tiny_model(num_mrp_layers=2)
    save_head(trained, tmp_path / "head")
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"mrp_head.safetensors", "mrp_head_config.json"}
    fresh = tiny_model(num_mrp_layers=2)
    torch.nn.init.zeros_(fresh.mrp_head.norm.weight)
    load_head(fresh, tmp_path / "head")
    expected = trained.mrp_head.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.mrp_head.state_dict().items())


def test_a_head_loads_onto_its_backbone_in_another_dtype_and_sharding(tmp_path, tiny_model):
    tiny_model().save_pretrained(tmp_path / "one")
    tiny_model().bfloat16().save_pretrained(tmp_path / "two", max_shard_size="20KB")
    save_head(MRPForDiffusionLM.from_pretrained(tmp_path / "one"), tmp_path / "head")
    other = MRPForDiffusionLM.from_pretrained(tmp_path / "two", dtype=torch.bfloat16)
    torch.nn.init.zeros_(other.mrp_head.norm.weight)
    load_head(other, tmp_path / "head")
    expected = tiny_model().mrp_head.state_dict()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in other.mrp_head.state_dict().items())


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"]
)
def test_a_head_of_another_backbone_is_refused(tmp_path, tiny_model, name):
    save_head(tiny_model(), tmp_path / "head")
    other = tiny_model()
    with torch.no_grad():
        other.get_parameter(name).mul_(1.01)  # as small a change as a fine-tune makes
    with pytest.raises(ValueError, match="load it onto the backbone it belongs to"):
        load_head(other, tmp_path / "head")


def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path, tiny_model):
    save_head(tiny_model(), tmp_path / "head")
    with pytest.raises(ValueError, match="num_mrp_layers=1"):
        load_head(tiny_model(num_mrp_layers=2), tmp_path / "head")
    path = tmp_path / "head" / "mrp_head.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "enorm.weight"}, path)
    with pytest.raises(ValueError, match=r"missing tensors: enorm\.weight"):
        load_head(tiny_model(), tmp_path / "head")
    save_file(tensors | {"norm.weight": torch.ones(5)}, path)
    with pytest.raises(ValueError, match=r"norm\.weight \(5,\) instead of \(32,\)"):
        load_head(tiny_model(), tmp_path / "head")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="cut short"):
        load_head(tiny_model(), tmp_path / "head")
    with pytest.raises(ValueError, match="holds no head"):
        load_head(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="no head to save"):
        save_head(tiny_model(num_mrp_layers=0), tmp_path / "none")


def test_head_whose_weights_were_damaged_is_refused(tmp_path, tiny_model):
    """A file whose second half a lost write had zeroed has the right tensors and used to load."""
    save_head(tiny_model(), tmp_path / "head")
    path = tmp_path / "head" / "mrp_head.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(ValueError, match=r"mrp_head\.safetensors is damaged"):
        load_head(tiny_model(), tmp_path / "head")
    config = tmp_path / "head" / "mrp_head_config.json"
    values = json.loads(config.read_text())
    del values["weights_sha256"]  # as heads of older versions, which load unchecked
    config.write_text(json.dumps(values))
    load_head(tiny_model(), tmp_path / "head")


def test_head_that_cannot_be_saved_leaves_the_old_one(tmp_path, tiny_model, monkeypatch):
    save_head(tiny_model(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space left on device")))
        with pytest.raises(OSError, match="no space left"):
            save_head(tiny_model(seed=1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_trained_head_merges_into_a_self_contained_folder(tmp_path):
    source = plain_sdar(tmp_path / "source", BLOCK4)
    save_head(MRPForDiffusionLM.from_backbone(BLOCK4), tmp_path / "head")
    report = convert(source, tmp_path / "out", head=tmp_path / "head")
    found, expected = golden_step(MRPForDiffusionLM.from_pretrained(tmp_path / "out"), BLOCK4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert report.head == "merged"

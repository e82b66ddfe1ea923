"""Saving, loading and wrapping checkpoints: bit-exact, with an error that names whatever does not fit."""

import json
import shutil
import warnings

import pytest
import torch
from edited_checkpoints import edit_config, edit_tensors
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from modeling_mrp import MRPConfig, MRPForDiffusionLM

IDS = torch.tensor([[5, 6, 7, 8, 9, 3]])


def logits_of(model):
    """Backbone's and, where there is a head, corrected logits on a fixed row."""
    with torch.no_grad():
        output = model(IDS, revealed_ids=IDS.clamp(min=4)[:, None] if model.mrp_head is not None else None)
    return [output.logits] if output.corrected_logits is None else [output.logits, output.corrected_logits]


def assert_equal_logits(first, second):
    for a, b in zip(logits_of(first), logits_of(second), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A folder that a tiny model was saved to."""
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def golden_copy(golden_folder, tmp_path):
    """A published-layout checkpoint that a test may damage."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden_folder / name, tmp_path)
    return tmp_path


# -- save and load


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"num_mrp_layers": 0}, {"num_mrp_layers": 2}])
def test_three_generations_of_save_and_load_are_bit_exact(tiny_model, tmp_path, options):
    first = current = tiny_model(**options)
    for generation in range(3):
        current.save_pretrained(tmp_path / str(generation))
        current = MRPForDiffusionLM.from_pretrained(tmp_path / str(generation))
        assert_equal_logits(first, current)
        assert current.state_dict().keys() == first.state_dict().keys()
        tied = current.lm_head.weight is current.model.embed_tokens.weight
        assert tied == first.config.tie_word_embeddings


def test_the_dtype_is_kept(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path / "float32")
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bfloat16")
    loaded = MRPForDiffusionLM.from_pretrained(tmp_path / "bfloat16")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert_equal_logits(model, loaded)


def test_generation_options_survive_saving_twice(tiny_model, tmp_path):
    model = tiny_model()
    options = {"mrp_mode": "spec", "mrp_steps": 5, "remasking_strategy": "sequential", "mrp_acceptance_floor": 0.7}
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    for generation in range(2):
        model.save_pretrained(tmp_path / str(generation))
        model = MRPForDiffusionLM.from_pretrained(tmp_path / str(generation))
        assert {name: vars(model.generation_config)[name] for name in options} == options
    assert (
        model.generate(IDS[:, :2], return_dict_in_generate=True, max_new_tokens=9).stats.drafts_proposed.shape[1] == 5
    )


def test_generation_options_survive_where_there_was_no_generation_config(saved, tmp_path):
    """transformers rebuilds a generation config that it made from the model's config, and drops what was set on it."""
    (saved / "generation_config.json").unlink()
    model = MRPForDiffusionLM.from_pretrained(saved)
    model.generation_config.mrp_mode = "remask"
    model.save_pretrained(tmp_path / "again")
    loaded = MRPForDiffusionLM.from_pretrained(tmp_path / "again")
    assert loaded.generation_config.mrp_mode == "remask"
    assert loaded.generate(IDS[:, :2], max_new_tokens=2).shape == (1, 4)


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_the_auto_classes_know_the_model(saved, auto_class):
    assert isinstance(AutoConfig.from_pretrained(saved), MRPConfig)
    model = auto_class.from_pretrained(saved)
    assert isinstance(model, MRPForDiffusionLM)
    assert_equal_logits(model, MRPForDiffusionLM.from_pretrained(saved))


def test_a_loaded_model_is_frozen_but_for_its_head(saved):
    model = MRPForDiffusionLM.from_pretrained(saved)
    assert not model.training
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"mrp_head"}
    model.train()
    assert not model.model.training and model.mrp_head.training


def test_sharded_weights_load(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_equal_logits(model, MRPForDiffusionLM.from_pretrained(tmp_path))
    assert_equal_logits(model, MRPForDiffusionLM.from_backbone(tmp_path))


# -- checkpoints that do not fit their config


@pytest.mark.parametrize("name", ["mrp_head.eh_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(saved, name):
    edit_tensors(saved, lambda tensors: tensors.pop(name))
    for load in (MRPForDiffusionLM.from_pretrained, MRPForDiffusionLM.from_backbone):
        with pytest.raises(ValueError, match=f"missing tensors: {name}; left-over tensors: none;"):
            load(saved)


def test_a_left_over_tensor_is_named(saved):
    edit_tensors(saved, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match="left-over tensors: model.layers.2.mlp.up_proj.weight"):
        MRPForDiffusionLM.from_pretrained(saved)


@pytest.mark.parametrize("name", ["mrp_head.eh_proj.weight", "model.norm.weight"])
def test_a_tensor_of_wrong_shape_is_named(saved, name):
    edit_tensors(saved, lambda tensors: tensors.update({name: torch.ones(3, 5)}))
    for load in (MRPForDiffusionLM.from_pretrained, MRPForDiffusionLM.from_backbone):
        with pytest.raises(ValueError, match=f"(?s){name}.*3, 5"):
            load(saved)


@pytest.mark.parametrize("kept", [0.9, 0.001])
def test_a_file_that_was_cut_short_is_named(saved, kept):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    for load in (MRPForDiffusionLM.from_pretrained, MRPForDiffusionLM.from_backbone):
        with pytest.raises(ValueError, match=f"{saved}.*cannot be read.*cut short"):
            load(saved)


def test_another_architecture_is_refused(tmp_path):
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for load in (MRPForDiffusionLM.from_pretrained, MRPForDiffusionLM.from_backbone):
        with pytest.raises(ValueError, match="model_type 'llama', expected.*sdar"):
            load(tmp_path)


def test_from_pretrained_refuses_a_published_checkpoint_and_names_from_backbone(golden_copy):
    """Its head has other tensor names: never a random head in its place."""
    with pytest.raises(ValueError, match="model_type 'sdar'.*from_backbone"):
        MRPForDiffusionLM.from_pretrained(golden_copy)


def test_a_config_without_mask_token_is_refused(saved):
    edit_config(saved, lambda values: values.pop("mask_token_id"))
    with pytest.raises(ValueError, match="mask_token_id is missing from the config"):
        MRPForDiffusionLM.from_pretrained(saved)
    with pytest.raises(ValueError, match="mask_token_id is missing from the config"):
        MRPForDiffusionLM.from_backbone(saved)
    assert MRPForDiffusionLM.from_backbone(saved, mask_token_id=5).config.mask_token_id == 5


def test_a_folder_without_weights_is_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        MRPForDiffusionLM.from_backbone(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": 2.0}, "block_size must be an integer of at least 1, got 2.0"),
        ({"num_mrp_layers": -1}, "num_mrp_layers must be an integer of at least 0"),
        ({"mask_token_id": 61, "vocab_size": 61}, "mask_token_id must be below vocab_size 61, got 61"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "use_sliding_window .* not supp"),
    ],
)
def test_a_config_value_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        MRPConfig(**options)


# -- from_backbone


@pytest.mark.parametrize("prefix", ["mrp_modules.0.model.", "mtp_modules.0.model."])
def test_a_published_head_is_kept_and_saved_under_our_names(golden_copy, tmp_path, prefix):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith("mrp_modules.")]:
            tensors[name.replace("mrp_modules.0.model.", prefix)] = tensors.pop(name)

    published = load_file(golden_copy / "model.safetensors")
    edit_tensors(golden_copy, rename)
    model = MRPForDiffusionLM.from_backbone(golden_copy)
    for name, tensor in model.mrp_head.state_dict().items():
        assert torch.equal(tensor, published["mrp_modules.0.model." + name])
    model.save_pretrained(tmp_path / "ours")
    names = load_file(tmp_path / "ours" / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} <= {"model", "lm_head", "mrp_head"}
    assert_equal_logits(model, MRPForDiffusionLM.from_pretrained(tmp_path / "ours"))
    assert_equal_logits(model, MRPForDiffusionLM.from_backbone(tmp_path / "ours"))


def test_num_mrp_layers_contradicting_the_head_is_refused(golden_copy):
    held = json.loads((golden_copy / "config.json").read_text())["num_nextn_predict_layers"]
    with pytest.raises(ValueError, match=f"num_mrp_layers=4 contradicts .* whose head has {held}: omit it"):
        MRPForDiffusionLM.from_backbone(golden_copy, num_mrp_layers=4)
    assert len(MRPForDiffusionLM.from_backbone(golden_copy, num_mrp_layers=held).mrp_head.layers) == held


def test_a_head_can_be_dropped(golden_copy):
    model = MRPForDiffusionLM.from_backbone(golden_copy, num_mrp_layers=0)
    assert model.mrp_head is None and model.generation_config.to_dict().get("mrp_mode") is None
    with_head = MRPForDiffusionLM.from_backbone(golden_copy)
    assert torch.equal(model(IDS).logits, with_head(IDS).logits)
    assert with_head.generation_config.mrp_mode == "spec"


def test_dropping_the_head_drops_the_mode_that_needed_it(tiny_model, tmp_path):
    model = tiny_model()
    model.generation_config.mrp_mode = "direct"
    model.save_pretrained(tmp_path)
    without = MRPForDiffusionLM.from_backbone(tmp_path, num_mrp_layers=0)
    assert without.generate(IDS[:, :3], max_new_tokens=2).shape == (1, 5)


@pytest.fixture
def plain_folder(tiny_model, tmp_path):
    """A plain SDAR checkpoint: a backbone without a head."""
    tiny_model(num_mrp_layers=0, tie_word_embeddings=True).save_pretrained(tmp_path)
    edit_config(tmp_path, lambda values: (values.update(model_type="sdar"), values.pop("num_mrp_layers")))
    return tmp_path


@pytest.mark.parametrize("layers", [None, 1])
def test_a_fresh_head_changes_nothing_yet(plain_folder, layers):
    model = MRPForDiffusionLM.from_backbone(plain_folder, num_mrp_layers=layers)
    assert len(model.mrp_head.layers) == (layers or 3)
    logits, corrected = logits_of(model)
    assert torch.equal(corrected[:, 0], logits)
    for name, parameter in model.mrp_head.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if name == "norm.weight":
            assert parameter.eq(0).all()
        elif parameter.dim() == 1:
            assert parameter.eq(1).all(), name
        elif name != "eh_proj.weight":
            std = model.config.initializer_range
            assert parameter.std().item() == pytest.approx(std, rel=0.15), name


def test_head_layers_start_as_the_backbones_last_layers(plain_folder):
    model = MRPForDiffusionLM.from_backbone(plain_folder, num_mrp_layers=1, head_init="backbone_layers")
    for name, tensor in model.mrp_head.layers[0].state_dict().items():
        assert torch.equal(tensor, model.model.layers[-1].state_dict()[name])
        assert tensor.data_ptr() != model.model.layers[-1].state_dict()[name].data_ptr()
    logits, corrected = logits_of(model)
    assert torch.equal(corrected[:, 0], logits)
    both = MRPForDiffusionLM.from_backbone(plain_folder, num_mrp_layers=2, head_init="backbone_layers")
    for ours, theirs in zip(both.mrp_head.layers, both.model.layers, strict=True):
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)


def test_more_head_layers_than_the_backbone_has_cannot_be_copied(plain_folder):
    with pytest.raises(ValueError, match="cannot copy num_mrp_layers=3 layers: the backbone has 2"):
        MRPForDiffusionLM.from_backbone(plain_folder, head_init="backbone_layers")


def test_an_unknown_head_init_is_refused(plain_folder):
    with pytest.raises(ValueError, match="head_init must be 'fresh' or 'backbone_layers', got 'random'"):
        MRPForDiffusionLM.from_backbone(plain_folder, head_init="random")


def test_overriding_what_the_backbone_was_trained_with_warns(plain_folder):
    with pytest.warns(UserWarning, match="block_size=8 overrides 4"):
        assert MRPForDiffusionLM.from_backbone(plain_folder, block_size=8).config.block_size == 8
    with pytest.warns(UserWarning, match="mask_token_id=5 overrides 3"):
        assert MRPForDiffusionLM.from_backbone(plain_folder, mask_token_id=5).config.mask_token_id == 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = MRPForDiffusionLM.from_backbone(plain_folder, block_size=4, mask_token_id=3).config
    assert (config.block_size, config.mask_token_id) == (4, 3)
    assert not [warning for warning in caught if "overrides" in str(warning.message)]


@pytest.mark.parametrize(("name", "value"), [("block_size", 0), ("mask_token_id", 61), ("num_mrp_layers", -1)])
@pytest.mark.filterwarnings("ignore:.*overrides")
def test_an_override_out_of_range_is_refused(plain_folder, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
        MRPForDiffusionLM.from_backbone(plain_folder, **{name: value})

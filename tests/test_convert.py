"""Conversion of checkpoints: what the new folder holds, and what is refused."""

import json

import pytest
import torch
from golden_checkpoints import HEAD, golden_step, plain_sdar, run, write_source
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert, replace_folder
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.checkpoints.push import selected_files


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", [HEAD, "mtp_modules.0.model."])
def test_a_published_checkpoint_keeps_its_golden_logits(golden_folder, tmp_path, shards, prefix):
    source = write_source(
        tmp_path / "source", golden_folder, rename=lambda name: name.replace(HEAD, prefix), shards=shards
    )
    report = convert(source, tmp_path / "out")
    found, expected = golden_step(MRPForDiffusionLM.from_pretrained(tmp_path / "out"), golden_folder)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert report.head == "kept"


def test_shards_of_the_size_asked_for_hold_the_same_tensors(golden_folder, tmp_path):
    convert(golden_folder, tmp_path / "whole")
    convert(golden_folder, tmp_path / "cut", max_shard_size="200KB")
    files = sorted(path.stat().st_size for path in (tmp_path / "cut").glob("model-*.safetensors"))
    assert len(files) >= 3 and files[-1] <= 210_000
    whole = MRPForDiffusionLM.from_pretrained(tmp_path / "whole").state_dict()
    cut = MRPForDiffusionLM.from_pretrained(tmp_path / "cut").state_dict()
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_our_own_folder_converts_to_one_with_equal_weights(golden_folder, tmp_path):
    convert(golden_folder, tmp_path / "first")
    report = convert(tmp_path / "first", tmp_path / "second")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert (report.base_model, report.head) == (golden_folder.name, "kept")


def test_a_plain_backbone_gets_a_fresh_head_that_changes_nothing(golden_folder, tmp_path):
    source = plain_sdar(tmp_path / "source", golden_folder)
    report = convert(source, tmp_path / "out", num_mrp_layers=2)
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "out")
    (logits, corrected), (expected, _) = golden_step(model, golden_folder)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert torch.equal(corrected, logits)
    assert (report.head, report.num_mrp_layers, len(model.mrp_head.layers)) == ("fresh", 2, 2)


@pytest.mark.parametrize("with_head", [True, False])
def test_conversion_to_no_head_keeps_the_backbone(golden_folder, tmp_path, with_head):
    source = golden_folder if with_head else plain_sdar(tmp_path / "source", golden_folder)
    report = convert(source, tmp_path / "out", num_mrp_layers=0)
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "out")
    values = load_file(golden_folder / "expected.safetensors")
    ids = torch.cat([values["step.prefix"], values["step.block"]])[None].long()
    logits = model(ids, logits_to_keep=model.config.block_size).logits[0]
    torch.testing.assert_close(logits, values["step.backbone_logits"], rtol=0, atol=1e-4)
    assert report.head == ("dropped" if with_head else "none") and model.mrp_head is None
    assert not any("mrp" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize(("option", "value"), [("num_mrp_layers", 5), ("mrp_residual", False)])
def test_an_option_that_contradicts_the_head_to_merge_is_refused(golden_folder, tmp_path, option, value):
    """It was ignored: the new folder had the layers of the head."""
    save_head(MRPForDiffusionLM.from_backbone(golden_folder), tmp_path / "head")
    held = json.loads((tmp_path / "head" / "mrp_head_config.json").read_text())[option]
    with pytest.raises(ValueError, match=f"{option}={value} contradicts the head in .*head, which has {held}: omit"):
        convert(golden_folder, tmp_path / "out", head=tmp_path / "head", **{option: value})
    convert(golden_folder, tmp_path / "out", head=tmp_path / "head", **{option: held})


@pytest.mark.parametrize("stated", ["bfloat16", "float32", None])
def test_weights_keep_their_dtype_whatever_the_config_states(golden_folder, tmp_path, stated):
    def to_bfloat16(tensors):
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    source = write_source(tmp_path / "source", golden_folder, edit=to_bfloat16, torch_dtype=stated)
    convert(source, tmp_path / "out")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in before.items():
        renamed = name.replace(HEAD, "mrp_head.")
        assert renamed not in after or torch.equal(after[renamed], tensor)  # a tied lm_head is not written
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_and_generation_config_are_kept(tmp_path, golden_folder, word_tokenizer):
    source = write_source(tmp_path / "source", golden_folder)
    word_tokenizer.save_pretrained(source)
    generation = {"eos_token_id": [1, 5], "pad_token_id": 2, "do_sample": True, "temperature": 0.7, "top_p": 0.8}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Theirs\n")
    convert(source, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    kept = GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    assert {name: kept[name] for name in generation} == generation
    assert kept["mrp_mode"] == "spec"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("what is one").input_ids == word_tokenizer("what is one").input_ids
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()


def test_sampling_values_without_do_sample_are_dropped(tmp_path, golden_folder):
    """Some published configs set a temperature without do_sample. transformers reads such a config but refuses to
    write it, so the converted model could not be saved again."""
    source = write_source(tmp_path / "source", golden_folder)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.7}))
    convert(source, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == 5 and "temperature" not in kept
    MRPForDiffusionLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == kept


def test_code_of_the_source_is_neither_run_nor_copied(tmp_path, golden_folder, word_tokenizer):
    source = write_source(tmp_path / "source", golden_folder)
    word_tokenizer.save_pretrained(source)
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')\n"
    for name in ("configuration_sdar_mrp", "modeling_sdar_mrp", "tokenization_theirs"):
        (source / f"{name}.py").write_text(trap)
    values = json.loads((source / "tokenizer_config.json").read_text())
    values["auto_map"] = {"AutoTokenizer": ["tokenization_theirs.Tokenizer", None]}
    (source / "tokenizer_config.json").write_text(json.dumps(values))
    convert(source, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("one").input_ids == word_tokenizer("one").input_ids
    assert not (tmp_path / "sprung").exists()
    assert not list((tmp_path / "out").glob("*sdar_mrp.py")) + list((tmp_path / "out").glob("*theirs*"))


# --- what conversion refuses


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", HEAD + "eh_proj.weight"])
def test_a_missing_tensor_is_named(golden_folder, tmp_path, name):
    source = write_source(tmp_path / "source", golden_folder, edit=lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=name.replace(HEAD, "mrp_head.").replace(".", r"\.")):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_left_over_tensor_is_named(golden_folder, tmp_path):
    source = write_source(
        tmp_path / "source", golden_folder, edit=lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)})
    )
    with pytest.raises(ValueError, match=r"model\.extra\.weight"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", HEAD + "norm.weight"])
def test_a_wrong_shape_is_named(golden_folder, tmp_path, name):
    source = write_source(
        tmp_path / "source", golden_folder, edit=lambda tensors: tensors.update({name: tensors[name][:-1].clone()})
    )
    with pytest.raises(ValueError, match=name.replace(HEAD, "mrp_head.").replace(".", r"\.")):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("keep", [0.5, 0.9999, 0.00001])
def test_a_truncated_file_is_named(golden_folder, tmp_path, keep):
    source = write_source(tmp_path / "source", golden_folder)
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors.*cut short"):
        convert(source, tmp_path / "out")


def test_a_missing_shard_is_named(golden_folder, tmp_path):
    source = write_source(tmp_path / "source", golden_folder, shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="missing model-00002-of-00003.safetensors"):
        convert(source, tmp_path / "out")


def test_another_architecture_is_refused(golden_folder, tmp_path):
    source = write_source(tmp_path / "source", golden_folder, model_type="llama")
    with pytest.raises(ValueError, match="model_type 'llama'"):
        convert(source, tmp_path / "out")


def test_a_missing_mask_token_is_named_and_can_be_given(golden_folder, tmp_path):
    source = write_source(tmp_path / "source", golden_folder, mask_token_id=None)
    with pytest.raises(ValueError, match="mask_token_id is missing"):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", mask_token_id=95)
    assert MRPForDiffusionLM.from_pretrained(tmp_path / "out").config.mask_token_id == 95


def test_another_block_size_is_allowed_with_a_warning(golden_folder, tmp_path):
    with pytest.warns(UserWarning, match="block_size=2"):
        report = convert(golden_folder, tmp_path / "out", block_size=2)
    assert report.block_size == MRPForDiffusionLM.from_pretrained(tmp_path / "out").config.block_size == 2


def test_an_existing_folder_is_replaced_only_with_overwrite(golden_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        convert(golden_folder, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").exists()
    convert(golden_folder, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "notes.txt").exists()
    assert (tmp_path / "out" / "model.safetensors").exists()
    selected_files(tmp_path / "out")  # raises if the new folder is incomplete


def test_a_folder_that_is_read_is_never_replaced(golden_folder, tmp_path):
    source = write_source(tmp_path / "models" / "source", golden_folder)
    save_head(MRPForDiffusionLM.from_backbone(golden_folder), tmp_path / "heads" / "head")
    (tmp_path / "link").symlink_to(source)
    for destination in (source, source / "out", tmp_path / "models", tmp_path / "link", tmp_path / "heads"):
        with pytest.raises(ValueError, match="overlaps with"):
            convert(source, destination, head=tmp_path / "heads" / "head", overwrite=True)
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "heads" / "head" / "mrp_head.safetensors").exists()


def test_the_current_folder_is_never_replaced(golden_folder, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for destination in (".", "..", tmp_path):
        with pytest.raises(ValueError, match="holds the current folder"):
            convert(golden_folder, destination, overwrite=True)


def test_a_link_as_destination_stays_and_its_target_is_replaced(golden_folder, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    convert(golden_folder, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_an_old_folder_is_restored_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "missing", tmp_path / "old")
    assert (tmp_path / "old" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_full_disk_is_one_line_and_the_old_folder_stays_whole(golden_folder, tmp_path):
    """A limit on the size of files stands in for the full disk: safetensors reports both as its own error."""
    convert(golden_folder, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    done = run(f"""
import resource
from mrp_trainer.commands.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
print(main(["convert", {str(golden_folder)!r}, {str(tmp_path / "out")!r}, "--overwrite"]))
""")
    assert done.stdout == "2\n"
    assert done.stderr.splitlines()[-1].startswith(f"mrp: error: {tmp_path / 'out'} cannot be written: ")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_block_size_that_the_source_lacks_can_be_given(golden_folder, tmp_path):
    size = json.loads((golden_folder / "config.json").read_text())["block_size"]
    source = write_source(tmp_path / "source", golden_folder, block_size=None)
    with pytest.raises(ValueError, match="config.json: block_size is missing .*mrp convert --block-size N"):
        convert(source, tmp_path / "out")
    assert convert(source, tmp_path / "out", block_size=size).block_size == size


def test_a_damaged_tokenizer_file_is_named(golden_folder, tmp_path):
    source = write_source(tmp_path / "source", golden_folder)
    (source / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="source/tokenizer_config.json is not valid JSON"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4])
def test_peak_memory_stays_below_1_3_times_the_checkpoint(tmp_path, shards):
    """Compares the growth of resident memory with the size of a checkpoint of 400 MB."""
    run(f"""
import json, torch
from pathlib import Path
from safetensors.torch import save_file
from modeling_mrp import MRPConfig, MRPForDiffusionLM
config = MRPConfig(vocab_size=8000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, mask_token_id=3,
                   num_attention_heads=16, num_key_value_heads=8, head_dim=128, num_mrp_layers=1, block_size=4)
MRPForDiffusionLM(config).save_pretrained({str(tmp_path / "source")!r}, max_shard_size="{400 // shards + 40}MB")
""")
    size = sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    assert size > 350e6
    measured = run(f"""
import mrp_trainer.checkpoints.convert, transformers.models.qwen3.modeling_qwen3

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

before = resident("VmRSS")
mrp_trainer.checkpoints.convert.convert({str(tmp_path / "source")!r}, {str(tmp_path / "out")!r})
print(resident("VmHWM") - before)
""")
    assert int(measured.stdout.split()[-1]) <= 1.3 * size

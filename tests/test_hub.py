"""Conversion, heads on their own, cards and uploads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from local_hub import LocalHub
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.cards import render_card
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.checkpoints.push import check_uploadable, push
from mrp_trainer.checkpoints.weight_files import fetch

HEAD = "mrp_modules.0.model."
BLOCK4 = Path(__file__).parent / "golden" / "block4"


def write_source(
    folder: Path, golden: Path, *, rename=lambda name: name, edit=lambda tensors: None, shards=1, **config
):
    """A source checkpoint: a golden one with other tensor names, tensors, files or config values (None drops one)."""
    folder.mkdir()
    tensors = {rename(name): tensor for name, tensor in load_file(golden / "model.safetensors").items()}
    edit(tensors)
    values = json.loads((golden / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {
        name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def plain_sdar(folder: Path, golden: Path, **options) -> Path:
    """The golden backbone as a plain SDAR checkpoint, without a head."""

    def drop_head(tensors):
        for name in [name for name in tensors if name.startswith(HEAD)]:
            del tensors[name]

    return write_source(
        folder, golden, edit=drop_head, num_nextn_predict_layers=None, num_mrp_heads=None, auto_map=None, **options
    )


def golden_step(model, golden: Path):
    """(A, A + C) of the golden step by the model, and the expected ones; all [B, V]."""
    values = load_file(golden / "expected.safetensors")
    before = torch.cat([values["step.prefix"], values["step.block"]])[None].long()
    after = torch.cat([values["step.prefix"], values["step.revealed_block"]])[None, None].long()
    with torch.no_grad():
        out = model(before, revealed_ids=after, logits_to_keep=model.config.block_size)
    expected = values["step.backbone_logits"], values["step.corrected_logits.full_context"]
    return (out.logits[0], out.corrected_logits[0, 0]), expected


def run(code: str, **environment) -> subprocess.CompletedProcess:
    """Run Python code in a fresh process that sees this package; fails with its stderr when it fails."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


# --- what conversion gives


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


def test_our_own_folder_converts_to_an_equal_one(golden_folder, tmp_path):
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
def test_a_conversion_without_a_head_leaves_the_backbone_alone(golden_folder, tmp_path, with_head):
    source = golden_folder if with_head else plain_sdar(tmp_path / "source", golden_folder)
    report = convert(source, tmp_path / "out", num_mrp_layers=0)
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "out")
    values = load_file(golden_folder / "expected.safetensors")
    ids = torch.cat([values["step.prefix"], values["step.block"]])[None].long()
    logits = model(ids, logits_to_keep=model.config.block_size).logits[0]
    torch.testing.assert_close(logits, values["step.backbone_logits"], rtol=0, atol=1e-4)
    assert report.head == "none" and model.mrp_head is None
    assert not any("mrp" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


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
    """Some published configs set a temperature and leave do_sample out: transformers reads that, and then refuses to
    write it, so the folder could not be saved again."""
    source = write_source(tmp_path / "source", golden_folder)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.7}))
    convert(source, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == 5 and "temperature" not in kept
    MRPForDiffusionLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")


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


def test_an_existing_folder_is_replaced_only_when_told(golden_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        convert(golden_folder, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").exists()
    convert(golden_folder, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "notes.txt").exists()
    check_uploadable(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4])
def test_peak_memory_stays_below_1_3_times_the_checkpoint(tmp_path, shards):
    """Resident memory over that of the idle process, of a checkpoint of 400 MB, fresh head included in neither."""
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


# --- the Hub


@pytest.fixture
def hub(tmp_path):
    with LocalHub() as server:
        server.variables = server.environment(tmp_path / "cache")
        yield server


def test_a_hub_id_converts_and_the_result_knows_its_base(hub, tmp_path):
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


def test_a_push_is_one_commit_that_replaces_old_weights_and_loads(hub, tmp_path):
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


def test_a_push_that_fails_leaves_the_old_state(hub, tmp_path):
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


def test_a_head_folder_is_complete_only_with_readable_weights(tmp_path, tiny_model):
    folder = save_head(tiny_model(), tmp_path / "head")
    check_uploadable(folder)
    weights = folder / "mrp_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="cut short"):
        push(folder, "org/mine")
    weights.unlink()
    with pytest.raises(ValueError, match="missing mrp_head.safetensors"):
        push(folder, "org/mine")


# --- heads on their own


def test_a_head_comes_back_bit_for_bit_on_its_backbone(tmp_path, tiny_model):
    trained = tiny_model(num_mrp_layers=2)
    save_head(trained, tmp_path / "head")
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"mrp_head.safetensors", "mrp_head_config.json"}
    fresh = tiny_model(num_mrp_layers=2)
    torch.nn.init.zeros_(fresh.mrp_head.norm.weight)
    load_head(fresh, tmp_path / "head")
    expected = trained.mrp_head.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.mrp_head.state_dict().items())


def test_a_head_fits_its_backbone_in_another_dtype_and_sharding(tmp_path, tiny_model):
    tiny_model().save_pretrained(tmp_path / "one")
    tiny_model().bfloat16().save_pretrained(tmp_path / "two", max_shard_size="20KB")
    save_head(MRPForDiffusionLM.from_pretrained(tmp_path / "one"), tmp_path / "head")
    load_head(MRPForDiffusionLM.from_pretrained(tmp_path / "two", dtype=torch.bfloat16), tmp_path / "head")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"]
)
def test_a_head_of_another_backbone_is_refused(tmp_path, tiny_model, name):
    save_head(tiny_model(), tmp_path / "head")
    other = tiny_model()
    with torch.no_grad():
        other.get_parameter(name).mul_(1.01)  # as little as a fine-tune changes
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


def test_a_trained_head_merges_into_a_self_contained_folder(tmp_path):
    source = plain_sdar(tmp_path / "source", BLOCK4)
    save_head(MRPForDiffusionLM.from_backbone(BLOCK4), tmp_path / "head")
    report = convert(source, tmp_path / "out", head=tmp_path / "head")
    found, expected = golden_step(MRPForDiffusionLM.from_pretrained(tmp_path / "out"), BLOCK4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert report.head == "merged"


# --- cards


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_card_is_filled_in_and_its_front_matter_parses(tiny_model, layers):
    card = render_card(
        tiny_model(num_mrp_layers=layers), name="mine", repository="org/mine", license="apache-2.0", figures="| a |"
    )
    front_matter = yaml.safe_load(card.split("---")[1])
    assert front_matter["license"] == "apache-2.0" and front_matter["library_name"] == "transformers"
    assert 'from_pretrained("org/mine", trust_remote_code=True)' in card
    assert "$" not in card and "| a |" in card
    assert {0: "| none |", 1: "| 1 layer |", 3: "| 3 layers |"}[layers] in card
    assert ('"direct"' in card) == (layers > 0)


def test_the_name_of_an_embedded_checkpoint_is_its_folder_unless_one_lies_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, commit = fetch("sdar-tiny-mrp")
    assert (folder / "model.safetensors").is_file() and commit is None
    (tmp_path / "sdar-tiny-mrp").mkdir()
    assert fetch("sdar-tiny-mrp")[0].resolve() == tmp_path / "sdar-tiny-mrp"

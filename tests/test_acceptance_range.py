"""How many drafts a verification accepts: measured after training, stored with the head, checked by `mrp verify`."""

import json

import numpy as np
import pytest
import torch

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.commands.cli import main as mrp
from mrp_trainer.evaluation.acceptance import acceptance_range, accepted_per_verification, decode_figures
from mrp_trainer.train import main as train

PROMPTS = [[5, 6, 7], [9, 8], [10, 11, 12, 13, 14, 15], [7, 7], [6, 10, 4, 17]]
RECORD = {"mrp_steps": 4, "low": 0.25, "high": 1.5}


@pytest.fixture
def model(tiny_model):
    """Residuals small against the logits: drafts are sometimes right and sometimes wrong."""
    model = tiny_model(block_size=8, vocab_size=20, initializer_range=0.3)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    return model


@pytest.mark.parametrize("drafts", [2, 4])
def test_each_prompt_counts_its_own_drafts_whatever_it_is_batched_with(model, drafts):
    expected = []
    for prompt in PROMPTS:
        stats = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, mrp_mode="spec", mrp_steps=drafts, return_dict_in_generate=True
        ).stats
        expected.append((stats.drafts_accepted.sum() / stats.drafts_proposed[0, 1]).item())
    rates = accepted_per_verification(model, PROMPTS, drafts, 24, batch_size=2)
    assert rates == pytest.approx(expected)
    assert 0 < max(rates) <= drafts - 1
    found = acceptance_range(model, PROMPTS, drafts, 24)
    assert found["mrp_steps"] == drafts
    assert [found["low"], found["high"]] == pytest.approx(np.percentile(expected, [5, 95]).tolist())


def test_without_drafts_there_is_no_range(model):
    assert acceptance_range(model, [[5, 6, 7, 8, 9, 10, 11]], 4, max_new_tokens=1) is None  # one mask: one forward
    with pytest.raises(ValueError, match="drafts must be at least 2, .*got 1"):
        accepted_per_verification(model, PROMPTS, 1, 24)


@pytest.mark.parametrize("attention", ["flex_attention", "eager"])
def test_decoding_replaces_flex_attention_by_sdpa(model, monkeypatch, attention):
    """It would compile for every length. Training gets its own attention back, even after an error."""
    expected = decode_figures(model, PROMPTS, 4, 24), acceptance_range(model, PROMPTS, 4, 24)
    model.set_attn_implementation(attention)
    seen = set()
    model.model.register_forward_pre_hook(lambda *_: seen.add(model.config._attn_implementation))
    assert (decode_figures(model, PROMPTS, 4, 24), acceptance_range(model, PROMPTS, 4, 24)) == expected
    assert seen == {"sdpa" if attention == "flex_attention" else attention}
    assert model.config._attn_implementation == attention
    for measure in (decode_figures, acceptance_range):
        with pytest.raises(ValueError, match="max_new_tokens"):
            measure(model, PROMPTS, 4, max_new_tokens=-1)
        assert model.config._attn_implementation == attention


def test_the_record_is_stored_and_converted_with_the_head(model, tmp_path):
    model.config.trained_acceptance = RECORD
    model.save_pretrained(tmp_path / "whole")
    save_head(model, tmp_path / "head")
    convert(tmp_path / "whole", tmp_path / "again")
    convert(tmp_path / "whole", tmp_path / "base", num_mrp_layers=0)
    convert(tmp_path / "base", tmp_path / "fresh", num_mrp_layers=1)
    convert(tmp_path / "base", tmp_path / "merged", head=tmp_path / "head")
    found = {
        name: MRPForDiffusionLM.from_pretrained(tmp_path / name).config.trained_acceptance
        for name in ("whole", "again", "base", "fresh", "merged")
    }
    assert found == {"whole": RECORD, "again": RECORD, "base": None, "fresh": None, "merged": RECORD}


def test_a_head_without_a_record_clears_that_of_the_one_it_replaces(model, tmp_path):
    save_head(model, tmp_path)
    model.config.trained_acceptance = RECORD
    assert load_head(model, tmp_path).config.trained_acceptance is None


def test_an_incomplete_record_is_refused():
    with pytest.raises(ValueError, match="trained_acceptance must hold mrp_steps, low and high, got"):
        MRPConfig(trained_acceptance={"low": 0.1})


@pytest.mark.parametrize("held_out", [True, False])
def test_training_records_what_held_out_prompts_accept(tiny_model, word_tokenizer, tmp_path, held_out):
    tiny_model(num_mrp_layers=0, block_size=8).save_pretrained(tmp_path / "base")
    word_tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"prompt": f"what is {word} ?", "completion": f"so {word} . ok"} for word in ("one", "two", "three")]
    for name in ("data.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "base_model": tmp_path / "base", "train_data": tmp_path / "data.jsonl", "output_dir": tmp_path / "head",
        "num_mrp_layers": 1, "sequence_length": 16, "packing": False, "unroll_steps": 2, "max_steps": 2,
        "decode_new_tokens": 24, "use_cpu": True, "disable_tqdm": True,
    } | ({"eval_data": tmp_path / "held-out.jsonl"} if held_out else {})  # fmt: skip
    train([text for name, value in options.items() for text in (f"--{name}", str(value))])
    recorded = json.loads((tmp_path / "head" / "mrp_head_config.json").read_text())["trained_acceptance"]
    if not held_out:
        assert recorded is None
        return
    model = MRPForDiffusionLM.from_backbone(tmp_path / "base", num_mrp_layers=1)
    load_head(model, tmp_path / "head")
    prompts = [word_tokenizer(row["prompt"])["input_ids"] for row in rows]
    assert recorded == acceptance_range(model.eval(), prompts, 3, 24)


@pytest.mark.parametrize(
    ("shift", "verdict", "status"),
    [(0.0, "in range", 0), (0.5, "BELOW", 1), (-0.5, "above", 0), (None, "unknown", 0)],
)
def test_verify_compares_with_the_record(model, word_tokenizer, tmp_path, capsys, shift, verdict, status):
    texts = ["what is one plus two ?", "so then"]
    rates = accepted_per_verification(model, [word_tokenizer(text)["input_ids"] for text in texts], 4, 24)
    mean = sum(rates) / len(rates)
    if shift is not None:
        model.config.trained_acceptance = {"mrp_steps": 4, "low": mean + shift - 1e-6, "high": mean + shift + 1e-6}
    model.save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    arguments = ["verify", str(tmp_path), *(part for text in texts for part in ("--prompt", text)), "--raw"]
    arguments += ["--max-new-tokens", "24"]
    assert mrp(arguments) == status
    line = next(line for line in capsys.readouterr().out.splitlines() if "drafts of the head" in line)
    assert line.startswith(verdict) and f"{mean:.2f} at K = 4" in line
    assert ("not recorded" in line) == (shift is None)
    assert mrp([*arguments, "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["acceptance"]["mean"] == pytest.approx(mean) and report["acceptance"]["verdict"] == verdict


def test_a_checkpoint_without_a_head_has_nothing_to_compare(tiny_model, word_tokenizer, tmp_path, capsys):
    tiny_model(num_mrp_layers=0, vocab_size=20).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted", num_mrp_layers=0)
    word_tokenizer.save_pretrained(tmp_path / "converted")
    arguments = ["verify", str(tmp_path / "converted"), "--prompt", "so then", "--raw", "--max-new-tokens", "8"]
    arguments += ["--draft", "self"]
    assert mrp([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance"] is None

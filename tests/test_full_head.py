"""A head that predicts the full next distribution (`mrp_residual=False`) instead of the change of the logits."""

import json

import pytest
import torch
from plain_head_loop import decode, direct, remask

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.checkpoints.lora import is_fresh
from mrp_trainer.train import main

IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 11, 12]])
STATES = torch.stack([IDS, IDS.clamp(min=4)], dim=1)  # [1, K, L]


@pytest.fixture
def pair(tiny_model):
    """A residual and a full head of the same weights on the same backbone."""
    return tiny_model(block_size=8, initializer_range=0.3), full(tiny_model)


def full(tiny_model, **options):
    return tiny_model(block_size=8, initializer_range=0.3, mrp_residual=False, **options)


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 61, (length,), generator=generator).tolist() for length in (3, 8, 12)]


def test_the_output_of_the_head_is_the_corrected_state_at_every_depth(pair):
    """One step from the same state: the residual head's result less that state. The second starts from the first's."""
    residual, whole = pair
    base = residual(IDS).last_hidden_state
    with torch.no_grad():
        corrected = whole(IDS, revealed_ids=STATES).corrected_hidden_states
        first = residual(IDS, revealed_ids=STATES[:, :1]).corrected_hidden_states[:, 0] - base
    torch.testing.assert_close(corrected[:, 0], first, atol=1e-4, rtol=1e-4)
    torch.nn.init.zeros_(whole.mrp_head.norm.weight)
    assert not whole(IDS, revealed_ids=STATES).corrected_hidden_states.any()  # nothing of h_A is in it


@pytest.mark.parametrize("dual", [False, True])
def test_hidden_states_reach_the_next_step_through_the_head_alone(pair, dual):
    """acc_2 of a chain = one step from acc_1, fed in as the hidden state before the reveal."""
    _, whole = pair
    clean = IDS if dual else None
    with torch.no_grad():
        chain = whole(IDS, revealed_ids=STATES, clean_ids=clean).corrected_hidden_states
        once = whole(IDS, revealed_ids=STATES[:, :1], clean_ids=clean).corrected_hidden_states
        other = whole(IDS, revealed_ids=STATES.flip(1), clean_ids=clean).corrected_hidden_states
    torch.testing.assert_close(chain[:, :1], once)
    assert (chain[:, 1] - other[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["spec", "direct", "leave_one_out", "confidence", "residual"])
def test_every_mode_equals_the_plain_loop(tiny_model, prompts, mode):
    model = full(tiny_model)
    plain, _ = decode(model, prompts)
    if mode == "spec":
        new, stats = decode(model, prompts, mrp_mode="spec", mrp_steps=4)
        assert new == plain
        assert stats.drafts_proposed.sum() > 0
    elif mode == "direct":
        new, _ = decode(model, prompts, mrp_mode="direct", mrp_steps=2)
        assert new == [direct(model, prompt, 20, 2) for prompt in prompts]
        assert new != plain
    else:
        threshold = 8.0 if mode == "residual" else 0.1
        options = {"remask_criterion": mode, "remask_threshold": threshold, "confidence_threshold": 0.2}
        new, _ = decode(model, prompts, mrp_mode="remask", **options)
        assert new == [remask(model, prompt, 20, 0.2, mode, threshold) for prompt in prompts]


def test_a_fresh_full_head_gives_a_distribution_and_not_a_flat_one(tiny_model, tmp_path):
    tiny_model(num_mrp_layers=0).save_pretrained(tmp_path)
    model = MRPForDiffusionLM.from_backbone(tmp_path, num_mrp_layers=1, mrp_residual=False)
    assert not model.config.mrp_residual
    assert model.mrp_head.norm.weight.eq(1).all() and is_fresh(model)
    corrected = model(IDS, revealed_ids=STATES).corrected_hidden_states
    torch.testing.assert_close(corrected.pow(2).mean(-1), torch.ones(1, 2, 8), atol=1e-3, rtol=0)  # unit RMS
    residual = MRPForDiffusionLM.from_backbone(tmp_path, num_mrp_layers=1)
    assert residual.config.mrp_residual and residual.mrp_head.norm.weight.eq(0).all() and is_fresh(residual)


def test_the_flag_is_kept_by_save_load_and_convert_and_never_overridden(tiny_model, tmp_path):
    model = full(tiny_model)
    model.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "converted")
    for name in ("saved", "converted"):
        loaded = MRPForDiffusionLM.from_pretrained(tmp_path / name)
        assert loaded.config.mrp_residual is False
        expected = model(IDS, revealed_ids=STATES).corrected_logits
        assert torch.equal(loaded(IDS, revealed_ids=STATES).corrected_logits, expected)
    with pytest.raises(ValueError, match="mrp_residual=True contradicts .* whose head was trained with False"):
        MRPForDiffusionLM.from_backbone(tmp_path / "saved", mrp_residual=True)
    with pytest.raises(ValueError, match="mrp_residual must be True or False, got 1"):
        MRPConfig(mrp_residual=1)


def test_a_published_head_is_residual_unless_told_otherwise(golden_folder, tmp_path):
    assert MRPForDiffusionLM.from_backbone(golden_folder).config.mrp_residual
    report = convert(golden_folder, tmp_path / "full", mrp_residual=False)
    assert report.head == "kept"
    assert not MRPForDiffusionLM.from_pretrained(tmp_path / "full").config.mrp_residual


def test_a_saved_head_states_whether_it_is_residual(tiny_model, tmp_path):
    """A model of the other kind refuses it, `convert` makes the right kind; a file without the flag is residual."""
    model = full(tiny_model)
    save_head(model, tmp_path / "head")
    with pytest.raises(ValueError, match="trained with mrp_residual=False and the model has True"):
        load_head(tiny_model(block_size=8, initializer_range=0.3), tmp_path / "head")
    model.save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "base", num_mrp_layers=0)
    convert(tmp_path / "base", tmp_path / "whole", head=tmp_path / "head")
    merged = MRPForDiffusionLM.from_pretrained(tmp_path / "whole")
    expected = model(IDS, revealed_ids=STATES).corrected_logits
    torch.testing.assert_close(merged(IDS, revealed_ids=STATES).corrected_logits, expected, atol=1e-4, rtol=1e-4)
    path = tmp_path / "head" / "mrp_head_config.json"
    values = json.loads(path.read_text())
    del values["mrp_residual"]
    path.write_text(json.dumps(values))
    residual = load_head(tiny_model(block_size=8, initializer_range=0.3), tmp_path / "head")
    assert residual.config.mrp_residual
    for name, tensor in model.mrp_head.state_dict().items():
        assert torch.equal(residual.mrp_head.state_dict()[name], tensor)


def test_training_with_the_option_writes_a_full_head(tiny_model, word_tokenizer, tmp_path):
    tiny_model(num_mrp_layers=0).save_pretrained(tmp_path / "base")
    word_tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"prompt": f"what is {word} ?", "completion": f"so {word} . ok"} for word in ("one", "two", "three")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "base_model": tmp_path / "base", "train_data": tmp_path / "data.jsonl", "output_dir": tmp_path / "head",
        "num_mrp_layers": 1, "mrp_residual": False, "sequence_length": 16, "unroll_steps": 2, "max_steps": 3,
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    assert main([text for name, value in options.items() for text in (f"--{name}", str(value))]) == 0
    model = MRPForDiffusionLM.from_backbone(tmp_path / "base", num_mrp_layers=1, mrp_residual=False)
    load_head(model, tmp_path / "head")
    assert not is_fresh(model)

"""`mrp verify` passes where decoding is lossless, and shows where it is not."""

import json

import pytest
import torch

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.commands.cli import main
from mrp_trainer.commands.verify import describe_check
from mrp_trainer.evaluation.verify import passed, verify


@pytest.fixture
def inputs(word_tokenizer):
    word_tokenizer.padding_side = "left"
    return word_tokenizer(["what is one plus two ?", "so then"], return_tensors="pt", padding=True)


def test_every_check_holds_for_exact_acceptance(tiny_model, word_tokenizer, inputs):
    checks = verify(tiny_model(block_size=8, vocab_size=20), word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3)
    assert len(checks) == 4 * 2 + 4
    assert all(check.same == check.compared == 2 for check in checks)
    assert all(passed(check, strict=True) for check in checks)


def test_a_difference_is_located_with_its_candidates(tiny_model, word_tokenizer, inputs):
    """Token acceptance without a floor takes the order of the drafts: not lossless, and verify says where."""
    model = tiny_model(block_size=8, vocab_size=20)
    options = {"mrp_steps": 8, "mrp_draft": "self", "mrp_acceptance": "token", "mrp_acceptance_floor": 0.0}
    checks = verify(model, word_tokenizer, inputs, max_new_tokens=40, **options)
    found = [check for check in checks if check.difference is not None]
    assert found and not any(passed(check, strict=True) for check in found)
    for check in found:
        difference = check.difference
        assert difference.expected != difference.found
        assert "DIFFERENT" in describe_check(check, strict=True)
        assert f"position {difference.position}" in describe_check(check, strict=True)
    greedy = next(check.difference for check in found if "static, greedy" in check.name)
    row = inputs["input_ids"][greedy.prompt][inputs["attention_mask"][greedy.prompt].bool()][None]
    plain = model.generate(row, mrp_mode=None, max_new_tokens=40)
    assert word_tokenizer.decode(plain[0, greedy.position]) == greedy.expected


def test_command_exits_1_on_a_difference_and_0_without(tiny_model, word_tokenizer, tmp_path, capsys):
    tiny_model(block_size=8, vocab_size=20).save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    arguments = [
        "verify",
        str(tmp_path),
        "--prompt",
        "what is one plus two ?",
        "--raw",
        "--max-new-tokens",
        "30",
        "--json",
    ]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main([*arguments[:-1], "--steps", "8"]) == 0
    assert "every check holds" in capsys.readouterr().out


def test_margins_of_a_half_precision_difference_are_judged_by_its_rounding(tiny_model, word_tokenizer, inputs):
    checks = verify(
        tiny_model(block_size=8, vocab_size=20).to(torch.bfloat16),
        word_tokenizer,
        inputs,
        max_new_tokens=18,
        mrp_steps=3,
    )
    assert all(passed(check, strict=False) for check in checks if "mask" not in check.name)


@pytest.mark.parametrize("seed", [2, 9])
def test_a_text_that_ends_inside_a_block_differs_by_rounding_only(
    tiny_model, word_tokenizer, inputs, monkeypatch, seed
):
    """What is revealed after the end of the text is not recorded.

    A step at which the decoder revealed such a position and the replay would have revealed another, or the other way
    round, used to be impossible by any rounding: its excess was infinite, and verify failed. Here the logits of more
    than one state differ from those of one by a rounding error of bfloat16.
    """
    model = tiny_model(seed=seed, block_size=8, vocab_size=20).to(torch.bfloat16)
    logits, error = model.logits, 2**-8 * (torch.arange(20) % 2 * 2 - 1)
    monkeypatch.setattr(
        model, "logits", lambda hidden: (logits(hidden).float() * (1 + error * (len(hidden) > 8))).bfloat16()
    )
    checks = verify(model, word_tokenizer, inputs, max_new_tokens=13, mrp_steps=3)
    assert any(check.difference is not None for check in checks)
    assert all(passed(check, strict=False) for check in checks)


def test_a_depth_without_drafts_is_not_shown(tiny_model, word_tokenizer, inputs):
    """It used to read 0.00, as if all drafts at that depth had been rejected."""
    model = tiny_model(block_size=8, vocab_size=20)
    options = {"mrp_steps": 4, "mrp_draft_threshold": 1.0}  # stops before the second draft of the head
    for check in verify(model, word_tokenizer, inputs, max_new_tokens=8, **options)[:8]:
        assert check.accepted_by_depth == []
        assert describe_check(check, strict=True).endswith("accepted by depth: -")
    for check in verify(model, word_tokenizer, inputs, max_new_tokens=8, mrp_steps=2)[:8]:
        assert len(check.accepted_by_depth) == 1


def test_a_row_that_depends_on_its_neighbours_is_located(tiny_model, word_tokenizer, inputs, monkeypatch):
    """A model that adds to the logits of more than one block: rows alone say something else, far beyond rounding."""
    model = tiny_model(block_size=8, vocab_size=20)
    logits = model.logits
    bias = torch.arange(20.0)
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden) + bias * (len(hidden) > 8))
    checks = verify(model, word_tokenizer, inputs, max_new_tokens=8, mrp_steps=3)
    check = next(check for check in checks if check.name == "a batch equals its rows, backbone-only")
    assert check.same < 2 and not passed(check, strict=False)
    assert check.difference.token_margin > 0.1
    assert f"{check.difference.found!r}" in describe_check(check, strict=False)


def test_greedy_checks_do_not_sample_whatever_the_checkpoint_prefers(tiny_model, word_tokenizer, inputs):
    model = tiny_model(block_size=8, vocab_size=20)
    expected = verify(model, word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3)
    model.generation_config.update(do_sample=True, temperature=3.0, top_p=0.5)
    assert verify(model, word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3) == expected


def test_a_backbone_other_than_the_recorded_one_is_reported(tiny_model, word_tokenizer, tmp_path, capsys):
    tiny_model(block_size=8, vocab_size=20).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "whole")
    word_tokenizer.save_pretrained(tmp_path / "whole")
    arguments = ["verify", str(tmp_path / "whole"), "--prompt", "so then", "--raw", "--max-new-tokens", "8"]
    assert main(arguments) == 0
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.endswith("whole, float32, 1 prompt, K = 4") and first == "same      1/1  the backbone is source"
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "whole")
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)
    model.save_pretrained(tmp_path / "whole")
    assert main(arguments) == 1
    assert "DIFFERENT 0/1  the backbone is source" in capsys.readouterr().out
    convert(tmp_path / "whole", tmp_path / "again")  # keeps the recorded hash
    word_tokenizer.save_pretrained(tmp_path / "again")
    assert main(["verify", str(tmp_path / "again"), *arguments[2:]]) == 1
    save_head(model, tmp_path / "head")  # as if trained on the backbone as it is now
    convert(tmp_path / "whole", tmp_path / "trained", head=tmp_path / "head")
    word_tokenizer.save_pretrained(tmp_path / "trained")
    assert main(["verify", str(tmp_path / "trained"), *arguments[2:]]) == 0

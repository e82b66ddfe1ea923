"""`mrp verify` passes where decoding is lossless, and shows where it is not."""

import json

import pytest
import torch

from trainer.verify import describe, main, passed, verify


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
        assert difference.backbone_token != difference.spec_token
        assert "DIFFERENT" in describe(check, strict=True)
        assert f"position {difference.position}" in describe(check, strict=True)
    greedy = next(check.difference for check in found if "static, greedy" in check.name)
    row = inputs["input_ids"][greedy.prompt][inputs["attention_mask"][greedy.prompt].bool()][None]
    plain = model.generate(row, mrp_mode=None, max_new_tokens=40)
    assert word_tokenizer.decode(plain[0, greedy.position]) == greedy.backbone_token


def test_command_exits_1_on_a_difference_and_0_without(tiny_model, word_tokenizer, tmp_path, capsys):
    tiny_model(block_size=8, vocab_size=20).save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--prompt", "what is one plus two ?", "--raw", "--max-new-tokens", "30", "--json"]
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
    assert all(passed(check, strict=False) for check in checks if "spec equals" in check.name)

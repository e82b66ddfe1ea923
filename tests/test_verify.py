"""`mrp verify` passes where decoding is lossless, and shows where it is not."""

import json

import pytest
import torch

from modeling_mrp.step_rules import StepRule
from trainer.verify import describe, main, order_margin, passed, verify


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
        assert "DIFFERENT" in describe(check, strict=True)
        assert f"position {difference.position}" in describe(check, strict=True)
    greedy = next(check.difference for check in found if "static, greedy" in check.name)
    row = inputs["input_ids"][greedy.prompt][inputs["attention_mask"][greedy.prompt].bool()][None]
    plain = model.generate(row, mrp_mode=None, max_new_tokens=40)
    assert word_tokenizer.decode(plain[0, greedy.position]) == greedy.expected


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
    assert all(passed(check, strict=False) for check in checks if "mask" not in check.name)


def test_a_row_that_its_neighbours_change_is_located(tiny_model, word_tokenizer, inputs, monkeypatch):
    """A model that adds to the logits of batches: rows alone say something else, far beyond rounding."""
    model = tiny_model(block_size=8, vocab_size=20)
    logits = model.logits
    bias = torch.arange(20.0)
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden) + bias * (len(hidden) > 1))
    checks = verify(model, word_tokenizer, inputs, max_new_tokens=8, mrp_steps=3)
    check = next(check for check in checks if check.name == "a batch equals its rows, backbone-only")
    assert check.same < 2 and not passed(check, strict=False)
    assert check.difference.token_margin > 0.1
    assert f"{check.difference.found!r}" in describe(check, strict=False)


def test_greedy_checks_do_not_sample_whatever_the_checkpoint_prefers(tiny_model, word_tokenizer, inputs):
    model = tiny_model(block_size=8, vocab_size=20)
    expected = verify(model, word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3)
    model.generation_config.update(do_sample=True, temperature=3.0, top_p=0.5)
    assert verify(model, word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3) == expected


CONFIDENCE = torch.tensor([0.95, 0.5, 0.89, 0.3])
ENTROPY = torch.tensor([0.05, 0.9, 0.06, 2.0])
MASKED = torch.tensor([True, True, True, False])


@pytest.mark.parametrize(
    "rule, expected",
    [
        (StepRule("low_confidence_static"), 0.06),  # 0.95 against 0.89
        (StepRule("low_confidence_static", tokens_per_step=2), 0.39),  # 0.89 against 0.5
        (StepRule("low_confidence_static", tokens_per_step=3), float("inf")),  # all of them
        (StepRule("low_confidence_dynamic", confidence_threshold=0.9), 0.01),  # 0.89 against the threshold
        (StepRule("low_confidence_dynamic", confidence_threshold=0.6), 0.1),  # 0.5 against the threshold
        (StepRule("low_confidence_dynamic", confidence_threshold=0.99), 0.06),  # forced: 0.95 against 0.89
        (StepRule("entropy_bounded", entropy_bound=0.1), 0.01),  # 0.05 + 0.06 against the bound; 0.05 against 0.06
        (StepRule("entropy_bounded", entropy_bound=0.5), 0.39),  # 0.05 + 0.06 against the bound
        (StepRule("sequential"), float("inf")),
    ],
)
def test_the_order_margin_is_the_gap_to_another_choice(rule, expected):
    reveal = rule(CONFIDENCE, ENTROPY, MASKED)
    assert order_margin(rule, CONFIDENCE, ENTROPY, MASKED, reveal) == pytest.approx(expected, abs=1e-6)

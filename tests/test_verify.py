"""`mrp verify` passes where decoding is lossless, and shows where it is not."""

import json

import pytest
import torch

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.step_rules import StepRule
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.commands.cli import main
from mrp_trainer.commands.verify import describe_check
from mrp_trainer.evaluation.verify import CHOICES, RULES, first_difference, judge, order_excess, passed, verify


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
    assert f"{check.difference.found!r}" in describe_check(check, strict=False)


def test_greedy_checks_do_not_sample_whatever_the_checkpoint_prefers(tiny_model, word_tokenizer, inputs):
    model = tiny_model(block_size=8, vocab_size=20)
    expected = verify(model, word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3)
    model.generation_config.update(do_sample=True, temperature=3.0, top_p=0.5)
    assert verify(model, word_tokenizer, inputs, max_new_tokens=18, mrp_steps=3) == expected


CONFIDENCE = torch.tensor([0.95, 0.5, 0.89, 0.3])
ENTROPY = torch.tensor([0.05, 0.9, 0.06, 2.0])
MASKED = torch.tensor([True, True, True, False])
STATIC, DYNAMIC, ENTROPY_BOUNDED = "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"
NEVER = float("inf")


@pytest.mark.parametrize(
    "rule, revealed, expected",
    [
        (StepRule(STATIC), [0], 0),
        (StepRule(STATIC), [2], 0.06),  # 0.89 before 0.95
        (StepRule(STATIC), [0, 2], NEVER),  # one too many
        (StepRule(STATIC, tokens_per_step=2), [0, 1], 0.39),  # 0.5 before 0.89
        (StepRule(DYNAMIC, confidence_threshold=0.9), [0], 0),
        (StepRule(DYNAMIC, confidence_threshold=0.9), [0, 2], 0.01),  # 0.89 above 0.9
        (StepRule(DYNAMIC, confidence_threshold=0.6), [0], 0.29),  # 0.89 not above 0.6
        (StepRule(DYNAMIC, confidence_threshold=0.99), [2], 0.06),  # the surest: 0.89 before 0.95
        (StepRule(DYNAMIC, confidence_threshold=0.9), [0, 1], 0.4),  # 0.5 above 0.9
        (StepRule(ENTROPY_BOUNDED, entropy_bound=0.1), [0], 0),
        (StepRule(ENTROPY_BOUNDED, entropy_bound=0.1), [2], 0.01),  # 0.06 before 0.05
        (StepRule(ENTROPY_BOUNDED, entropy_bound=0.1), [0, 2], 0.01),  # 0.11 within 0.1
        (StepRule(ENTROPY_BOUNDED, entropy_bound=0.5), [0], 0.39),  # 0.11 not within 0.5
        (StepRule("sequential"), [0], 0),
        (StepRule("sequential"), [1], NEVER),
        (StepRule(STATIC), [], NEVER),
    ],
)
def test_the_order_excess_is_what_would_have_to_change(rule, revealed, expected):
    where = torch.zeros(4, dtype=torch.bool)
    where[revealed] = True
    assert order_excess(rule, CONFIDENCE, ENTROPY, MASKED, where) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_wrong_token_is_beyond_rounding_in_half_precision(tiny_model, word_tokenizer, inputs, rule, choice):
    """Texts of the decoder itself are within rounding of their own states; with one token replaced they are not."""
    model = tiny_model(block_size=8, vocab_size=20).to(torch.bfloat16)
    prompt = inputs["input_ids"][:1]
    options = RULES[rule] | CHOICES[choice] | {"max_new_tokens": 18, "eos_token_id": None}
    torch.manual_seed(0)
    output = model.generate(prompt, mrp_mode="spec", mrp_steps=3, return_dict_in_generate=True, **options)
    new, steps = (field[0, prompt.shape[1] :] for field in (output.sequences, output.reveal_steps))
    other = new.clone()
    other[0] = (new[0] + 1) % 3 + 4  # what is expected, and differs: the text itself is all right
    assert judge(model, word_tokenizer, 0, prompt[0], other, new, steps, options, seed=0).within_rounding
    for at in (0, 9, 17):
        wrong = new.clone()
        logits = model(torch.cat([prompt[0], new])[None]).logits[0, prompt.shape[1] + at]
        wrong[at] = logits[4:].argmin() + 4
        found = judge(model, word_tokenizer, 0, prompt[0], new, wrong, steps, options, seed=0)
        assert not found.within_rounding and found.position == prompt.shape[1] + at


def test_a_difference_behind_the_end_is_beyond_rounding(tiny_model, word_tokenizer, inputs):
    model = tiny_model(block_size=8, vocab_size=20)
    prompt = inputs["input_ids"][:1]
    options = {"do_sample": False, "max_new_tokens": 18}
    output = model.generate(prompt, mrp_mode=None, eos_token_id=None, return_dict_in_generate=True, **options)
    new, steps = (field[0, prompt.shape[1] :] for field in (output.sequences, output.reveal_steps))
    end = int(new[1])  # of the first block
    expected, found = (torch.cat([new[:2], new.new_tensor([0] * 15 + [last])]) for last in (0, 9))
    judged = judge(model, word_tokenizer, 0, prompt[0], expected, found, steps[:2], options | {"eos_token_id": end}, 0)
    assert not judged.within_rounding and judged.position == prompt.shape[1] + 17


def test_every_row_that_differs_is_judged(tiny_model, word_tokenizer, inputs):
    """The first row within rounding does not hide the second."""
    model = tiny_model(block_size=8, vocab_size=20).to(torch.bfloat16)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    output = model.generate(**inputs, mrp_mode="spec", return_dict_in_generate=True, **options)
    found = output.sequences[:, inputs["input_ids"].shape[1] :]
    expected = found.clone()
    expected[0, 0] = expected[0, 0] % 3 + 4  # what is found there is right
    found = found.clone()
    found[1, 0] = model(inputs["input_ids"][1:]).logits[0, -1, 4:].argmin() + 4
    assert (expected != found).any(1).all()
    judged = first_difference(model, word_tokenizer, inputs, expected, found, output, options, seed=0)
    assert judged.prompt == 1 and not judged.within_rounding


def test_a_backbone_that_the_checkpoint_does_not_record_is_told(tiny_model, word_tokenizer, tmp_path, capsys):
    tiny_model(block_size=8, vocab_size=20).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "whole")
    word_tokenizer.save_pretrained(tmp_path / "whole")
    arguments = ["verify", str(tmp_path / "whole"), "--prompt", "so then", "--raw", "--max-new-tokens", "8"]
    assert main(arguments) == 0
    assert "same      1/1  the backbone is source" in capsys.readouterr().out
    model = MRPForDiffusionLM.from_pretrained(tmp_path / "whole")
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)
    model.save_pretrained(tmp_path / "whole")
    assert main(arguments) == 1
    assert "DIFFERENT 0/1  the backbone is source" in capsys.readouterr().out
    convert(tmp_path / "whole", tmp_path / "again")  # does not make it right
    word_tokenizer.save_pretrained(tmp_path / "again")
    assert main(["verify", str(tmp_path / "again"), *arguments[2:]]) == 1
    save_head(model, tmp_path / "head")  # as if trained on the backbone as it is now
    convert(tmp_path / "whole", tmp_path / "trained", head=tmp_path / "head")
    word_tokenizer.save_pretrained(tmp_path / "trained")
    assert main(["verify", str(tmp_path / "trained"), *arguments[2:]]) == 0

"""Differences between texts: where they are, and whether rounding can be the reason."""

import pytest
import torch

from modeling_mrp.step_rules import StepRule
from mrp_trainer.evaluation.differences import (
    explain_difference,
    first_difference,
    most_likely_step,
    order_excess,
)
from mrp_trainer.evaluation.verify import CHOICES, RULES


@pytest.fixture
def inputs(word_tokenizer):
    word_tokenizer.padding_side = "left"
    return word_tokenizer(["what is one plus two ?", "so then"], return_tensors="pt", padding=True)


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
def test_the_order_excess_is_how_far_confidences_would_have_to_move(rule, revealed, expected):
    where = torch.zeros(4, dtype=torch.bool)
    where[revealed] = True
    assert order_excess(rule, CONFIDENCE, ENTROPY, MASKED, where) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "rule, recorded, hidden, expected, excess",
    [
        (StepRule(STATIC), [], [1, 2], [2], 0.06),  # nothing recorded: the surest of the hidden
        (StepRule(STATIC), [2], [0, 1], [2], 0.06),  # the step is full, though a hidden one is surer
        (StepRule(STATIC, tokens_per_step=2), [0], [1, 2], [0, 2], 0),
        (StepRule(STATIC, tokens_per_step=2), [1], [0, 2], [0, 1], 0.39),
        (StepRule("sequential", tokens_per_step=2), [0], [1, 2], [0, 1], 0),
        (StepRule(DYNAMIC, confidence_threshold=0.9), [], [1, 2], [2], 0.05),  # 0.95 not above 0.9
        (StepRule(DYNAMIC, confidence_threshold=0.99), [2], [0, 1], [2], 0.06),  # 0.95 is below the threshold too
        (StepRule(DYNAMIC, confidence_threshold=0.6), [0], [1, 2], [0, 2], 0),
        (StepRule(ENTROPY_BOUNDED, entropy_bound=0.2), [0], [1, 2], [0, 2], 0),
        (StepRule(ENTROPY_BOUNDED, entropy_bound=0.1), [2], [0, 1], [2], 0.01),
        (StepRule(STATIC), [], [], [], NEVER),
    ],
)
def test_a_step_revealed_as_many_hidden_positions_as_explain_it_best(rule, recorded, hidden, expected, excess):
    def where(positions):
        return torch.zeros(4, dtype=torch.bool).index_fill(0, torch.tensor(positions, dtype=torch.long), True)

    revealed, found = most_likely_step(rule, CONFIDENCE, ENTROPY, MASKED, where(recorded), where(hidden))
    assert revealed.tolist() == where(expected).tolist() and found == pytest.approx(excess, abs=1e-6)


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
    other[0] = (new[0] + 1) % 3 + 4  # differs from the text, which itself is right
    assert explain_difference(model, word_tokenizer, 0, prompt[0], other, new, steps, options, seed=0).within_rounding
    for at in (0, 9, 17):
        wrong = new.clone()
        logits = model(torch.cat([prompt[0], new])[None]).logits[0, prompt.shape[1] + at]
        wrong[at] = logits[4:].argmin() + 4
        found = explain_difference(model, word_tokenizer, 0, prompt[0], new, wrong, steps, options, seed=0)
        assert not found.within_rounding and found.position == prompt.shape[1] + at


def test_a_difference_after_the_end_of_text_is_beyond_rounding(tiny_model, word_tokenizer, inputs):
    model = tiny_model(block_size=8, vocab_size=20)
    prompt = inputs["input_ids"][:1]
    options = {"do_sample": False, "max_new_tokens": 18}
    output = model.generate(prompt, mrp_mode=None, eos_token_id=None, return_dict_in_generate=True, **options)
    new, steps = (field[0, prompt.shape[1] :] for field in (output.sequences, output.reveal_steps))
    end = int(new[1])  # of the first block
    expected, found = (torch.cat([new[:2], new.new_tensor([0] * 15 + [last])]) for last in (0, 9))
    judged = explain_difference(
        model, word_tokenizer, 0, prompt[0], expected, found, steps[:2], options | {"eos_token_id": end}, 0
    )
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

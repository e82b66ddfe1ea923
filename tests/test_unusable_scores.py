"""Scores that allow no choice: `generate` names the row, the position and the mode instead of inventing a token.

Scores of minus infinity at every token once made every mode run for ever, and NaN came back as pad tokens, which look
like an end of text.
"""

import pytest
import torch
from generation_calls import MODES, PROMPT, Recorder, drafting_model, every_mode, generate, left_padded_prompts
from transformers import StoppingCriteria

HEAD_MODES = {name: mode for name, mode in MODES.items() if name not in ("backbone", "self", "remask-backbone")}


@pytest.fixture
def model(tiny_model):
    return drafting_model(tiny_model)


def nan_in_long_contexts(length):
    """A processor that spoils the scores of rows with at least a given number of finished tokens (its pad id is 0)."""

    def processor(context, scores):
        return torch.where((context != 0).sum(1, keepdim=True) >= length, torch.nan, scores)

    return processor


@every_mode
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 5}], ids=["greedy", "sampling"])
def test_suppressing_every_token_leaves_none_to_choose(model, mode, sampling):
    message = rf"no token is left to choose at row 0, position 3 .*mrp_mode={mode['mrp_mode']!r}: .*SuppressTokens"
    with pytest.raises(ValueError, match=message):
        generate(model, {"input_ids": PROMPT}, suppress_tokens=list(range(61)), **sampling, **mode)


@every_mode
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_backbone_that_is_not_finite_is_named_with_row_and_position(model, mode, value):
    """One damaged embedding, in the prompt of row 1 alone, whose 8 tokens fill a block."""
    batch = left_padded_prompts()
    batch["input_ids"][batch["input_ids"] == 60] = 59
    batch["input_ids"][1, -1] = 60
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = value
    streamer = Recorder()
    message = rf"the backbone's scores are NaN or infinite at row 1, position 8 .*mrp_mode={mode['mrp_mode']!r}"
    with pytest.raises(ValueError, match=message):
        generate(model, batch, streamer=streamer, **mode)
    assert len(streamer.values("put")) == 1  # the prompts, and no invented token
    intact = {name: tensor[:1] for name, tensor in batch.items()}
    assert generate(model, intact, suppress_tokens=[60], **mode).sequences.shape == (1, 32)


@pytest.mark.parametrize("mode", HEAD_MODES.values(), ids=HEAD_MODES)
def test_a_head_that_is_not_finite_is_named(model, mode):
    """The confidence criteria took NaN for doubt, and masked the tokens again without a word."""
    torch.nn.init.constant_(model.mrp_head.norm.weight, torch.nan)
    mode = mode | {"confidence_threshold": 0.01}
    with pytest.raises(ValueError, match=rf"the head's scores are NaN .*row 0, .*mrp_mode={mode['mrp_mode']!r}"):
        generate(model, {"input_ids": PROMPT}, **mode)


@every_mode
def test_a_processor_that_gives_nan_is_named(model, mode):
    def logarithm(context, scores):
        return torch.full_like(scores, -1.0).log()

    message = rf"backbone's scores after the logits processors \(logarithm\) are NaN .*{mode['mrp_mode']!r}"
    with pytest.raises(ValueError, match=message):
        generate(model, {"input_ids": PROMPT}, logits_processor=[logarithm], **mode)


@pytest.mark.parametrize("mode", [None, "spec"])
def test_the_row_is_that_of_the_batch_even_after_other_rows_have_ended(model, mode):
    """Rows 0 and 1 end after 2 tokens and leave the state; row 2 has 12 tokens and goes wrong after 24."""

    class StopEarly(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([True, True, False]) & (input_ids.shape[1] >= 14)

    processor = nan_in_long_contexts(24)
    options = {"mrp_mode": mode, "suppress_tokens": [0], "pad_token_id": 0, "max_new_tokens": 40}
    with pytest.raises(ValueError, match="row 2, position 24 "):
        generate(
            model, left_padded_prompts(), stopping_criteria=[StopEarly()], logits_processor=[processor], **options
        )


def test_infinite_scores_of_some_tokens_are_a_choice(model):
    """Forbidding all tokens but one leaves a choice."""
    allowed = [token for token in range(61) if token != 9]
    for mode in MODES.values():
        new = generate(model, {"input_ids": PROMPT}, suppress_tokens=allowed, **mode).sequences[0, 3:]
        assert new.tolist() == [9] * 20

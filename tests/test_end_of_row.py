"""The end of a row: end of text wherever it falls, and the limit of new tokens."""

import pytest
import torch
from decoding_calls import batch, generate, random_prompts, sharp_head
from plain_loop import plain_decode


@pytest.fixture(scope="module")
def prompts():
    return random_prompts()


def forced(model, token):
    """A processor that makes one token certain at every position."""

    def processor(_, scores):
        scores = scores.clone()
        scores[:, token] = 100.0
        return scores

    return processor


@pytest.mark.parametrize("mode", [None, "spec", "direct", "remask"])
def test_end_of_text_as_the_first_token(tiny_model, prompts, mode):
    model = tiny_model(block_size=8)
    new, _ = generate(model, batch(prompts), mrp_mode=mode, logits_processor=[forced(model, 7)])
    assert new.tolist() == [[7]] * len(prompts)


@pytest.mark.parametrize("mode", [None, "spec"])
def test_end_of_text_anywhere_in_a_block_equals_decoding_on_and_cutting(tiny_model, prompts, mode):
    """Whatever token a row holds, taking it as end of text cuts the row there and changes nothing before."""
    model = sharp_head(tiny_model(block_size=8))
    full, _ = generate(model, batch(prompts), eos_token_id=None, max_new_tokens=20)
    ends = set()
    for index, row in enumerate(full.tolist()):
        for eos in dict.fromkeys(row):
            end = row.index(eos) + 1
            inputs = {"input_ids": torch.tensor([prompts[index]])}
            new, _ = generate(model, inputs, mrp_mode=mode, eos_token_id=eos, max_new_tokens=20)
            assert new[0].tolist() == row[:end]
            ends.add((len(prompts[index]) + end) % 8)
    assert ends == set(range(8))  # as the first token of a block, in its middle and at its end


def test_end_of_text_in_the_prompt_ends_nothing(tiny_model):
    model = tiny_model(block_size=8)
    prompt = [5, 7, 9, 1, 11, 7]
    new, _ = generate(model, {"input_ids": torch.tensor([prompt])}, eos_token_id=[1, 7], max_new_tokens=6)
    assert new[0].tolist() == plain_decode(model, prompt, 6, eos=(1, 7))
    assert len(new[0]) > 1


@pytest.mark.parametrize("mode", [None, "spec", "direct", "remask"])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17])
def test_max_new_tokens_is_exact_and_no_mask_is_left(tiny_model, prompts, mode, count):
    model = sharp_head(tiny_model(block_size=8), 0.2)
    new, _ = generate(model, batch(prompts), mrp_mode=mode, max_new_tokens=count, eos_token_id=None)
    assert new.shape == (len(prompts), count)
    assert not new.eq(model.config.mask_token_id).any()

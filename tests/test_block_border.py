"""Drafting across the block border: a draft that completes its block carries the next block's opening state."""

import pytest
import torch
from decoding_calls import SAMPLING, batch, generate, random_prompts, sharp_head

from modeling_mrp.block_state import BlockState
from modeling_mrp.decoding import Decoder
from modeling_mrp.inputs import left_align
from modeling_mrp.options import DecodingOptions
from modeling_mrp.sampling import Sampler

ABSENT = 60  # an end of text that the models below never choose


def context_free(model):
    """Make the logits at a position independent of all other positions, so that every draft is right."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model.mrp_head.norm.weight.data.zero_()  # and the head leaves them as they are
    return model


def forwards_with_perfect_drafts(prompt: int, new: int, size: int, candidates: int) -> int:
    """Count the rounds of the static rule, one token a step, when every draft is confirmed."""
    forwards, position, masked = 0, prompt, None  # masked: left in the current block; None: the block is not open
    while position < prompt + new:
        forwards += 1
        end = min(position // size * size + size, prompt + new)
        last_block = end == prompt + new
        if masked is None:
            masked = end - position - 1
        else:
            room = candidates - 2 if not last_block else -1  # a complete draft needs a place for the opening state too
            if masked <= room:
                position, masked = end, min(size, prompt + new - end) - 1
            else:
                masked -= min(candidates - 1, masked - 1) + 1
        if masked == 0:
            position, masked = (end if position < end else position + min(size, prompt + new - position)), None
    return forwards


@pytest.mark.parametrize("draft", ["head", "self"])
@pytest.mark.parametrize("candidates", [2, 3, 5, 8])
@pytest.mark.parametrize("size", [2, 8])
def test_forwards_are_those_of_perfect_drafts(tiny_model, size, candidates, draft):
    model = context_free(tiny_model(block_size=size))
    for length, new in ((1, 23), (size, 16), (7, 3 * size)):
        inputs = {"input_ids": torch.arange(4, 4 + length)[None]}
        static, _ = generate(model, inputs, mrp_mode=None, max_new_tokens=new, eos_token_id=ABSENT)
        spec, output = generate(
            model,
            inputs,
            mrp_mode="spec",
            mrp_steps=candidates,
            mrp_draft=draft,
            max_new_tokens=new,
            eos_token_id=ABSENT,
        )
        assert spec.equal(static)
        assert output.stats.backbone_forwards.tolist() == [forwards_with_perfect_drafts(length, new, size, candidates)]
        assert output.stats.drafts_accepted.equal(output.stats.drafts_proposed)


def decode_with_cache(model, prompts, **options):
    """The state after decoding 21 tokens of each prompt, and the cache; no row is dropped on the way."""
    options = DecodingOptions.resolve({"mrp_mode": "spec"} | options, model.config)
    width = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    valid = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts]).bool()
    no_eos = torch.empty(0, dtype=torch.long)
    mask_token_id = model.config.mask_token_id
    state = BlockState(*left_align(ids, valid), 21, options.block_size, mask_token_id, no_eos, options.depths)
    decoder = Decoder(model, state, options, Sampler(mask_token_id, [], []))
    with torch.no_grad():
        decoder.run(lambda state: None)
    return state, decoder.cache


def test_keys_and_values_of_a_block_that_was_crossed_are_those_of_a_block_read_by_itself(tiny_model, monkeypatch):
    """K = 2 has no room for an opening state, so there every block is read once more, as a clean block."""
    monkeypatch.setattr("modeling_mrp.decoding.WORTH_DROPPING", 1.0)
    model = context_free(tiny_model(block_size=4))
    for layer in model.model.layers:  # drafts stay mostly right, and keys and values depend on what a block sees
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    prompts = random_prompts()
    plain, expected = decode_with_cache(model, prompts, mrp_steps=2)
    crossing, cache = decode_with_cache(model, prompts, mrp_steps=8)
    assert crossing.tokens.equal(plain.tokens)
    assert (crossing.forwards[:, 0] < plain.forwards[:, 0]).all()
    committed = torch.minimum(cache.lengths, expected.lengths)
    assert (committed >= crossing.limits - 8).all()  # all blocks but the last two
    for layer, buffers in cache._buffers.items():
        for ours, theirs in zip(buffers, expected._buffers[layer], strict=True):
            for row, length in enumerate(committed.tolist()):
                torch.testing.assert_close(ours[row, :length], theirs[row, :length], rtol=1e-4, atol=1e-5)


def test_a_draft_with_an_end_of_text_opens_no_further_block(tiny_model):
    model = context_free(tiny_model(block_size=8))
    inputs = {"input_ids": torch.arange(4, 9)[None]}
    new, _ = generate(model, inputs, max_new_tokens=16, eos_token_id=ABSENT)
    first = int(new[0, 0])  # the model chooses the same token everywhere: make it the end of text
    new, output = generate(
        model, inputs, mrp_mode="spec", mrp_steps=8, max_new_tokens=16, eos_token_id=first, pad_token_id=0
    )
    assert new.tolist() == [[first]]
    assert output.stats.backbone_forwards.tolist() == [1]


class BansLastToken:
    """A logits processor that reads the tokens so far: it forbids the last one before the block."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("candidates", [3, 8])
def test_a_processor_that_reads_the_tokens_so_far_gets_the_same_text(tiny_model, candidates):
    model = context_free(tiny_model(block_size=4))
    inputs = {"input_ids": torch.arange(4, 9)[None]}
    options = {"logits_processor": [BansLastToken()], "max_new_tokens": 19, "eos_token_id": ABSENT}
    static, _ = generate(model, inputs, mrp_mode=None, **options)
    spec, _ = generate(model, inputs, mrp_mode="spec", mrp_steps=candidates, **options)
    assert len(set(static[0].tolist())) > 1
    assert spec.equal(static)


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("rule", ["low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded"])
def test_scores_and_reveal_steps_are_those_of_backbone_only_decoding(tiny_model, rule, sampling):
    model = sharp_head(tiny_model(block_size=4, initializer_range=0.1))
    options = {"remasking_strategy": rule, "confidence_threshold": 0.2, "eb_threshold": 2.0, "max_new_tokens": 18}
    options |= {"eos_token_id": ABSENT, "output_scores": True} | sampling
    inputs = batch(random_prompts())
    static, plain = generate(model, inputs, mrp_mode=None, **options)
    spec, output = generate(model, inputs, mrp_mode="spec", mrp_steps=8, mrp_draft="self", **options)
    assert spec.equal(static)
    assert output.reveal_steps.equal(plain.reveal_steps)
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(plain.scores), rtol=1e-4, atol=1e-4)

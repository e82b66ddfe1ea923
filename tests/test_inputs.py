"""Inputs and options that `generate` refuses, with an error that names the argument."""

import warnings

import pytest
import torch
from transformers import GenerationConfig

from modeling_mrp.inputs import has_holes, left_align

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "input_ids is missing"),
        (torch.tensor([5, 6]), r"input_ids must be a tensor of shape \[rows, tokens\], got \(2,\)"),
        (torch.ones(1, 2, 3).long(), r"input_ids must be .* got \(1, 2, 3\)"),
        ([[5, 6]], r"input_ids must be a tensor of shape \[rows, tokens\], got list"),
        ("hello", "input_ids must be .* got str"),
        (torch.tensor([[5.0, 6.0]]), r"input_ids must hold integers \(torch.long\), got torch.float32"),
        (torch.tensor([[True]]), "input_ids must hold integers .*torch.bool"),
        (torch.zeros(0, 4).long(), r"input_ids must hold at least one row and one token, got shape \(0, 4\)"),
        (torch.zeros(2, 0).long(), r"input_ids must hold at least one row and one token, got shape \(2, 0\)"),
        (torch.tensor([[5, 61]]), "input_ids holds 61, outside the vocabulary of 61 ids"),
        (torch.tensor([[5, -1]]), "input_ids holds -1, outside the vocabulary"),
        (torch.tensor([[5, 3]]), "input_ids holds the mask token 3"),
        (torch.full((1, 257), 5), "input_ids has a prompt of 257 tokens, more than max_position_embeddings=256"),
    ],
)
def test_bad_input_ids_are_refused(tiny_model, ids, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(ids, max_new_tokens=2)
    if ids is not None:
        with pytest.raises(ValueError, match=message):
            tiny_model().generate(input_ids=ids, max_new_tokens=2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1]], "attention_mask has holes"),
        ([[0, 1, 0]], "attention_mask has holes: .*padding on one side"),
        ([[0, 0, 0]], "attention_mask masks every token of row 0"),
        ([[1, 1]], r"attention_mask must be a tensor of the same shape as input_ids \(1, 3\), got \(1, 2\)"),
        ([1, 1, 1], r"attention_mask must be .* got \(3,\)"),
    ],
)
def test_bad_attention_masks_are_refused(tiny_model, mask, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(PROMPT, attention_mask=torch.tensor(mask), max_new_tokens=2)


def test_an_attention_mask_must_be_a_tensor(tiny_model):
    with pytest.raises(ValueError, match="attention_mask must be a tensor .* got list"):
        tiny_model().generate(PROMPT, attention_mask=[[1, 1, 1]], max_new_tokens=2)


def test_ids_under_padding_do_not_matter(tiny_model):
    """Padding may hold anything, as -100 or an id outside the vocabulary: it is never looked up."""
    model = tiny_model()
    expected = model.generate(PROMPT, max_new_tokens=4, eos_token_id=None)[:, 3:]
    for pad in (3, 60, 99, -100):
        ids = torch.tensor([[pad, pad, 5, 6, 7]])
        new = model.generate(
            ids, attention_mask=(torch.tensor([[0, 0, 1, 1, 1]])), max_new_tokens=4, eos_token_id=None
        )
        assert torch.equal(new[:, 5:], expected)


def test_a_pad_token_inside_a_prompt_needs_a_mask(tiny_model):
    """Without a mask transformers derives one from the pad tokens; a hole in it once shifted the prompt silently."""
    model = tiny_model()
    ids = torch.tensor([[5, 0, 7]])
    with pytest.raises(ValueError, match="attention_mask has holes.*every pad token in input_ids"):
        model.generate(ids, max_new_tokens=2)
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)[0, :3].tolist() == [5, 0, 7]
    with pytest.raises(ValueError, match="attention_mask masks every token of row 0"):
        model.generate(torch.zeros(1, 2).long(), max_new_tokens=2)


def test_pad_tokens_at_the_side_are_padding_without_a_mask(tiny_model):
    model = tiny_model()
    expected = model.generate(PROMPT, max_new_tokens=4, eos_token_id=None)[:, 3:]
    for ids in ([[0, 0, 5, 6, 7]], [[5, 6, 7, 0, 0]]):
        assert torch.equal(model.generate(torch.tensor(ids), max_new_tokens=4, eos_token_id=None)[:, 5:], expected)


OPTIONS = [
    ({"mrp_stesp": 2}, "unknown option 'mrp_stesp' of generate. Did you mean 'mrp_steps'?"),
    ({"confidence_treshold": 0.5}, "unknown option 'confidence_treshold'.*Did you mean 'confidence_threshold'?"),
    ({"max_new_token": 5}, "unknown option 'max_new_token'.*Did you mean 'max_new_tokens'?"),
    ({"qqqq": 5}, "unknown option 'qqqq' of generate.$"),
    ({"revealed_ids": PROMPT}, "unknown option 'revealed_ids'"),
    ({"mrp_mode": "spek"}, "mrp_mode must be one of .*Did you mean 'spec'?"),
    ({"mrp_steps": 0}, 'mrp_steps must be an integer of at least 1 or "auto", got 0'),
    ({"confidence_threshold": 2}, "confidence_threshold must lie between 0 and 1, got 2"),
    ({"num_beams": 2}, "num_beams=2 is not supported"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 is not supported"),
    ({"use_cache": False}, "use_cache=False is not supported"),
    ({"output_attentions": True}, "output_attentions=True is not supported"),
    ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
    ({"output_logits": True}, "output_logits=True is not supported"),
    ({"position_ids": PROMPT}, "position_ids=.* is not supported"),
    ({"past_key_values": ()}, "(cache|past_key_values)=.* is not supported"),
    ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
    ({"force_words_ids": [[5]]}, "force_words_ids"),
    ({"assistant_model": object()}, "assistant_model is not supported"),
    ({"prefix_allowed_tokens_fn": lambda *_: [5]}, "prefix_allowed_tokens_fn is not supported"),
    ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds is not supported: pass input_ids"),
    ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor needs left-to-right order"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor needs left-to-right order"),
    ({"min_new_tokens": 2}, "MinLengthLogitsProcessor needs left-to-right order|MinNewTokens"),
    ({"bad_words_ids": [[5], [6, 7]]}, r"bad_words_ids and sequence_bias take single tokens only .* got \[6, 7\]"),
    ({"do_sample": True, "temperature": "nan"}, "temperature must be above 0 with do_sample=True, got 'nan'"),
    ({"do_sample": True, "temperature": float("nan")}, "temperature must be above 0 with do_sample=True, got nan"),
    ({"stop_strings": ["so", ""]}, "stop_strings must not hold an empty string"),
    ({"stop_strings": ""}, "stop_strings must not hold an empty string"),
    ({"do_sample": True, "temperature": 0.0}, "temperature must be above 0 with do_sample=True, got 0.0"),
    ({"do_sample": True, "temperature": -1.0}, "temperature must be .*-1.0"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"stop_strings": "stop"}, "stop_strings|tokenizer"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=["-".join(options) for options, _ in OPTIONS])
def test_an_unsupported_option_is_refused_by_name(tiny_model, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(PROMPT, **{"max_new_tokens": 4} | options)


def test_an_unsupported_option_may_be_given_its_default(tiny_model):
    off = {"num_beams": 1, "use_cache": True, "output_attentions": False, "position_ids": None, "guidance_scale": None}
    model = tiny_model()
    assert torch.equal(model.generate(PROMPT, max_new_tokens=4, **off), model.generate(PROMPT, max_new_tokens=4))


def test_values_in_a_generation_config_are_checked_too(tiny_model):
    with pytest.raises(ValueError, match="mrp_mode must be one of .*Did you mean 'spec'?"):
        tiny_model().generate(PROMPT, GenerationConfig(max_new_tokens=3, mrp_mode="spce"))
    model = tiny_model()
    model.generation_config.mrp_steps = 0
    with pytest.raises(ValueError, match='mrp_steps must be an integer of at least 1 or "auto", got 0'):
        model.generate(PROMPT, max_new_tokens=3)


def test_a_checkpoint_without_a_head_refuses_modes_that_need_one(tiny_model):
    model = tiny_model(num_mrp_layers=0)
    with pytest.raises(ValueError, match="mrp_mode='direct'.*needs a residual head"):
        model.generate(PROMPT, max_new_tokens=3, mrp_mode="direct")
    expected = model.generate(PROMPT, max_new_tokens=9, eos_token_id=None)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=9, mrp_mode="spec", eos_token_id=None), expected)


def test_another_block_size_is_allowed_with_a_warning(tiny_model):
    """The same weights under the other block size, decoded by a model that was built with it."""
    model, other = tiny_model(), tiny_model(block_size=8)
    with pytest.warns(UserWarning, match="block_size=8 overrides 4"):
        new = model.generate(PROMPT, max_new_tokens=9, block_size=8, eos_token_id=None)
    assert torch.equal(new, other.generate(PROMPT, max_new_tokens=9, eos_token_id=None))


def test_left_align_moves_every_prompt_to_the_left_and_returns_its_length():
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 0, 0], [1, 2, 3, 4], [0, 9, 9, 0]])
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    aligned, lengths = left_align(ids, valid)
    assert lengths.tolist() == [2, 2, 4, 2]
    rows = [row[:n] for row, n in zip(aligned.tolist(), lengths.tolist(), strict=True)]
    assert rows == [[5, 6], [7, 8], [1, 2, 3, 4], [9, 9]]


def test_has_holes_finds_zeros_between_ones():
    for mask, expected in (([1, 0, 1], True), ([0, 1, 0], False), ([0, 0, 0], False), ([1, 1, 1], False)):
        assert has_holes(torch.tensor([mask])) is expected
    assert has_holes(torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]]))


def test_a_misspelt_option_inside_a_generation_config_is_refused(tiny_model):
    with pytest.raises(
        ValueError, match="unknown option 'mrp_step' in the generation config. Did you mean 'mrp_steps'"
    ):
        tiny_model().generate(PROMPT, GenerationConfig(max_new_tokens=3, mrp_mode="spec", mrp_step=2))
    model = tiny_model()
    model.generation_config.remask_threshhold = 0.5
    with pytest.raises(
        ValueError, match="'remask_threshhold' in the generation config. Did you mean 'remask_threshold'"
    ):
        model.generate(PROMPT, max_new_tokens=3)


def test_an_unknown_key_of_a_generation_config_that_resembles_no_option_is_ignored(tiny_model):
    model = tiny_model()
    model.generation_config.chat_format = "chatml"
    assert model.generate(PROMPT, max_new_tokens=3).shape == (1, PROMPT.shape[1] + 3)


def test_positions_beyond_those_of_the_backbone_are_said_with_both_numbers(tiny_model):
    """Left padding does not count: the longest prompt has 3 tokens."""
    model = tiny_model(max_position_embeddings=8)
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [0, 0, 0, 5, 6]]), torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    with pytest.warns(UserWarning, match="take 9 positions, more than max_position_embeddings=8") as caught:
        model.generate(ids, attention_mask=mask, max_new_tokens=6)
    assert len([warning for warning in caught if "positions" in str(warning.message)]) == 1
    model = tiny_model(max_position_embeddings=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(ids, attention_mask=mask, max_new_tokens=5)
    assert not [warning for warning in caught if "positions" in str(warning.message)]


def test_positions_beyond_those_of_the_backbone_are_said_once_per_model(tiny_model):
    """Every call of another length said it again: an evaluation printed a page of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (tiny_model(max_position_embeddings=8), tiny_model(max_position_embeddings=8)):
            for count in (10, 11, 12):
                model.generate(PROMPT, max_new_tokens=count)
    assert len([warning for warning in caught if "positions" in str(warning.message)]) == 2

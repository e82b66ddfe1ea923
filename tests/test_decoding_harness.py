"""The decoding harness: encoding and padding prompts, answers cut at their end, forwards and drafts counted."""

import pytest
import torch
from plain_loop import plain_decode

from mrp_trainer.evaluation.decoding import (
    Answer,
    RevealTrace,
    Totals,
    decode_batch,
    decode_prompts,
    encode,
    end_of_text_ids,
    left_padded,
    prompt_ids,
    without_padding,
)
from mrp_trainer.evaluation.modes import KINDS, grid

PROMPTS = [[5, 9, 12], [7, 30, 8, 41, 6, 22, 13]]  # with 9 new tokens both end with a block of 4


# -- prompts


def test_prompts_and_messages_are_written_with_the_chat_template(word_tokenizer):
    chat = [{"role": "user", "content": "what is one ?"}]
    templated = prompt_ids(word_tokenizer, {"messages": chat})
    assert templated == word_tokenizer("what is one ? . so")["input_ids"]
    assert prompt_ids(word_tokenizer, {"prompt": "what is one ?"}) == templated
    assert prompt_ids(word_tokenizer, {"prompt": chat}) == templated
    assert prompt_ids(word_tokenizer, {"prompt": "what is"}, raw=True) == word_tokenizer("what is")["input_ids"]
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(word_tokenizer, {"messages": chat}, raw=True)


def test_padding_is_on_the_left_and_can_be_removed():
    inputs = left_padded(PROMPTS, pad_token_id=60)
    assert inputs["input_ids"].tolist() == [[60] * 4 + PROMPTS[0], PROMPTS[1]]
    assert inputs["attention_mask"].tolist() == [[0] * 4 + [1] * 3, [1] * 7]
    assert without_padding(inputs) == PROMPTS


@pytest.mark.parametrize("raw", [False, True])
def test_a_list_of_prompts_is_encoded_like_each_of_them(word_tokenizer, raw):
    texts = ["what is one ?", "so then what is two ?"]
    expected = [prompt_ids(word_tokenizer, {"prompt": text}, raw) for text in texts]
    assert without_padding(encode(word_tokenizer, texts, raw)) == expected


def test_the_ends_of_text_are_those_of_the_options_or_else_of_the_generation_config(tiny_model):
    model = tiny_model()
    model.generation_config.eos_token_id = 9
    assert end_of_text_ids(model) == [9]
    assert end_of_text_ids(model, {"eos_token_id": [4, 5]}) == [4, 5]
    assert end_of_text_ids(model, {"eos_token_id": None}) == []


# -- answers


def test_a_forward_whose_tokens_were_masked_again_is_charged_to_no_token():
    """Round 1 reveals b, round 2 masks it again and reveals a and c, round 3 reveals it: b costs the third forward."""
    trace = RevealTrace(mask_token_id=3, max_new_tokens=3)
    trace.put(torch.tensor([[5, 6]]))
    for draft in ([3, 8, 3], [7, 3, 9], [7, 8, 9]):
        trace.put_draft(torch.tensor([draft]))
    assert trace.costs(0, 3).tolist() == [0.5, 1.0, 0.5]


@pytest.mark.parametrize("mode", ["static", "static-2", "spec-3", "spec-3-self", "direct-2", "remask-residual-0.3"])
def test_the_costs_of_the_tokens_add_up_to_the_forwards(tiny_model, mode):
    modes = grid(KINDS, [0.3], [2, 3], block_size=4)
    results = decode_batch(tiny_model(), PROMPTS, modes[mode] | {"eos_token_id": None}, max_new_tokens=9, trace=True)
    for result in results:
        assert sum(result.position_forwards) == pytest.approx(result.forwards, abs=1e-5)
        assert sum(result.position_tokens) == len(result.token_ids) == 9
    # 9 tokens after 3 or 7: positions 3, 0..3, 0..3 of their blocks
    assert results[0].position_tokens == results[1].position_tokens == [2, 2, 2, 3]


def test_one_token_a_step_costs_one_forward_at_every_position(tiny_model):
    options = {"mrp_mode": None, "eos_token_id": None}
    for result in decode_batch(tiny_model(), PROMPTS, options, max_new_tokens=9, trace=True):
        assert result.position_forwards == [2, 2, 2, 3]


def test_only_new_tokens_up_to_the_end_of_text_count(tiny_model):
    model = tiny_model()
    free = plain_decode(model, PROMPTS[1], 24)
    end = free[10]
    results = decode_batch(model, PROMPTS, {"mrp_mode": "spec", "eos_token_id": end}, max_new_tokens=24)
    expected = [plain_decode(model, prompt, 24, eos=(end,)) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == expected
    assert len(expected[1]) <= 11


def test_a_forward_is_shared_by_the_tokens_that_it_revealed():
    trace = RevealTrace(mask_token_id=3, max_new_tokens=4)
    trace.put(torch.tensor([[7, 7], [7, 7]]))
    trace.put_draft(torch.tensor([[3, 5, 3, 3, 3], [6, 3, 3, 3, 3]]))  # wider than what is asked for
    trace.put_draft(torch.tensor([[9, 5, 3, 8, 3], [6, 6, 3, 3, 3]]))
    for column in ([9, 6], [5, 6], [4, 0], [8, 0]):
        trace.put(torch.tensor(column))
    assert trace.rounds[0].tolist() == [2, 1, 3, 2]
    assert trace.costs(0, 4).tolist() == [0.5, 1, 1, 0.5]
    assert trace.costs(1, 2).tolist() == [1, 1]


def test_the_checkpoints_own_mode_does_not_leak_into_the_grid(tiny_model):
    model = tiny_model()
    plain = decode_batch(model, PROMPTS, {"mrp_mode": None, "eos_token_id": None}, max_new_tokens=9)
    model.generation_config.mrp_mode = "direct"
    model.generation_config.denoising_steps = 1
    again = decode_batch(model, PROMPTS, {"mrp_mode": None, "eos_token_id": None}, max_new_tokens=9)
    assert [r.token_ids for r in again] == [r.token_ids for r in plain]
    assert [r.forwards for r in again] == [9, 9]


def test_the_checkpoints_own_options_count_where_they_are_asked_for(tiny_model):
    model = tiny_model()
    model.generation_config.denoising_steps = 1
    options = {"mrp_mode": None, "eos_token_id": None}
    own = decode_batch(model, PROMPTS, options, max_new_tokens=9, checkpoint_defaults=True)
    assert [answer.forwards for answer in own] == [3, 3]  # one forward per block


def test_batches_give_the_answers_that_each_prompt_gives_alone(tiny_model):
    model = tiny_model()
    prompts, options = [*PROMPTS, [5, 6]], {"mrp_mode": "spec", "mrp_steps": 3}
    together = list(decode_prompts(model, prompts, options, 12, batch_size=2))
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = decode_batch(model, [prompt], options, 12)
        for name in ("token_ids", "forwards", "head_forwards", "prefill_forwards", "proposed", "accepted"):
            assert getattr(answer, name) == getattr(alone, name), name


def test_a_seed_repeats_a_sample_and_no_seed_leaves_the_generator_alone(tiny_model):
    model, options = tiny_model(), {"do_sample": True, "eos_token_id": None}
    first, again, other = (decode_batch(model, PROMPTS, options, 9, seed=seed) for seed in (3, 3, 4))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again]
    assert [answer.token_ids for answer in first] != [answer.token_ids for answer in other]
    state = torch.get_rng_state()
    decode_batch(model, PROMPTS, {"mrp_mode": "spec"}, 9)
    assert torch.equal(torch.get_rng_state(), state)


def test_totals_are_sums_and_shares_of_sums():
    answers = [
        Answer([4, 5, 6], forwards=2, proposed=[0, 3, 1], accepted=[0, 2, 0], seconds=1.0),
        Answer([7], forwards=2, proposed=[0, 1, 0], accepted=[0, 1, 0], seconds=0.5),
    ]
    totals = Totals.of(answers)
    assert (totals.tokens, totals.forwards, totals.seconds, totals.tokens_per_forward) == (4, 4, 1.5, 1.0)
    assert totals.acceptance == [0.75, 0.0]


def test_a_record_holds_the_answer_without_its_reveal_steps(tiny_model):
    (answer,) = decode_batch(tiny_model(), PROMPTS[:1], {"mrp_mode": "spec"}, 9, trace=True)
    assert len(answer.reveal_steps) >= len(answer.token_ids)
    record = {"mode": "spec-3"} | answer.record()
    assert "reveal_steps" not in record
    assert Answer.from_record(record).record() == answer.record()

"""Where transformers ends a row: criteria, stop strings, several ends of text, lengths and time limits."""

import time

import pytest
import torch
from generation_calls import PROMPT, drafting_model, every_mode, generate, left_padded_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxTimeCriteria, PreTrainedTokenizerFast, StoppingCriteria


@pytest.fixture
def model(tiny_model):
    return drafting_model(tiny_model)


@pytest.fixture
def batch():
    return left_padded_prompts()


def unstopped_tokens(model):
    """New tokens of the prompt when nothing stops it."""
    return model.generate(PROMPT, max_new_tokens=20, eos_token_id=None)[0, 3:].tolist()


class StopAt(StoppingCriteria):
    """Stops a row at a length of its own; notes the shapes it was asked about."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return input_ids.shape[1] >= self.lengths


@every_mode
def test_stopping_criteria_see_every_column_and_end_rows_one_by_one(model, batch, mode):
    free = generate(model, batch, **mode).sequences
    criterion = StopAt([12 + 3, 12 + 11, 12 + 6])
    output = generate(model, batch, stopping_criteria=[criterion], pad_token_id=0, **mode)
    assert criterion.seen == list(range(13, 24))
    for row, count in enumerate((3, 11, 6)):
        assert output.sequences[row, 12 : 12 + count].tolist() == free[row, 12 : 12 + count].tolist()
        assert output.sequences[row, 12 + count :].eq(0).all()
    assert output.sequences.shape == (3, 23)
    stats = output.stats
    assert (stats.tokens_by_backbone + stats.tokens_by_head).tolist() == [3, 11, 6]


def letter_tokenizer():
    """Token i is the i-th letter of the alphabet."""
    letters = {chr(ord("a") + index): index for index in range(20)}
    tokenizer = Tokenizer(models.BPE(letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("mode", [None, "spec"])
@pytest.mark.parametrize("at", [0, 3, 4, 9, 17])
def test_a_stop_string_ends_the_row_after_its_last_token(tiny_model, mode, at):
    """A stop string over two tokens, wherever it lies in a block or across a border."""
    model, tokenizer = tiny_model(vocab_size=20), letter_tokenizer()
    free = model.generate(PROMPT, max_new_tokens=24, eos_token_id=None)[0, 3:].tolist()
    text = tokenizer.decode(free)
    stop = text[at : at + 2]
    output = model.generate(
        PROMPT, max_new_tokens=24, eos_token_id=None, mrp_mode=mode, stop_strings=stop, tokenizer=tokenizer
    )
    assert output[0, 3:].tolist() == free[: text.index(stop) + 2]


def test_any_of_several_end_ids_ends_a_row_and_padding_follows(model, batch):
    free = generate(model, batch).sequences[:, 12:]
    ends = [free[0, 4].item(), free[1, 9].item()]
    output = generate(model, batch, eos_token_id=ends, pad_token_id=0).sequences[:, 12:]
    for row in range(3):
        expected = free[row].tolist()
        stop = next((at + 1 for at, token in enumerate(expected) if token in ends), 20)
        assert output[row].tolist() == (expected[:stop] + [0] * 20)[: output.shape[1]]


def test_max_length_includes_the_prompt(model):
    free = unstopped_tokens(model)
    assert model.generate(PROMPT, max_length=9, eos_token_id=None)[0, 3:].tolist() == free[:6]


def test_max_time_stops_at_a_block(model):
    """The first forward takes longer than allowed: the row ends with the first columns that are ready."""
    free = unstopped_tokens(model)
    assert MaxTimeCriteria(1e-6)(PROMPT, None).all()
    started = time.perf_counter()
    output = model.generate(PROMPT, max_new_tokens=200, max_time=1e-6, eos_token_id=None)
    assert output[0, 3:].tolist() == free[:1]
    assert time.perf_counter() - started < 10

"""Where transformers ends a row: criteria, stop strings, several ends of text, lengths and time limits."""

import time

import pytest
import torch
from generation_calls import PROMPT, Recorder, drafting_model, every_mode, generate, left_padded_prompts
from law_settings import letter_tokenizer
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria


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


def new_tokens(output, row):
    """The new tokens of a row, without the padding after its end."""
    length = int(output.stats.lengths[row])
    return output.sequences[row, -int(output.stats.lengths.max()) :][:length].tolist()


def row_alone(batch, row):
    return {"input_ids": batch["input_ids"][row][batch["attention_mask"][row].bool()][None]}


SLOW = 60  # a token that marks the slow row of a batch


def hurry_all_but_the_slow_row(context, scores):
    """A processor: certain scores, all revealed in one step, except in the row whose prompt holds `SLOW`."""
    slow = (context == SLOW).any(1, keepdim=True)
    return torch.where(slow, scores * 0.1, scores * 100).index_fill(1, torch.tensor(SLOW), -torch.inf)


@every_mode
@pytest.mark.parametrize("count", [1, 6, 8])
def test_rows_that_ended_keep_their_tokens_when_a_criterion_stops_the_last_row(model, batch, mode, count):
    """Rows 0 and 2 reach the limit of 20 tokens while row 1 is in its first block, and their columns wait for it.

    Once a criterion had stopped row 1, they returned only as many tokens as row 1.
    """
    batch["input_ids"][batch["input_ids"] == SLOW] = SLOW - 1
    batch["input_ids"][1, -1] = SLOW
    options = {"remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.9, "pad_token_id": 0}
    options |= {"logits_processor": [hurry_all_but_the_slow_row], "output_scores": True} | mode
    criterion, streamer = StopAt([99, 12 + count, 99]), Recorder()
    output = generate(model, batch, stopping_criteria=[criterion], streamer=streamer, **options)
    for row in range(3):
        alone = generate(model, row_alone(batch, row), **options)
        length = count if row == 1 else 20
        assert new_tokens(output, row) == new_tokens(alone, 0)[:length]
        assert torch.equal(output.reveal_steps[row, 12:][:length], alone.reveal_steps[0, -20:][:length])
        for at in range(length):
            torch.testing.assert_close(output.scores[at][row], alone.scores[at][0], atol=1e-3, rtol=1e-5)
        if row != 1:
            assert all(value[row].equal(vars(alone.stats)[name][0]) for name, value in vars(output.stats).items())
    assert criterion.seen == list(range(13, 33))
    assert torch.equal(torch.stack(streamer.values("put")[1:], dim=1), output.sequences[:, 12:])


@pytest.mark.parametrize("mode", [None, "spec"])
def test_a_stop_string_may_begin_in_the_prompt_on_either_side_of_padding(tiny_model, mode):
    """With padding on the right, criteria once saw the padding between a prompt and its first new token."""
    model, tokenizer = tiny_model(vocab_size=20), letter_tokenizer(20)
    first = model.generate(PROMPT, max_new_tokens=1, eos_token_id=None)[0, -1].item()
    stop = tokenizer.decode([7, first])
    for ids, mask in (([0, 0, 5, 6, 7], [0, 0, 1, 1, 1]), ([5, 6, 7, 0, 0], [1, 1, 1, 0, 0])):
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}
        output = generate(model, inputs, mrp_mode=mode, stop_strings=stop, tokenizer=tokenizer)
        assert output.sequences.tolist() == [[*ids, first]]


# -- what a row costs that a criterion stops


@every_mode
def test_a_stopped_row_costs_what_it_costs_alone_unless_its_neighbours_are_behind(model, batch, mode):
    """Criteria are asked about a column once every running row has it. Copies of a row are never behind one another.

    A row that waits for its neighbours decodes on, and its forwards and drafts are those that it really took; all
    that is returned, and the tokens by who chose them, are those of the row alone.
    """
    costs = ("backbone_forwards", "head_forwards", "drafts_proposed", "drafts_accepted")
    alone_stats, extra_forwards = [], []
    for row, count in enumerate((3, 11, 6)):
        inputs = row_alone(batch, row)
        width = inputs["input_ids"].shape[1]
        alone = generate(model, inputs, stopping_criteria=[StopAt([width + count])], **mode).stats
        copies = {"input_ids": inputs["input_ids"].expand(3, -1)}
        together = generate(model, copies, stopping_criteria=[StopAt([width + count] * 3)], **mode).stats
        for name, value in vars(alone).items():
            assert vars(together)[name].tolist() == value.tolist() * 3, name
        alone_stats.append(alone)
    stats = generate(model, batch, stopping_criteria=[StopAt([15, 23, 18])], pad_token_id=0, **mode).stats
    for row, alone in enumerate(alone_stats):
        for name, value in vars(alone).items():
            own = vars(stats)[name][row]
            assert (own >= value[0]).all() if name in costs else own.equal(value[0]), name
        extra_forwards.append(int(stats.backbone_forwards[row] - alone.backbone_forwards[0]))
    assert max(extra_forwards) > 0  # at least one row has waited


@pytest.mark.parametrize("mode", [None, "spec"])
@pytest.mark.parametrize("at", [0, 3, 4, 9, 17])
def test_a_stop_string_ends_the_row_after_its_last_token(tiny_model, mode, at):
    """A stop string over two tokens, wherever it lies in a block or across a border."""
    model, tokenizer = tiny_model(vocab_size=20), letter_tokenizer(20)
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


def test_built_in_criteria_with_values_of_their_own_stop_rows_too(model):
    """The columns used to be emitted at the end whenever there were only such criteria, which then stopped nothing."""
    free = unstopped_tokens(model)
    for criterion in (MaxLengthCriteria(3 + 5), EosTokenCriteria([free[4]])):
        output = model.generate(PROMPT, max_new_tokens=20, eos_token_id=None, stopping_criteria=[criterion])
        stop = 5 if isinstance(criterion, MaxLengthCriteria) else free.index(free[4]) + 1
        assert output[0, 3:].tolist() == free[:stop]


def test_max_time_stops_at_a_block(model):
    """The first forward takes longer than allowed: the row ends with the first columns that are ready."""
    free = unstopped_tokens(model)
    assert MaxTimeCriteria(1e-6)(PROMPT, None).all()
    started = time.perf_counter()
    output = model.generate(PROMPT, max_new_tokens=200, max_time=1e-6, eos_token_id=None)
    assert output[0, 3:].tolist() == free[:1]
    assert time.perf_counter() - started < 10

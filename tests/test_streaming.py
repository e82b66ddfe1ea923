"""Streamers: finished columns in order, and drafts of the block in progress."""

import pytest
import torch
import transformers
from generation_calls import (
    PROMPT,
    DraftRecorder,
    Recorder,
    drafting_model,
    every_mode,
    generate,
    left_padded_prompts,
)
from transformers import StoppingCriteria, TextStreamer


@pytest.fixture
def model(tiny_model):
    return drafting_model(tiny_model)


@pytest.fixture
def batch():
    return left_padded_prompts()


@every_mode
def test_a_streamer_sees_the_columns_in_order(model, mode):
    streamer = Recorder()
    output = generate(model, {"input_ids": PROMPT}, streamer=streamer, **mode)
    prompt, *tokens = streamer.values("put")
    assert prompt.tolist() == PROMPT.tolist()
    assert all(token.shape == (1,) for token in tokens)
    assert torch.cat(tokens).tolist() == output.sequences[0, 3:].tolist()
    assert [kind for kind, _ in streamer.events].count("end") == 1 and streamer.events[-1][0] == "end"


def test_a_streamer_of_a_batch_gets_a_column_once_every_row_has_it(model, batch):
    streamer = Recorder()
    output = generate(model, batch, streamer=streamer, mrp_mode="spec")
    columns = torch.stack(streamer.values("put")[1:], dim=1)
    assert torch.equal(columns, output.sequences[:, 12:])


@every_mode
def test_drafts_show_the_block_in_progress(model, mode):
    """Every draft continues what was put: its revealed tokens, except those masked again, become the output."""
    streamer = DraftRecorder()
    output = generate(model, {"input_ids": PROMPT}, streamer=streamer, **mode)
    final, mask, done, drafts = output.sequences[0].tolist(), model.config.mask_token_id, 0, 0
    for kind, value in streamer.events:
        if kind == "put":
            done += value.numel()
        elif kind == "draft":
            drafts += 1
            shown = value[0].tolist()
            assert 0 < len(shown) <= 8 and done + len(shown) <= len(final)
            assert mask in shown
            if mode["mrp_mode"] != "remask":
                assert all(token in (mask, final[done + at]) for at, token in enumerate(shown))
    assert drafts >= 3


def test_text_streamers_of_transformers(model, word_tokenizer, capsys):
    plain = model.generate(PROMPT, max_new_tokens=10, eos_token_id=None)
    text = word_tokenizer.decode(plain[0])
    model.generate(PROMPT, max_new_tokens=10, eos_token_id=None, streamer=TextStreamer(word_tokenizer))
    assert capsys.readouterr().out.strip() == text.strip()


def test_diffusion_streamer_of_transformers_shows_drafts(model, word_tokenizer, capsys):
    if not hasattr(transformers, "TextDiffusionStreamer"):
        pytest.skip(f"transformers {transformers.__version__} has no TextDiffusionStreamer")
    streamer = transformers.TextDiffusionStreamer(word_tokenizer)
    model.generate(PROMPT, max_new_tokens=10, eos_token_id=None, streamer=streamer)
    shown = capsys.readouterr().out
    assert "[MASK]" in shown and "\033[J" in shown  # drafts, and their removal


def test_drafts_show_padding_in_rows_that_a_criterion_has_stopped(model, batch):
    """A stopped row may have decoded on while its neighbours caught up; what it holds is not part of the output."""

    class StopFirstRow(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([True, False, False])

    streamer = DraftRecorder()
    options = {"eos_token_id": None, "pad_token_id": 0, "stopping_criteria": [StopFirstRow()]}
    generate(model, batch, streamer=streamer, **options)
    kinds = [kind for kind, _ in streamer.events]
    stopped = kinds.index("put", 1)  # the first put after that of the prompts is the first column
    drafts = [value for kind, value in streamer.events[stopped:] if kind == "draft"]
    assert len(drafts) > 3
    assert all(draft[0].eq(0).all() and not draft[1:].eq(0).all() for draft in drafts)

"""Drafts among frequent tokens: how the tokens are stored, counted and used. The laws are in test_laws_property.py."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.draft_vocabulary import DraftVocabulary, pack_ids, unpack_ids
from modeling_mrp.drafting import Drafter
from mrp_trainer.checkpoints.convert import convert
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.commands.cli import main
from mrp_trainer.evaluation.token_counts import most_frequent

MASK, IDS = 3, (5, 6, 11, 17)
PROMPT = torch.tensor([[5, 9, 4, 8]])


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=300))
def test_ids_survive_as_text(ids):
    assert unpack_ids(pack_ids(ids)) == tuple(sorted(ids))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no base64!", "not the text of a draft vocabulary"),
        (7, "must be text"),
        ([4, 5], "must be text"),
        (pack_ids(()), "holds no token"),
        (pack_ids((4, 20)), "holds the token id 20, but ids must be below vocab_size 20"),
        (pack_ids((MASK, 4)), "holds the token id 3, but"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(text, message):
    with pytest.raises(ValueError, match=f"draft_vocabulary.*{message}.*mrp calibrate"):
        MRPConfig(vocab_size=20, mask_token_id=MASK, draft_vocabulary=text)


@pytest.fixture
def model(tiny_model):
    model = tiny_model(vocab_size=20, mask_token_id=MASK, initializer_range=0.3, block_size=4)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.5)
    model.config.draft_vocabulary = pack_ids(IDS)
    return model


def drafted_tokens(model, monkeypatch, **options):
    """The tokens that drafts add to the current blocks, and the sequence."""
    found, draft = set(), Drafter.draft

    def recorded(self, state, *arguments):
        drafts = draft(self, state, *arguments)
        candidates = drafts.candidates
        new = (candidates.blocks != state.block[:, None]) & candidates.live[..., None]
        if candidates.opens is not None:
            new &= ~candidates.opens[..., None]
        found.update(candidates.blocks[new].tolist())
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "draft", recorded)
        sequence = model.generate(PROMPT, max_new_tokens=24, mrp_mode="spec", mrp_candidates=8, **options)
    return found, sequence


@pytest.mark.parametrize("draft", ["head", "self"])
def test_drafts_hold_tokens_of_the_vocabulary_only_and_the_text_stays(model, monkeypatch, draft):
    found, sequence = drafted_tokens(model, monkeypatch, mrp_draft=draft)
    assert found and found <= set(IDS)
    everything, same = drafted_tokens(model, monkeypatch, mrp_draft=draft, mrp_draft_vocabulary=False)
    assert not everything <= set(IDS)
    assert torch.equal(sequence, model.generate(PROMPT, max_new_tokens=24, mrp_mode=None))
    assert torch.equal(sequence, same)


def test_modes_that_do_not_verify_read_all_tokens(model):
    restricted = model.generate(PROMPT, max_new_tokens=24, mrp_mode="direct", mrp_steps=3)
    assert not set(restricted[0, 4:].tolist()) <= set(IDS)
    model.config.draft_vocabulary = None
    assert torch.equal(model.generate(PROMPT, max_new_tokens=24, mrp_mode="direct", mrp_steps=3), restricted)


def test_the_weight_holds_the_rows_of_the_tokens(model):
    vocabulary = DraftVocabulary.of(model)
    torch.testing.assert_close(vocabulary.weight, model.lm_head.weight[list(IDS)])


def test_an_option_of_another_type_is_refused(model):
    with pytest.raises(ValueError, match="mrp_draft_vocabulary must be True or False, got 5"):
        model.generate(PROMPT, mrp_mode="spec", mrp_draft_vocabulary=5)


def test_the_vocabulary_goes_where_the_head_goes(model, tmp_path):
    model.save_pretrained(tmp_path / "checkpoint")
    save_head(model, tmp_path / "head")
    assert MRPForDiffusionLM.from_pretrained(tmp_path / "checkpoint").config.draft_vocabulary == pack_ids(IDS)
    model.config.draft_vocabulary = None
    model.save_pretrained(tmp_path / "bare")
    assert load_head(model, tmp_path / "head").config.draft_vocabulary == pack_ids(IDS)
    convert(tmp_path / "bare", tmp_path / "with-head", head=tmp_path / "head")
    assert json.loads((tmp_path / "with-head" / "config.json").read_text())["draft_vocabulary"] == pack_ids(IDS)


def test_the_most_frequent_tokens_are_taken_and_always_the_end_of_text(model):
    model.generation_config.eos_token_id = 7
    counts = Counter({9: 5, 8: 5, 4: 1, MASK: 99, 12: 7})
    assert most_frequent(model, counts, 3) == [7, 12, 8]
    with pytest.raises(ValueError, match="of 6 tokens needs as many different tokens, but the data holds 5"):
        most_frequent(model, counts, 6)


def test_calibrate_stores_and_removes_a_vocabulary(model, word_tokenizer, tmp_path, capsys):
    model.config.draft_vocabulary = None
    model.save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "what is one plus two", "answer": "so the"}) + "\n")

    def calibrate(number):
        options = ["--data", str(data), "--max-new-tokens", "8", "--raw", "--draft-vocabulary", str(number)]
        assert main(["calibrate", str(tmp_path / "model"), *options]) in (0, None)
        return json.loads((tmp_path / "model" / "config.json").read_text())["draft_vocabulary"]

    ids = unpack_ids(calibrate(4))
    assert len(ids) == 4 and model.config.mask_token_id not in ids
    assert "stored draft_profile and draft_vocabulary of 1 prompt in" in capsys.readouterr().out
    assert calibrate(0) is None

"""`generate` as users of transformers know it: processors, scores, statistics and the kinds of output."""

import pytest
import torch
from generation_calls import MODES, PROMPT, drafting_model, every_mode, generate, left_padded_prompts

from modeling_mrp import MRPGenerateOutput


@pytest.fixture
def model(tiny_model):
    return drafting_model(tiny_model)


@pytest.fixture
def batch():
    return left_padded_prompts()


# -- processors and scores


@every_mode
def test_every_mode_respects_logits_processors(model, batch, mode):
    allowed = torch.tensor([10, 20, 30])

    def only_allowed(_, scores):
        return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores[:, allowed])

    new = generate(model, batch, logits_processor=[only_allowed], **mode).sequences[:, 12:]
    assert set(new.flatten().tolist()) <= set(allowed.tolist())
    assert len(set(new.flatten().tolist())) > 1


@pytest.mark.parametrize(
    "options", [{"suppress_tokens": None}, {"bad_words_ids": None}], ids=["suppress", "bad_words"]
)
def test_forbidden_tokens_are_never_generated(model, options):
    common = sorted(set(model.generate(PROMPT, max_new_tokens=20, eos_token_id=None)[0, 3:].tolist()))[:3]
    name = next(iter(options))
    value = common if name == "suppress_tokens" else [[token] for token in common]
    for mode in (MODES["backbone"], MODES["spec"], MODES["direct"]):
        new = generate(model, {"input_ids": PROMPT}, **{name: value}, **mode).sequences[0, 3:]
        assert not set(new.tolist()) & set(common)


@every_mode
@pytest.mark.parametrize("sampling", [False, True])
def test_scores_are_those_at_which_each_token_was_revealed(model, batch, mode, sampling):
    """Greedy: each token is the argmax of its row; sampling with top-k 1: the only one that is left."""
    options = {"do_sample": True, "top_k": 1, "temperature": 0.7} if sampling else {}
    output = generate(model, batch, output_scores=True, **options, **mode)
    assert len(output.scores) == 20
    scores = torch.stack(output.scores, dim=1)
    assert scores.shape == (3, 20, 61)
    assert torch.equal(scores.argmax(-1), output.sequences[:, 12:])
    assert scores[..., model.config.mask_token_id].eq(-torch.inf).all()
    if sampling:
        assert torch.isfinite(scores).sum(-1).eq(1).all()
    assert generate(model, batch, **options, **mode).scores is None


def test_scores_of_spec_are_those_of_backbone_only(model, batch):
    plain = torch.stack(generate(model, batch, output_scores=True).scores)
    spec = torch.stack(generate(model, batch, output_scores=True, **MODES["spec"]).scores)
    finite = torch.isfinite(plain)
    assert torch.equal(finite, torch.isfinite(spec))
    torch.testing.assert_close(spec[finite], plain[finite], atol=1e-4, rtol=1e-5)


# -- output and statistics


@every_mode
@pytest.mark.parametrize("ends", [None, [5, 9, 14, 33, 40, 52]])
def test_statistics_count_the_forwards_of_every_row(model, batch, mode, ends):
    options = {"eos_token_id": ends, "pad_token_id": 0, **mode}
    output = generate(model, batch, **options)
    stats = output.stats
    calls = {"backbone": 0, "head": 0}
    model.model.register_forward_hook(lambda *_: calls.update(backbone=calls["backbone"] + 1))
    model.mrp_head.register_forward_hook(lambda *_: calls.update(head=calls["head"] + 1))
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        calls.update(backbone=0, head=0)
        generate(model, {"input_ids": ids[mask][None]}, **options)
        assert calls == {"backbone": stats.backbone_forwards[row], "head": stats.head_forwards[row]}
    assert stats.prefill_forwards.tolist() == [0, 1, 1]
    tokens = stats.tokens_by_backbone + stats.tokens_by_head
    new = output.sequences[:, 12:]
    for row, count in enumerate(tokens.tolist()):
        assert new[row, count:].eq(0).all()
        assert count == new.shape[1] or new[row, count - 1].item() in ends
    torch.testing.assert_close(output.tokens_per_forward, tokens / stats.backbone_forwards)


def test_tokens_are_counted_for_backbone_or_head_by_who_chose_them(model):
    inputs = {"input_ids": PROMPT[:, :1]}
    assert generate(model, inputs, max_new_tokens=23).stats.tokens_by_head.tolist() == [0]
    direct = generate(model, inputs, max_new_tokens=23, mrp_mode="direct", mrp_steps=1).stats
    # blocks of 7, 8 and 8 tokens, each revealed by turns
    assert direct.tokens_by_backbone.tolist() == [4 + 4 + 4] and direct.tokens_by_head.tolist() == [3 + 4 + 4]
    spec = generate(model, inputs, max_new_tokens=23, **MODES["spec"]).stats
    assert spec.tokens_by_head.tolist() == spec.drafts_accepted.sum(1).tolist()
    own = generate(model, inputs, max_new_tokens=23, **MODES["self"]).stats
    assert own.tokens_by_head.tolist() == [0] and own.drafts_accepted.sum() > 0


def test_drafts_are_counted_by_depth(model, batch):
    stats = generate(model, batch, **MODES["spec"]).stats
    assert stats.drafts_proposed.shape == stats.drafts_accepted.shape == (3, 4)
    assert stats.drafts_proposed[:, 0].eq(0).all() and stats.drafts_accepted[:, 0].eq(0).all()
    assert (stats.drafts_accepted <= stats.drafts_proposed).all()
    assert (stats.drafts_accepted[:, 1:-1] >= stats.drafts_accepted[:, 2:]).all()  # a chain is accepted up to a depth
    # static, one token a step: what was accepted are the forwards saved, in whole blocks up to the row's end
    plain = generate(model, batch).stats.backbone_forwards
    saved = plain - generate(model, batch, **MODES["spec"]).stats.backbone_forwards
    assert saved.tolist() == stats.drafts_accepted.sum(1).tolist()


def test_generate_returns_ids_or_an_output_object(model):
    plain = model.generate(PROMPT, max_new_tokens=5, eos_token_id=None)
    assert isinstance(plain, torch.Tensor) and plain.dtype == torch.long
    output = model.generate(PROMPT, max_new_tokens=5, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(output, MRPGenerateOutput) and torch.equal(output.sequences, plain)
    assert set(output.keys()) == {"sequences", "reveal_steps", "tokens_per_forward", "stats"}
    assert output.tokens_per_forward.tolist() == [1.0]


def test_prompts_come_back_as_given(model, batch):
    for side in (lambda x: x, lambda x: x.flip(1)):
        inputs = {name: side(value) for name, value in batch.items()}
        assert torch.equal(generate(model, inputs).sequences[:, :12], inputs["input_ids"])


def test_return_sequences_follow_their_prompt(model, batch):
    torch.manual_seed(0)
    output = generate(model, batch, do_sample=True, num_return_sequences=3, temperature=2.0)
    assert torch.equal(output.sequences[:, :12], batch["input_ids"].repeat_interleave(3, 0))
    assert output.stats.backbone_forwards.shape == (9,)
    new = output.sequences[:, 12:].unflatten(0, (3, 3)).tolist()
    assert all(len(set(map(tuple, samples))) == 3 for samples in new)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_generation_leaves_the_model_as_it_was(model):
    """Training mode, gradients and stored options are the caller's; a call in training mode gives the same tokens."""
    expected = generate(model, {"input_ids": PROMPT}, **MODES["direct"]).sequences
    model.train()
    model.mrp_head.norm.eval()  # whoever set it so wants it back so
    options = dict(vars(model.generation_config))
    assert torch.equal(generate(model, {"input_ids": PROMPT}, **MODES["direct"]).sequences, expected)
    assert model.training and model.mrp_head.training and torch.is_grad_enabled()
    assert not model.mrp_head.norm.training
    assert vars(model.generation_config) == options
    model.gradient_checkpointing_enable()
    assert torch.equal(generate(model, {"input_ids": PROMPT}, **MODES["direct"]).sequences, expected)


def test_the_checkpoints_default_mode_is_used_unless_another_is_asked_for(model):
    model.generation_config.mrp_mode = "direct"
    assert generate(model, {"input_ids": PROMPT}).stats.head_forwards.sum() > 0
    expected = generate(model, {"input_ids": PROMPT}, mrp_mode="remask").stats
    assert expected.tokens_by_head.sum() == 0
    plain = generate(model, {"input_ids": PROMPT}, mrp_mode=None).stats
    assert plain.head_forwards.sum() == 0

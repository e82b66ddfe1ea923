"""Training of the embedded checkpoint: noise, streams, resuming, and the whole build in small."""

import pytest
import torch
from torch.nn import functional as F

from hub_cards import build_tiny, tiny_backbone
from hub_cards.tiny_backbone import Recipe, add_noise, backbone_loss, batches, encode_problem, learning_rate_factor
from hub_cards.word_problems import problem, score
from hub_cards.word_tokenizer import build_tokenizer
from trainer import demo

BLOCK = 8


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def small_model(tokenizer):
    from modeling_mrp import MRPForDiffusionLM

    config = build_tiny.tiny_config(tokenizer, num_mrp_layers=0)
    config.hidden_size, config.intermediate_size = 32, 32
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 16
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    torch.manual_seed(3)
    return MRPForDiffusionLM(config)


def test_a_row_is_prompt_answer_and_eos_to_the_end_of_the_block(tokenizer):
    one = problem("train", 0)
    ids, prompt = encode_problem(tokenizer, one, BLOCK)
    assert tokenizer.decode(ids[:prompt]) == one.prompt
    assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == one.answer
    assert len(ids) % BLOCK == 0 and ids[-1] == tokenizer.eos_token_id
    assert len(ids) - len(tokenizer(one.prompt + " " + one.answer)["input_ids"]) in range(1, BLOCK + 1)


def test_noise_masks_answer_tokens_only_and_every_block_weighs_one():
    answer = torch.zeros(64, 24, dtype=torch.bool)
    answer[:, 5:22] = True  # a prompt's tail, a full block, padding
    clean = torch.full((64, 24), 7)
    noisy, weight = add_noise(clean, answer, BLOCK, 2, 99, torch.Generator().manual_seed(0))
    masked = noisy == 99
    assert not masked[~answer[:, None].expand_as(masked)].any() and (noisy[~masked] == 7).all()
    assert torch.equal(weight > 0, masked)
    torch.testing.assert_close(weight.view(64, 2, 3, BLOCK).sum(-1), torch.ones(64, 2, 3))


def test_the_masked_count_is_uniform():
    answer = torch.ones(4000, BLOCK, dtype=torch.bool)
    noisy, _ = add_noise(
        torch.zeros(4000, BLOCK, dtype=torch.long), answer, BLOCK, 1, 1, torch.Generator().manual_seed(0)
    )
    counts = noisy.sum(-1).flatten().bincount(minlength=BLOCK + 1)
    assert counts[0] == 0
    assert ((counts[1:] - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_loss_and_gradient_equal_the_models_own_dual_stream_forward(tokenizer):
    """The packed streams with their own attention against `forward(clean_ids=...)`, one stream after another."""
    model = small_model(tokenizer).freeze_backbone(False)
    batch = next(batches(tokenizer, Recipe(statement_steps=0, rows=6, pool_batches=1), BLOCK))
    model.set_attn_implementation("tiny_backbone_streams")
    ours = backbone_loss(model, batch)
    ours.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation("sdpa")
    expected, length = 0.0, batch.noisy.shape[2]
    for stream in range(batch.noisy.shape[1]):
        ids = torch.cat([batch.clean[:, :-length], batch.noisy[:, stream]], dim=1)
        logits = model(ids, clean_ids=batch.clean).logits[:, -length:]
        losses = F.cross_entropy(logits.transpose(1, 2), batch.clean[:, -length:], reduction="none")
        expected += (losses * batch.weight[:, stream]).sum() / batch.blocks
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradient[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_batches_are_a_function_of_the_recipe(tokenizer):
    recipe = Recipe(statement_steps=2, steps=4, rows=4, pool_batches=2)
    once, again = (list(batches(tokenizer, recipe, BLOCK)) for _ in range(2))
    assert len(once) == 4
    assert all(
        torch.equal(a.noisy, b.noisy) and torch.equal(a.clean, b.clean) for a, b in zip(once, again, strict=True)
    )


def test_statements_come_first_and_answer_themselves(tokenizer):
    first = next(batches(tokenizer, Recipe(statement_steps=8), BLOCK))
    text = tokenizer.decode(first.clean[0], skip_special_tokens=True)
    assert text.count("How many?") == 1 and "=" not in text
    one = tiny_backbone.statement(5, seed=0)
    assert one.name in one.answer and one.item in one.answer
    assert str(score_number(one.prompt)) in one.answer


def score_number(prompt):
    return int("".join(c for c in prompt if c.isdigit()))


def test_learning_rate_warms_up_and_falls_to_zero_over_the_last_half():
    recipe = Recipe(steps=100, warmup_steps=10)
    factors = [learning_rate_factor(step, recipe) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and set(factors[9:51]) == {1.0}
    assert factors[75] == pytest.approx(0.5) and factors[100] == 0.0


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tokenizer, tmp_path, monkeypatch):
    recipe = Recipe(statement_steps=2, steps=6, rows=4, pool_batches=2, warmup_steps=1)
    whole = small_model(tokenizer)
    tiny_backbone.train_backbone(whole, tokenizer, recipe, tmp_path / "whole.pt")

    calls = []

    def dying_loss(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return backbone_loss(model, batch)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tiny_backbone, "backbone_loss", dying_loss)
        tiny_backbone.train_backbone(small_model(tokenizer), tokenizer, recipe, tmp_path / "state.pt", save_seconds=0)
    resumed = small_model(tokenizer)
    before = resumed.model.layers[0].mlp.up_proj.weight.clone()
    tiny_backbone.train_backbone(resumed, tokenizer, recipe, tmp_path / "state.pt")
    assert not torch.equal(before, whole.model.layers[0].mlp.up_proj.weight)
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_the_whole_build_in_small(tokenizer, tmp_path, monkeypatch):
    from transformers import AutoModel, AutoTokenizer

    small = Recipe(statement_steps=1, steps=2, rows=2, pool_batches=1)
    monkeypatch.setattr(build_tiny, "Recipe", lambda seed: small)
    for name, value in {"HEAD_STEPS": 2, "HEAD_ROWS": 2, "TEST_PROBLEMS": 2, "VALIDATION_PROBLEMS": 2}.items():
        monkeypatch.setattr(build_tiny, name, value)
    monkeypatch.setattr(build_tiny, "RESIDUAL_THRESHOLDS", (0.5, 1.0))
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 4)
    out = tmp_path / "sdar-tiny-mrp"
    for _ in range(2):  # the second call finds everything done
        build_tiny.build(tmp_path / "scratch", out)
    model, loaded = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.generation_config.mrp_mode == "spec" and model.config.calibrated_remask_threshold > 0
    inputs = loaded(problem("test", 0).prompt, return_tensors="pt")
    text = loaded.decode(model.generate(**inputs, max_new_tokens=8)[0], skip_special_tokens=True)
    assert not score(problem("test", 0), text).worked  # two steps teach nothing; it only has to run
    card = (out / "README.md").read_text()
    assert "| spec-4 |" in card and "backbone" in card and str(tmp_path) not in card
    assert sum(f.stat().st_size for f in out.glob("*.safetensors")) < 12 * 2**20

"""Building the embedded checkpoints: noise, streams, resuming, and a complete build in small."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch.nn import functional as F

from hub_cards.build import build_tiny, tiny_backbone
from hub_cards.build.recipes import RECIPES
from hub_cards.build.tiny_backbone import (
    BackboneRecipe,
    add_noise,
    backbone_loss,
    batches,
    bits_per_token,
    encode_sample,
    learning_rate_factor,
)
from hub_cards.tasks.references import References
from hub_cards.tasks.tasks import PythonFunctions, WordProblems
from hub_cards.tasks.word_problems import problem, score, statement

BLOCK = 8
WORDS = RECIPES["words"]


@pytest.fixture(scope="module")
def tokenizer():
    return WORDS.task.tokenizer


def problem_number(number):
    return problem("train", number)


def small_model():
    from modeling_mrp import MRPForDiffusionLM

    config = build_tiny.tiny_config(WORDS, num_mrp_layers=0)
    config.hidden_size, config.intermediate_size = 32, 32
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 16
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    torch.manual_seed(3)
    return MRPForDiffusionLM(config)


def test_encoded_sample_is_prompt_and_answer_filled_up_with_eos(tokenizer):
    one = problem("train", 0)
    ids, prompt = encode_sample(tokenizer, one, BLOCK)
    assert tokenizer.decode(ids[:prompt]) == one.prompt
    assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == one.answer
    assert len(ids) % BLOCK == 0 and ids[-1] == tokenizer.eos_token_id
    assert len(ids) - len(tokenizer(one.prompt + " " + one.answer)["input_ids"]) in range(1, BLOCK + 1)


def test_noise_masks_only_answer_tokens_and_weights_sum_to_one_per_block():
    answer = torch.zeros(64, 24, dtype=torch.bool)
    answer[:, 5:22] = True  # the end of a prompt, a full block, padding
    clean = torch.full((64, 24), 7)
    noisy, weight = add_noise(clean, answer, BLOCK, 2, 99, torch.Generator().manual_seed(0))
    masked = noisy == 99
    assert not masked[~answer[:, None].expand_as(masked)].any() and (noisy[~masked] == 7).all()
    assert torch.equal(weight > 0, masked)
    torch.testing.assert_close(weight.view(64, 2, 3, BLOCK).sum(-1), torch.ones(64, 2, 3))


def test_number_of_masked_tokens_is_uniform():
    answer = torch.ones(4000, BLOCK, dtype=torch.bool)
    noisy, _ = add_noise(
        torch.zeros(4000, BLOCK, dtype=torch.long), answer, BLOCK, 1, 1, torch.Generator().manual_seed(0)
    )
    counts = noisy.sum(-1).flatten().bincount(minlength=BLOCK + 1)
    assert counts[0] == 0
    assert ((counts[1:] - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_loss_and_gradients_equal_those_of_the_models_dual_stream_forward(tokenizer):
    """Compare the packed streams with `forward(clean_ids=...)`, called for one noisy stream at a time."""
    model = small_model().freeze_backbone(False)
    batch = next(batches(problem_number, tokenizer, BackboneRecipe(rows=6, pool_batches=1), BLOCK))
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


def test_batches_are_the_same_for_the_same_recipe(tokenizer):
    recipe = BackboneRecipe(steps=4, rows=4, pool_batches=2)
    once, again = (list(batches(WORDS.backbone_sample, tokenizer, recipe, BLOCK)) for _ in range(2))
    assert len(once) == 4
    assert all(
        torch.equal(a.noisy, b.noisy) and torch.equal(a.clean, b.clean) for a, b in zip(once, again, strict=True)
    )


def test_training_starts_with_statements_whose_answer_repeats_the_prompt():
    assert WORDS.backbone_sample(WORDS.statements - 1).steps == ()
    assert WORDS.backbone_sample(WORDS.statements).steps
    one = statement(5)
    assert one.name in one.answer and one.item in one.answer
    assert str(score_number(one.prompt)) in one.answer


def score_number(prompt):
    return int("".join(c for c in prompt if c.isdigit()))


def test_learning_rate_warms_up_and_decays_to_zero_over_the_last_half():
    recipe = BackboneRecipe(steps=100, warmup_steps=10)
    factors = [learning_rate_factor(step, recipe) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and set(factors[9:51]) == {1.0}
    assert factors[75] == pytest.approx(0.5) and factors[100] == 0.0


def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(tokenizer, tmp_path, monkeypatch):
    recipe = BackboneRecipe(steps=6, rows=4, pool_batches=2, warmup_steps=1)
    whole = small_model()
    tiny_backbone.train_backbone(whole, tokenizer, problem_number, recipe, tmp_path / "whole.pt")

    calls = []

    def dying_loss(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return backbone_loss(model, batch)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tiny_backbone, "backbone_loss", dying_loss)
        tiny_backbone.train_backbone(
            small_model(), tokenizer, problem_number, recipe, tmp_path / "state.pt", save_seconds=0
        )
    resumed = small_model()
    before = resumed.model.layers[0].mlp.up_proj.weight.clone()
    tiny_backbone.train_backbone(resumed, tokenizer, problem_number, recipe, tmp_path / "state.pt")
    assert not torch.equal(before, whole.model.layers[0].mlp.up_proj.weight)
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_bits_per_token_equals_the_mean_over_all_orders_of_revealing(tokenizer):
    """Compare with all six orders of a block of three answer tokens, computed by the model's own forward."""
    model = small_model()
    ids, prompt = encode_sample(tokenizer, WORDS.backbone_sample(0), BLOCK)
    ids, prompt = ids[:BLOCK], BLOCK - 3  # three answer tokens: six orders
    total = 0.0
    for order in permutations(range(prompt, BLOCK)):
        state = torch.tensor([ids])
        state[0, prompt:] = tokenizer.mask_token_id
        for position in order:
            log_p = torch.log_softmax(model(state).logits[0, position].double(), -1)
            total -= log_p[ids[position]].item() / 6
            state[0, position] = ids[position]
    ours = bits_per_token(model, tokenizer, [(ids, prompt)], streams=6000)
    assert ours == pytest.approx(total / 3 / math.log(2), rel=0.01)  # the noise is random: the standard error is 0.3 %


SMALL = {
    "shape": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8},
    "backbone": BackboneRecipe(steps=2, rows=2, pool_batches=1),
    "head_steps": 2,
    "refine_steps": 2,
    "refine_samples": 4,
}


class ShortWords(WordProblems):
    answer_tokens = 4


class ShortCode(PythonFunctions):
    answer_tokens = 24


@pytest.mark.slow
@pytest.mark.parametrize("task", [ShortWords(), ShortCode()], ids=lambda task: task.name)
def test_complete_build_in_small(tmp_path, monkeypatch, task):
    from transformers import AutoModel, AutoTokenizer

    recipe = replace(RECIPES[task.name], task=task, **SMALL)
    constants = {"HEAD_ROWS": 2, "TEST_SAMPLES": 2, "VALIDATION_SAMPLES": 2}
    for name, value in constants.items():
        monkeypatch.setattr(build_tiny, name, value)
    monkeypatch.setattr(build_tiny, "RESIDUAL_THRESHOLDS", (0.5, 1.0))
    out = tmp_path / task.folder.name
    for _ in range(2):  # the second call only loads what the first one finished
        built = build_tiny.build(recipe, tmp_path / "scratch", out)
    steps = ["backbone", "head", "refinement", "threshold", "acceptance", "draft profile", "evaluation"]
    assert [row["step"] for row in built.rows] == steps
    assert built.figures["forwards_saved"]["spec-4"] > 0
    model, loaded = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.generation_config.mrp_mode == "spec" and model.config.calibrated_remask_threshold > 0
    sample = task.held_out("test", 1)[0]
    inputs = loaded(sample.prompt, return_tensors="pt")
    assert inputs["input_ids"].tolist() == task.tokenizer(sample.prompt, return_tensors="pt")["input_ids"].tolist()
    text = loaded.decode(model.generate(**inputs, max_new_tokens=8)[0], skip_special_tokens=True)
    if task.right_when:
        assert not score(sample, text).worked  # two training steps teach nothing
    card = (out / "README.md").read_text()
    assert f"<!-- results:card-{task.name} -->\nMeasured on 2 held-out samples" in card
    assert "| spec-4 |" in card and "backbone" in card and str(tmp_path) not in card
    assert ("accuracy" in card) == (task.right_when is not None)
    assert ("bits per token" in card) == (task.name == "code")
    assert sum(f.stat().st_size for f in out.glob("*.safetensors")) < 12 * 2**20
    if task.name == "code":
        references = References.read(out / "held_out.json")
        assert [one.find() for one in references.splits["test"][:5]] == task.draw_held_out("test", 5)

"""Sampling through `generate`: seeds, copies of a prompt, and the distribution of the samples."""

import pytest
import torch
from decoding_calls import generate, sharp_head


def test_return_sequences_differ_and_repeat_with_the_seed(tiny_model):
    model = tiny_model(initializer_range=0.1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    options = {"do_sample": True, "temperature": 1.0, "num_return_sequences": 4, "eos_token_id": None}
    first, _ = generate(model, inputs, seed=1, **options)
    assert len(set(map(tuple, first.tolist()))) == 4
    assert generate(model, inputs, seed=1, **options)[0].tolist() == first.tolist()
    assert generate(model, inputs, seed=1, mrp_mode="spec", **options)[0].tolist() == first.tolist()
    assert generate(model, inputs, seed=2, **options)[0].tolist() != first.tolist()


def enumerated_distribution(model, prompt):
    """Probability of each of the block's outputs under sequential decoding: p(a) p(b | a), the mask excluded."""
    mask = model.config.mask_token_id
    tokens = [token for token in range(4) if token != mask]

    def probabilities(row, position):
        logits = model(torch.tensor([row])).logits[0, position].double()
        logits[mask] = -torch.inf
        return logits.softmax(-1).tolist()

    first = probabilities([*prompt, mask, mask], len(prompt))
    return {
        (a, b): first[a] * probabilities([*prompt, a, mask], len(prompt) + 1)[b] for a in tokens for b in tokens
    }  # fmt: skip


@pytest.mark.parametrize("mode", [None, "spec"])
def test_samples_follow_the_distribution(tiny_model, mode):
    """Vocabulary 4, block 2, sequential: 20,000 draws against the enumerated distribution (chi-square, 8 degrees)."""
    model = sharp_head(tiny_model(vocab_size=4, block_size=2, pad_token_id=None, eos_token_id=None), 0.2)
    prompt = [0, 2]
    expected = enumerated_distribution(model, prompt)
    counts = dict.fromkeys(expected, 0)
    for seed in range(10):
        new, _ = generate(
            model, {"input_ids": torch.tensor([prompt])}, seed=seed, mrp_mode=mode, do_sample=True, top_k=0,
            remasking_strategy="sequential", num_return_sequences=2000, max_new_tokens=2, eos_token_id=None,
        )  # fmt: skip
        for pair in new.tolist():
            counts[tuple(pair)] += 1
    chi_square = sum((counts[pair] - 20_000 * p) ** 2 / (20_000 * p) for pair, p in expected.items())
    assert chi_square < 26.1  # the 0.999 quantile


def test_spec_and_the_plain_loop_draw_the_same_distribution_out_of_order(tiny_model):
    """Static decoding reveals the position that happens to be surest: compared draw by draw, for every seed."""
    model = sharp_head(tiny_model(vocab_size=4, block_size=2, pad_token_id=None, eos_token_id=None), 0.2)
    inputs = {"input_ids": torch.tensor([[0, 2, 1]])}
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 500, "max_new_tokens": 5, "eos_token_id": None}
    plain, _ = generate(model, inputs, **options)
    spec, output = generate(model, inputs, mrp_mode="spec", mrp_steps=3, **options)
    assert spec.tolist() == plain.tolist()
    assert output.stats.drafts_proposed.sum() > 0 or output.stats.backbone_forwards.max() <= 5

"""`direct` and `remask` against a plain loop for one row that recomputes everything from whole rows."""

import pytest
import torch
from plain_head_loop import decode, direct, remask


@pytest.fixture
def model(tiny_model):
    """Logits that are neither flat nor certain, and residuals large enough to change choices."""
    model = tiny_model(block_size=8, initializer_range=0.3)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3, generator=torch.Generator().manual_seed(3))
    return model


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 61, (length,), generator=generator).tolist() for length in (3, 8, 12)]


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_direct_equals_the_plain_loop(model, prompts, steps):
    new, stats = decode(model, prompts, mrp_mode="direct", mrp_steps=steps)
    assert new == [direct(model, prompt, 20, steps) for prompt in prompts]
    static, _ = decode(model, prompts, denoising_steps=-(-8 // (steps + 1)))
    assert new != static  # the head changed something
    assert stats.tokens_by_head.sum() > 0


@pytest.mark.parametrize(
    ("criterion", "threshold"), [("leave_one_out", 0.35), ("confidence", 0.35), ("residual", 0.6)]
)
def test_remask_equals_the_plain_loop(model, prompts, criterion, threshold):
    options = {"remask_criterion": criterion, "remask_threshold": threshold, "confidence_threshold": 0.2}
    new, stats = decode(model, prompts, mrp_mode="remask", **options)
    assert new == [remask(model, prompt, 20, 0.2, criterion, threshold) for prompt in prompts]
    _, dynamic = decode(model, prompts, remasking_strategy="low_confidence_dynamic", confidence_threshold=0.2)
    _, static = decode(model, prompts)
    forwards = [s.backbone_forwards.sum().item() for s in (dynamic, stats, static)]
    assert forwards == sorted(set(forwards))  # some proposals were masked again, and some kept


@pytest.mark.parametrize("criterion", ["leave_one_out", "confidence", "residual"])
def test_remask_equals_dynamic_decoding_when_nothing_is_doubted_and_static_when_all_is(model, prompts, criterion):
    """Whatever the head says, the surest proposal stays: a block ends after at most block_size rounds."""
    nothing, everything = (99.0, 0.0) if criterion == "residual" else (0.0, 1.0)
    options = {"mrp_mode": "remask", "remask_criterion": criterion, "confidence_threshold": 0.2}
    dynamic, _ = decode(model, prompts, remasking_strategy="low_confidence_dynamic", confidence_threshold=0.2)
    static, _ = decode(model, prompts)
    assert decode(model, prompts, remask_threshold=nothing, **options)[0] == dynamic
    assert decode(model, prompts, remask_threshold=everything, **options)[0] == static

"""Step rules against a plain Python version of each, on random data with ties and few masks."""

import pytest
import torch

from modeling_mrp.step_rules import STRATEGIES, StepRule, confidence_rank


def expected_positions(strategy, confidence, entropy, masked, count, threshold, bound):
    """Positions that one step reveals in one block, all lists of length B."""
    candidates = [i for i, hidden in enumerate(masked) if hidden]
    if not candidates:
        return set()
    if strategy == "sequential":
        return set(candidates[:count])
    if strategy == "entropy_bounded":
        order = sorted(candidates, key=lambda i: (entropy[i], i))
        chosen, total = [order[0]], entropy[order[0]]
        for i in order[1:]:
            total += entropy[i]
            if total > bound:
                break
            chosen.append(i)
        return set(chosen)
    order = sorted(candidates, key=lambda i: (-confidence[i], i))
    if strategy == "low_confidence_static":
        return set(order[:count])
    return {i for i in candidates if confidence[i] > threshold} | {order[0]}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_every_rule_equals_its_plain_version(strategy, size):
    """Values are multiples of 1/8, so that ties are frequent and sums are exact."""
    generator = torch.Generator().manual_seed(size)
    rows = 200
    confidence = torch.randint(0, 9, (rows, size), generator=generator) / 8
    entropy = torch.randint(0, 5, (rows, size), generator=generator) / 8
    masked = torch.rand(rows, size, generator=generator) < torch.linspace(0, 1, rows)[:, None]
    for count, threshold, bound in ((1, 0.5, 0.0), (3, 0.875, 0.25), (size, 0.0, 1.0)):
        rule = StepRule(strategy, count, threshold, bound)
        reveal = rule(confidence, entropy if rule.needs_entropy else None, masked)
        for row in range(rows):
            expected = expected_positions(
                strategy,
                confidence[row].tolist(),
                entropy[row].tolist(),
                masked[row].tolist(),
                count,
                threshold,
                bound,
            )
            assert set(reveal[row].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leading_dimensions_are_independent(strategy):
    generator = torch.Generator().manual_seed(0)
    confidence, entropy = torch.rand(2, 3, 5, 8, generator=generator)[0], torch.rand(3, 5, 8, generator=generator)
    masked = torch.rand(3, 5, 8, generator=generator) < 0.6
    rule = StepRule(strategy, 2, 0.6, 0.5)
    together = rule(confidence, entropy, masked)
    for i in range(3):
        for j in range(5):
            alone = rule(confidence[i, j], entropy[i, j], masked[i, j])
            assert torch.equal(together[i, j], alone)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_reveals_at_least_one_and_masked_positions_only(strategy):
    """Whatever the thresholds, a step makes progress; where nothing is masked it reveals nothing."""
    generator = torch.Generator().manual_seed(1)
    confidence, entropy = torch.rand(2, 500, 8, generator=generator)
    masked = torch.rand(500, 8, generator=generator) < 0.3
    reveal = StepRule(strategy, 1, confidence_threshold=1.0, entropy_bound=0.0)(confidence, entropy, masked)
    assert torch.equal(reveal.any(-1), masked.any(-1))
    assert not (reveal & ~masked).any()
    assert reveal.sum(-1).max() == 1


def test_a_confidence_equal_to_the_dynamic_threshold_is_not_revealed():
    """A confidence that equals the threshold does not exceed it."""
    confidence = torch.tensor([0.5, 0.9, 0.9, 0.95])
    reveal = StepRule("low_confidence_dynamic", confidence_threshold=0.9)(confidence, None, torch.ones(4).bool())
    expected = confidence > torch.tensor(0.9)
    assert reveal.tolist() == expected.tolist()


def test_confidence_rank_ignores_other_positions_and_breaks_ties_to_the_left():
    confidence = torch.tensor([0.2, 0.9, 0.5, 0.5, 0.99])
    among = torch.tensor([True, True, True, True, False])
    assert confidence_rank(confidence, among)[:4].tolist() == [3, 0, 1, 2]


def sampled_reveals(order_strength, masked, count, draws, generator):
    """How often each set of positions is revealed when positions are drawn one by one, by strength, without return."""
    strength = torch.where(masked, order_strength, 0.0).expand(draws, -1)
    count = min(count, int(masked.sum()))
    drawn = torch.multinomial(strength, count, replacement=False, generator=generator)
    reveals = torch.zeros(draws, len(masked), dtype=torch.bool).scatter(1, drawn, True)
    return reveals, drawn


def test_alternatives_of_the_static_rule_are_as_likely_as_draws_by_odds():
    """Positions drawn in proportion to their odds come as often as their alternatives are likely."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.tensor([0.9, 0.2, 0.8, 0.6, 0.95])
    masked = torch.tensor([True, True, True, True, False])
    rule = StepRule("low_confidence_static", 1)
    reveal, probability = rule.alternatives(confidence, None, masked, 3)
    drawn, _ = sampled_reveals(confidence / (1 - confidence), masked, 1, 40_000, generator)
    assert reveal.long().argmax(-1).tolist() == [0, 2, 3]
    for positions, likely in zip(reveal, probability.tolist(), strict=True):
        assert drawn.eq(positions).all(-1).float().mean().item() == pytest.approx(likely, abs=0.01)


def test_alternatives_of_several_tokens_a_step_differ_in_the_last_one():
    """Given the first n - 1 positions, the last is drawn among the others in proportion to its odds."""
    confidence, masked = torch.tensor([0.5, 0.9, 0.7, 0.6]), torch.ones(4, dtype=torch.bool)
    reveal, probability = StepRule("low_confidence_static", 2).alternatives(confidence, None, masked, 3)
    assert [set(row.nonzero()[:, 0].tolist()) for row in reveal] == [{1, 2}, {1, 3}, {1, 0}]
    shares = torch.tensor([0.7 / 0.3, 0.6 / 0.4, 1.0])
    torch.testing.assert_close(probability, shares / shares.sum())


@pytest.mark.parametrize(
    ("rule", "most_likely"),
    [
        (StepRule("sequential", 2), [{1, 2}]),
        (StepRule("low_confidence_dynamic", confidence_threshold=0.5), [{1, 2}, {1, 2, 4}, {1}]),
        (StepRule("low_confidence_dynamic", confidence_threshold=0.999), [{1}, {2}, {4}]),
        (StepRule("entropy_bounded", entropy_bound=0.3), [{1, 2}, {1}]),
    ],
    ids=str,
)
def test_alternatives_of_the_other_rules_are_the_nearest_reveals(rule, most_likely):
    confidence = torch.tensor([0.99, 0.97, 0.8, 0.2, 0.3])
    entropy = torch.tensor([0.01, 0.02, 0.1, 2.0, 1.5])
    masked = torch.tensor([False, True, True, True, True])
    reveal, probability = rule.alternatives(confidence, entropy, masked, 3)
    found = [set(row.nonzero()[:, 0].tolist()) for row, likely in zip(reveal, probability, strict=True) if likely > 0]
    assert found[: len(most_likely)] == most_likely
    assert probability.sum() <= 1 + 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_without_masks_has_no_alternatives(strategy):
    confidence = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    _, probability = StepRule(strategy).alternatives(confidence, confidence, torch.zeros(3, 4, dtype=torch.bool), 3)
    assert probability.eq(0).all()

"""The choice of tokens: the keyed noise and its distribution, confidences, and what logits processors see."""

import pytest
import torch
from plain_loop import gumbel_noise, hash_key, row_key
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from modeling_mrp.keyed_noise import combine_keys, keyed_gumbel, row_keys
from modeling_mrp.sampling import Sampler

MASK = 3
EULER = 0.5772156649


def random_logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def read(sampler, logits, positions=None, steps=None, context=None):
    positions = torch.arange(logits.shape[-2]).expand(logits.shape[:-1]) if positions is None else positions
    steps = torch.zeros(logits.shape[:-2], dtype=torch.long) if steps is None else steps
    return sampler.read(logits, positions, steps, torch.zeros(len(logits), 2).long() if context is None else context)


# -- the noise


def test_keys_are_splitmix64():
    """First outputs of the published splitmix64 for the seeds 1234567 and 0."""
    assert combine_keys(torch.tensor(1234567)).item() == 6457827717110365317
    assert combine_keys(torch.tensor(0)).item() == 16294208416658607535 - 2**64


def test_keys_equal_those_of_an_independent_implementation():
    parts = [-3, 0, 5, 2**62, -(2**63)]
    for first in parts:
        for second in parts:
            expected = hash_key(first, second)
            assert combine_keys(torch.tensor(first), torch.tensor(second)).item() % 2**64 == expected
    prompts = torch.tensor([[5, 6, 7], [5, 6, 0], [5, 6, 7]])
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
    expected = [row_key([5, 6, 7]), row_key([5, 6]), row_key([5, 6, 7], copy=1)]
    assert [key % 2**64 for key in row_keys(prompts, valid).tolist()] == expected


def test_noise_equals_that_of_an_independent_implementation():
    """Pinned values too: another noise would change the sample that a seed stands for."""
    prompt, seed, positions, step = [5, 6, 7], 1234, range(8, 12), 2
    keys = row_keys(torch.tensor([prompt]), torch.ones(1, 3).bool())
    sampler = Sampler(MASK, [], [], keys, seed=seed)
    noise = keyed_gumbel(sampler.noise_keys(torch.tensor([list(positions)]), torch.tensor([step])), 11)[0]
    expected = gumbel_noise(seed, row_key(prompt), positions, step, 11)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)
    pinned = torch.tensor([0.4762344, 0.5451078, 1.8111274, -0.2355709])
    torch.testing.assert_close(noise[0, :4], pinned, rtol=1e-5, atol=1e-5)


def test_gumbel_moments_and_distribution():
    """Mean, variance and a chi-square over 20 equally likely bins of the Gumbel distribution."""
    noise = keyed_gumbel(combine_keys(torch.arange(400)), 1000).double().flatten()
    count = noise.numel()
    variance = torch.pi**2 / 6
    assert noise.mean().item() == pytest.approx(EULER, abs=4 * (variance / count) ** 0.5)
    # the fourth central moment of a Gumbel variable is 3 + 12/5 times its squared variance
    assert noise.var().item() == pytest.approx(variance, abs=4 * variance * (4.4 / count) ** 0.5)
    uniform = torch.exp(-torch.exp(-noise))  # its own distribution function
    counts = torch.histc(uniform, bins=20, min=0, max=1)
    assert ((counts - count / 20) ** 2 / (count / 20)).sum() < 43.8  # the 0.999 quantile for 19 degrees
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize("part", ["seed", "row", "position", "step", "token"])
def test_noise_of_neighbouring_keys_is_uncorrelated(part):
    """Correlation over 40,000 pairs whose keys differ by one in one part: standard error 1/200."""
    parts = ["seed", "row", "position", "step"]

    def noise(shift):
        keys = combine_keys(*(torch.arange(400)[:, None] * 2 + (shift if name == part else 0) for name in parts))
        return keyed_gumbel(keys[:, 0], 101)

    first, second = (noise(0)[:, :-1], noise(0)[:, 1:]) if part == "token" else (noise(0), noise(1))
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(correlation) < 0.02


def test_the_order_of_key_parts_matters():
    a, b = torch.tensor(5), torch.tensor(9)
    assert combine_keys(a, b) != combine_keys(b, a)


def test_row_keys_depend_only_on_the_prompt_and_its_copy_number():
    prompts = torch.tensor([[5, 6, 7], [5, 6, 0], [5, 6, 7], [6, 5, 7], [5, 6, 7]])
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]).bool()
    keys = row_keys(prompts, valid)
    assert len(set(keys.tolist())) == 5
    assert torch.equal(row_keys(prompts[:1], valid[:1]), keys[:1])
    assert torch.equal(row_keys(torch.tensor([[5, 6]]), torch.ones(1, 2).bool()), keys[1:2])  # padding is not in it
    assert torch.equal(row_keys(prompts[[0, 2]], valid[[0, 2]]), keys[[0, 2]])


# -- reading


def test_greedy_reads_match_a_plain_softmax():
    logits = random_logits(2, 5, 11)
    logits[..., MASK] = 100.0  # never chosen, and outside the softmax
    result = read(Sampler(MASK, [], [], with_entropy=True, with_scores=True), logits)
    for row in range(2):
        for at in range(5):
            others = {token: logits[row, at, token].double() for token in range(11) if token != MASK}
            total = sum(value.exp() for value in others.values())
            p = {token: (value.exp() / total).item() for token, value in others.items()}
            best = max(p, key=p.get)
            assert result.token[row, at] == best
            assert result.confidence[row, at].item() == pytest.approx(p[best], rel=1e-5)
            entropy = -sum(value * torch.tensor(value).log().item() for value in p.values())
            assert result.entropy[row, at].item() == pytest.approx(entropy, rel=1e-4)
    assert result.scores.shape == logits.shape and result.scores[..., MASK].eq(-torch.inf).all()
    plain = read(Sampler(MASK, [], []), logits)
    assert plain.entropy is None and plain.scores is None


def test_confidence_is_read_after_temperature_and_before_truncation():
    """top-k, top-p and min-p bound what may be chosen; the probability is that of the full softmax."""
    logits = random_logits(1, 200, 13)
    temperature, top_k = TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)
    keys = torch.tensor([17])
    result = read(Sampler(MASK, [temperature], [top_k, TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)], keys), logits)
    open_logits = logits.index_fill(-1, torch.tensor(MASK), -torch.inf)
    probabilities = (open_logits / 0.7).softmax(-1)
    expected = probabilities.gather(-1, result.token[..., None])[..., 0]
    torch.testing.assert_close(result.confidence, expected)
    allowed = open_logits.topk(2, dim=-1).indices
    assert (allowed == result.token[..., None]).any(-1).all()
    assert (result.token != open_logits.argmax(-1)).any()  # it did sample


def test_confidence_of_given_tokens():
    logits = random_logits(2, 3, 4, 9)
    tokens = torch.randint(4, 9, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    sampler = Sampler(MASK, [TemperatureLogitsWarper(2.0)], [TopKLogitsWarper(1)], torch.tensor([1, 2]))
    expected = (logits.index_fill(-1, torch.tensor(MASK), -torch.inf) / 2).softmax(-1).gather(-1, tokens[..., None])
    actual = sampler.confidence_of(logits.flatten(0, 2), tokens.flatten(), torch.zeros(24, 1).long())
    torch.testing.assert_close(actual, expected.flatten())


def test_bfloat16_logits_are_read_in_float32():
    logits = random_logits(1, 6, 300).bfloat16()
    result = read(Sampler(MASK, [], [], with_entropy=True), logits)
    exact = read(Sampler(MASK, [], [], with_entropy=True), logits.float())
    assert result.confidence.dtype == torch.float32
    assert torch.equal(result.confidence, exact.confidence) and torch.equal(result.entropy, exact.entropy)


def test_samples_follow_the_softmax():
    """Chi-square of 40,000 tokens over 10 possible ones at temperature 1.5."""
    logits = random_logits(1, 1, 11)
    rows = 40_000
    sampler = Sampler(MASK, [TemperatureLogitsWarper(1.5)], [], combine_keys(torch.arange(rows)), seed=4)
    result = read(sampler, logits.expand(rows, -1, -1).clone())
    p = (logits[0, 0].index_fill(0, torch.tensor(MASK), -torch.inf) / 1.5).softmax(-1)
    counts = torch.bincount(result.token.flatten(), minlength=11)
    possible = [token for token in range(11) if token != MASK]
    assert counts[MASK] == 0
    chi_square = sum((counts[t] - rows * p[t]) ** 2 / (rows * p[t]) for t in possible)
    assert chi_square < 27.9  # the 0.999 quantile for 9 degrees


def test_a_sample_does_not_depend_on_its_batch_or_on_other_states():
    logits = random_logits(3, 4, 6, 50)  # 3 rows, 4 states each, blocks of 6
    keys = torch.tensor([5, 6, 7])
    positions = torch.arange(12, 18).expand(3, 4, -1)
    steps = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5], [1, 2, 3, 4]])
    together = read(Sampler(MASK, [], [], keys, seed=9), logits, positions, steps)
    for row in range(3):
        sampler = Sampler(MASK, [], [], keys[row : row + 1], seed=9)
        for state in range(4):
            here = (slice(row, row + 1), state)
            alone = read(sampler, logits[here], positions[here], steps[here])
            assert torch.equal(alone.token[0], together.token[row, state])


@pytest.mark.parametrize("change", ["seed", "row", "position", "step"])
def test_a_sample_changes_with_every_part_of_its_key(change):
    logits = torch.zeros(1, 8, 500)
    seed, key, shift, step = (int(change == name) for name in ("seed", "row", "position", "step"))
    results = []
    for on in (0, 1):
        sampler = Sampler(MASK, [], [], torch.tensor([40 + on * key]), seed=9 + on * seed)
        positions = torch.arange(8)[None] + on * shift * 100
        results.append(read(sampler, logits, positions, torch.tensor([2 + on * step])).token)
    assert (results[0] == results[1]).float().mean() < 0.5


def test_the_mask_token_is_never_chosen_even_if_a_processor_allows_it():
    """A processor that lifted the ban left every step without a reveal, so that decoding never ended."""

    def wants_the_mask(_, scores):
        return torch.full_like(scores, -5.0).index_fill(-1, torch.tensor(MASK), 5.0)

    for shaping, truncation in (([wants_the_mask], []), ([], [wants_the_mask])):
        for keys in (None, torch.tensor([1])):
            result = read(Sampler(MASK, shaping, truncation, keys), random_logits(1, 20, 7))
            assert (result.token != MASK).all() and (result.confidence > 0).all()


def test_processors_see_each_rows_own_context():
    """One row of the context per logits row, states of one row next to each other."""
    seen = []

    def note(ids, scores):
        seen.append((ids.clone(), scores.shape))
        return scores

    context = torch.tensor([[5, 6], [7, 8]])
    read(Sampler(MASK, [note], []), random_logits(2, 3, 4, 9), context=context)
    ((ids, shape),) = seen
    assert shape == (24, 9)
    assert torch.equal(ids, context.repeat_interleave(12, dim=0))

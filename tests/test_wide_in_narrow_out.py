"""Decoding in which the backbone takes tokens back: `mrp_mode="remask"` with `remask_criterion="backbone"`."""

import pytest
import torch
from decoding_calls import PROMPT_LENGTHS, SAMPLING, batch, generate, random_prompts, rows_without_padding

from modeling_mrp.masks import CLEAN, TokenLayout, attention_mask, join
from modeling_mrp.sampling import Sampler

REVOKE = {"mrp_mode": "remask", "remask_criterion": "backbone"}
DYNAMIC = {"mrp_mode": None, "remasking_strategy": "low_confidence_dynamic"}
SIZE = 8


@pytest.fixture
def prompts():
    return random_prompts()


@pytest.fixture
def model(tiny_model):
    """A backbone without a head whose logits are neither flat nor certain."""
    return tiny_model(block_size=SIZE, initializer_range=0.25, num_mrp_layers=0)


def options(tau_in, tau_out):
    return REVOKE | {"confidence_threshold": tau_in, "remask_threshold": tau_out}


# -- the method as a plain loop


def hidden_with_shadow(model, row, start):
    """h [B, H] of the last block of one row, and of a shadow of masks after it, with a mask that is written out."""
    length = len(row)
    shadow = range(start, length)
    visible = torch.zeros(length + len(shadow), length + len(shadow), dtype=torch.bool)
    for q in range(length):
        visible[q, : q // SIZE * SIZE + SIZE] = True
        visible[q, length:] = False
    for index, position in enumerate(shadow):
        visible[length + index, :length] = True
        visible[length + index, position] = False
        visible[length + index, length + index] = True
    ids = torch.tensor([row + [model.config.mask_token_id] * len(shadow)])
    positions = torch.tensor([[*range(length), *shadow]])
    hidden = model.model(
        ids, attention_mask={"full_attention": visible[None, None]}, position_ids=positions, is_causal=False
    ).last_hidden_state[0]
    return hidden[start:length], hidden[length:]


def probabilities(model, hidden):
    return model.lm_head(hidden).index_fill(-1, torch.tensor(model.config.mask_token_id), -torch.inf).softmax(-1)


@torch.no_grad()
def plain_decode(model, prompt, new_tokens, tau_in, tau_out):
    """New tokens of one prompt, the forwards, and how many tokens were taken back."""
    mask, row, forwards, revoked = model.config.mask_token_id, list(prompt), 0, 0
    while len(row) < len(prompt) + new_tokens:
        start = len(row) // SIZE * SIZE
        row += [mask] * (start + SIZE - len(row))
        while mask in row[start : len(prompt) + new_tokens]:
            current, shadow = (probabilities(model, hidden) for hidden in hidden_with_shadow(model, row, start))
            forwards += 1
            sure = {i: current[i - start].max(-1) for i in range(start, start + SIZE) if row[i] == mask}
            best = max(sure, key=lambda i: sure[i].values.item())
            wide = [i for i in sure if sure[i].values > tau_in] or [best]
            again = {i: shadow[i - start, row[i]].item() for i in range(max(start, len(prompt)), start + SIZE)
                     if row[i] != mask}  # fmt: skip
            doubted = sorted((i for i in again if again[i] < tau_out), key=again.get)[: len(wide) - 1]
            for i in wide:
                row[i] = sure[i].indices.item()
            for i in doubted:
                row[i] = mask
            revoked += len(doubted)
    return row[len(prompt) : len(prompt) + new_tokens], forwards, revoked


@pytest.mark.parametrize(("tau_in", "tau_out"), [(0.2, 0.5), (0.1, 0.9), (0.3, 1.0)])
def test_decoding_equals_the_plain_loop_and_counts_every_forward(model, prompts, tau_in, tau_out):
    new, output = generate(model, batch(prompts), **options(tau_in, tau_out), eos_token_id=None, max_new_tokens=20)
    expected = [plain_decode(model, prompt, 20, tau_in, tau_out) for prompt in prompts]
    assert new.tolist() == [tokens for tokens, _, _ in expected]
    assert output.stats.backbone_forwards.tolist() == [forwards for _, forwards, _ in expected]
    assert sum(revoked for _, _, revoked in expected) > 0
    assert output.stats.head_forwards.tolist() == output.stats.tokens_by_head.tolist() == [0] * len(prompts)
    steps = output.reveal_steps[:, batch(prompts)["input_ids"].shape[1] :]
    assert (steps >= 0).all()  # whatever is returned was revealed in the end


def test_every_forward_is_in_the_statistics(model, monkeypatch):
    calls = []
    forward = model.backbone_hidden_states
    monkeypatch.setattr(model, "backbone_hidden_states", lambda *args: calls.append(args[0].shape) or forward(*args))
    _, output = generate(model, {"input_ids": torch.tensor([[5, 6, 7]])}, **options(0.2, 0.9), eos_token_id=None)
    assert output.stats.backbone_forwards.tolist() == [len(calls)]
    assert max(columns for _, columns in calls) <= 3 * SIZE  # a finished block, the state and its shadow


# -- laws


@pytest.mark.parametrize("tau", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampling"])
def test_a_remask_threshold_of_zero_gives_dynamic_decoding(model, prompts, tau, sampling):
    new, output = generate(model, batch(prompts), **options(tau, 0.0), **sampling)
    expected, plain = generate(model, batch(prompts), **DYNAMIC, confidence_threshold=tau, **sampling)
    assert new.tolist() == expected.tolist()
    assert output.stats.backbone_forwards.tolist() == plain.stats.backbone_forwards.tolist()


@pytest.mark.parametrize("tau_in", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tau_out", [0.0, 0.6, 1.0])
def test_a_block_takes_at_most_one_forward_per_position_whatever_the_thresholds(model, prompts, tau_in, tau_out):
    new, output = generate(model, batch(prompts), **options(tau_in, tau_out), eos_token_id=None, max_new_tokens=20)
    assert not new.eq(model.config.mask_token_id).any()
    for length, forwards in zip(PROMPT_LENGTHS, output.stats.backbone_forwards.tolist(), strict=True):
        assert forwards <= -(-(length + 20) // SIZE) * SIZE - length


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampling"])
def test_a_row_in_a_padded_batch_equals_the_row_alone(model, prompts, side, sampling):
    together, output = generate(model, batch(prompts, side), **options(0.2, 0.7), **sampling)
    for index, (prompt, row) in enumerate(zip(prompts, rows_without_padding(together), strict=True)):
        alone, own = generate(model, {"input_ids": torch.tensor([prompt])}, **options(0.2, 0.7), **sampling)
        assert rows_without_padding(alone) == [row]
        assert output.stats.backbone_forwards[index] == own.stats.backbone_forwards[0]


def test_a_head_makes_no_difference(tiny_model, prompts):
    model = tiny_model(block_size=SIZE, initializer_range=0.25)
    with_head, output = generate(model, batch(prompts), **options(0.2, 0.7))
    model.mrp_head, model.config.num_mrp_layers = None, 0
    without, _ = generate(model, batch(prompts), **options(0.2, 0.7))
    assert with_head.tolist() == without.tolist()
    assert not output.stats.head_forwards.any()


def test_the_scores_of_a_revoked_token_are_those_of_its_last_reveal(model, prompts):
    new, output = generate(model, batch(prompts), **options(0.2, 0.9), eos_token_id=None, output_scores=True)
    assert torch.stack(output.scores, dim=1).argmax(-1).tolist() == new.tolist()
    assert sum(plain_decode(model, prompt, 13, 0.2, 0.9)[2] for prompt in prompts) > 0


# -- the shadow


def test_a_shadow_sees_itself_its_context_and_its_states_other_positions():
    """Clean block 0, two states of block 1, the shadow of the second: token by token."""
    size, zero = 3, torch.zeros(1, 3, dtype=torch.long)
    streams = [(CLEAN, 0), (1, 1), (2, 1), (-2, 1)]  # (stream, block)
    tokens = join([TokenLayout(zero, zero + block, zero + stream, zero, torch.arange(3)[None] + block * size)
                   for stream, block in streams])  # fmt: skip
    visible = attention_mask(tokens, tokens, "sdpa", torch.float32)[0, 0]
    for q in range(4 * size):
        for k in range(4 * size):
            (group, at), (other, to) = divmod(q, size), divmod(k, size)
            own = group == other and (group != 3 or at == to)
            beside = group == 3 and other == 2 and at != to
            assert visible[q, k] == (own or beside or (group > 0 and other == 0)), (q, k)


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_a_shadow_answers_as_if_its_token_alone_were_masked(tiny_model, layers):
    """Exactly in one layer; deeper the others have read the token. Where the state is masked they are the same."""
    model = tiny_model(block_size=SIZE, num_hidden_layers=layers, num_mrp_layers=0)
    mask = model.config.mask_token_id
    row = [5, 6, 7, 8, 9, 10, 11, 12, 13, mask, 14, 15, mask, mask, 16, 17]
    current, shadow = hidden_with_shadow(model, row, SIZE)
    for index in range(SIZE):
        hidden = list(row)
        hidden[SIZE + index] = mask
        expected = model(torch.tensor([hidden])).last_hidden_state[0, SIZE + index]
        if layers == 1 or row[SIZE + index] == mask:
            torch.testing.assert_close(shadow[index], expected, atol=1e-4, rtol=1e-4)
        if row[SIZE + index] == mask:
            torch.testing.assert_close(shadow[index], current[index], atol=1e-4, rtol=1e-4)


def test_the_confidence_of_a_masked_position_is_zero(model):
    """The shadow also stands where nothing is revealed: that position has no token to doubt."""
    sampler = Sampler(model.config.mask_token_id, [], [])
    ids = torch.tensor([model.config.mask_token_id, 5])
    assert sampler.confidence_of(torch.randn(2, 61), ids, None)[0] == 0

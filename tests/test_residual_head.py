"""The residual head in `forward`: chains of head steps, a fresh head, what trains, and heads of other kinds."""

import gc
import weakref

import pytest
import torch
from model_states import SAME, noisy_states

from modeling_mrp import MRPConfig, MRPForDiffusionLM
from modeling_mrp.context_cache import ContextRecorder
from modeling_mrp.masks import CLEAN, join, stream_layout

# -- chains of head steps


def test_a_longer_unroll_begins_like_a_shorter_one(tiny_model):
    """acc_k is what the head makes of acc_{k-1}: each step of a K = 3 unroll against a chain of single steps."""
    model = tiny_model(num_mrp_layers=2)
    clean, noisy, revealed = noisy_states(model, steps=3)
    with torch.no_grad():
        long = model(noisy, revealed_ids=revealed, clean_ids=clean).corrected_hidden_states
        short = model(noisy, revealed_ids=revealed[:, :1], clean_ids=clean).corrected_hidden_states
        torch.testing.assert_close(long[:, :1], short, **SAME)
        positions = torch.arange(13).expand(2, -1)
        tokens = stream_layout(torch.zeros_like(noisy), positions, model.config.block_size, stream=1, context=1)
        mask = model.attention_mask(tokens)
        first_block = slice(0, 4)  # no context: the stream does not matter there
        for k in (1, 2):
            step = model.corrected_hidden_states(revealed[:, k], long[:, k - 1], positions, mask)
            torch.testing.assert_close(long[:, k, first_block], step[:, first_block], **SAME)
    assert (long[:, 1] - long[:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_head_reads_the_clean_stream_once_and_learns_as_if_at_every_step(tiny_model, checkpointing):
    model = tiny_model(num_mrp_layers=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    clean, noisy, revealed = noisy_states(model, steps=3)
    read = []
    hook = model.mrp_head.eh_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    once = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    hook.remove()
    assert read == [2 * 13, 13, 13]

    positions = torch.arange(13).expand(2, -1)
    streams = [
        stream_layout(torch.zeros_like(noisy), positions, model.config.block_size, stream, CLEAN)
        for stream in (1, CLEAN)
    ]
    mask = model.attention_mask(join(streams))
    clean_hidden = model(clean).last_hidden_state  # a plain row is its own context
    hidden, again = once.last_hidden_state, []
    for state in revealed.unbind(1):
        both = torch.cat([hidden, clean_hidden], dim=1)
        ids = torch.cat([state, clean], dim=1)
        hidden = model.corrected_hidden_states(ids, both, positions.repeat(1, 2), mask)[:, :13]
        again.append(hidden)
    again = torch.stack(again, dim=1)
    torch.testing.assert_close(once.corrected_hidden_states, again, **SAME)

    parameters = dict(model.mrp_head.named_parameters())
    gradients = [
        torch.autograd.grad((accumulated * torch.linspace(-1, 1, 13)[:, None]).sum(), list(parameters.values()))
        for accumulated in (once.corrected_hidden_states, again)
    ]
    for name, ours, theirs in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item(), msg=name)


def test_a_forward_without_a_backward_leaves_nothing_behind(tiny_model, monkeypatch):
    """Gradient checkpointing keeps what it needs for a replay that never comes, after an error say."""
    model = tiny_model(num_mrp_layers=2).train()
    model.gradient_checkpointing_enable()
    clean, noisy, revealed = noisy_states(model, steps=2)
    recorded, update = [], ContextRecorder.update

    def watch(self, keys, values, *args, **kwargs):
        recorded.extend(weakref.ref(tensor) for tensor in (keys, values) if tensor.requires_grad)
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(ContextRecorder, "update", watch)
    model(noisy, revealed_ids=revealed, clean_ids=clean)
    gc.collect()
    assert len(recorded) == 4 and not any(reference() is not None for reference in recorded)


# -- a fresh head, and what trains


@pytest.mark.parametrize("dual", [False, True])
def test_a_head_of_zeros_leaves_the_logits_as_they_are(tiny_model, dual):
    model = tiny_model()
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    clean, noisy, revealed = noisy_states(model)
    output = model(noisy, revealed_ids=revealed, clean_ids=clean if dual else None)
    assert torch.equal(output.corrected_logits, output.logits[:, None].expand_as(output.corrected_logits))


def test_a_fresh_head_starts_at_no_correction_and_can_learn():
    torch.manual_seed(0)
    model = MRPForDiffusionLM(MRPConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, mask_token_id=3, num_mrp_layers=2,
    ))  # fmt: skip
    _, noisy, revealed = noisy_states(model, steps=1)
    output = model(noisy, revealed_ids=revealed)
    assert torch.equal(output.corrected_logits[:, 0], output.logits)
    projection = model.mrp_head.eh_proj.weight
    assert torch.equal(projection, torch.cat([torch.eye(16), torch.eye(16)], dim=1))  # sees both halves
    (output.corrected_logits * torch.randn_like(output.corrected_logits)).sum().backward()
    assert model.mrp_head.norm.weight.grad.abs().max() > 0
    assert [name for name, p in model.named_parameters() if p.grad is not None and not name.startswith("mrp_")] == []


def test_only_the_head_trains_even_after_train(tiny_model):
    model = tiny_model().train()
    assert model.training and model.mrp_head.training
    assert not any(module.training for part in (model.model, model.lm_head) for module in part.modules())
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"mrp_head"}
    clean, noisy, revealed = noisy_states(model)
    output = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    assert not output.last_hidden_state.requires_grad and not output.revealed_hidden_states.requires_grad
    assert output.corrected_hidden_states.requires_grad

    model.freeze_backbone(False)
    assert all(module.training for module in model.modules()) and all(p.requires_grad for p in model.parameters())
    assert model(noisy).last_hidden_state.requires_grad
    model.freeze_backbone()
    assert not model.model.training and not model.lm_head.weight.requires_grad


def test_a_model_without_a_head_is_the_backbone(tiny_model):
    with_head, without = tiny_model(), tiny_model(num_mrp_layers=0)
    missing = without.load_state_dict(with_head.state_dict(), strict=False)
    assert missing.missing_keys == [] and all(name.startswith("mrp_head.") for name in missing.unexpected_keys)
    _, noisy, revealed = noisy_states(with_head)
    assert torch.equal(without(noisy).logits, with_head(noisy).logits)
    with pytest.raises(ValueError, match="revealed_ids need a residual head"):
        without(noisy, revealed_ids=revealed)


def test_a_float32_head_on_a_bfloat16_backbone_trains(tiny_model):
    model = tiny_model().bfloat16()
    model.mrp_head.float()
    clean, noisy, revealed = noisy_states(model)
    output = model(noisy, revealed_ids=revealed, clean_ids=clean, teacher=True)
    assert output.corrected_hidden_states.dtype == torch.float32
    output.corrected_hidden_states.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.mrp_head.parameters() if p.grad is not None)

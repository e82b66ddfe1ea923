"""Muon and AdamW combined into one optimizer."""

import copy

import pytest
import torch
from torch import nn

from mrp_trainer.muon import MuonWithAdamW


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))


def train(module, optimizer, steps, schedule=None):
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def test_steps_equal_those_of_two_separate_optimizers():
    ours, theirs = small(), small()
    train(ours, MuonWithAdamW(ours, 0.02, 1e-3), 4)
    muon = torch.optim.Muon([theirs[0].weight], lr=0.02, weight_decay=0.0)
    adam = torch.optim.AdamW([theirs[0].bias, *theirs[1].parameters()], lr=1e-3, weight_decay=0.0)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        theirs(x).square().sum().backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_schedule_scales_both_rates():
    module = small()
    optimizer = MuonWithAdamW(module, 0.02, 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(module, optimizer, 2, schedule)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == pytest.approx([0.005, 0.00025])


def test_resuming_from_its_state_is_exact():
    whole, first = small(), small()
    train(whole, MuonWithAdamW(whole, 0.02, 1e-3), 2)
    whole_optimizer = MuonWithAdamW(first, 0.02, 1e-3)
    train(first, whole_optimizer, 2)
    second = small(seed=9)
    second.load_state_dict(first.state_dict())
    resumed = MuonWithAdamW(second, 0.5, 0.5)
    resumed.load_state_dict(copy.deepcopy(whole_optimizer.state_dict()))
    train(first, whole_optimizer, 3)
    train(second, resumed, 3)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no matrix"):
        MuonWithAdamW(small().requires_grad_(False), 0.02, 1e-3)

"""Objectives other than the KL, against their definitions and float64 autograd."""

import pytest
import torch

from mrp_trainer.losses.acceptance import chosen_position_loss, chosen_positions, linear_total_variation
from mrp_trainer.losses.linear_kl import CHUNK_ELEMENTS, linear_kl_and_choice

V, H, N, MASK = 23, 8, 12, 5


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(N, H, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher, torch.randn(V, H, generator=generator, dtype=torch.float64)


def gradient_of(value, student, row_weight):
    (gradient,) = torch.autograd.grad((value * row_weight).sum(), student)
    return gradient


@pytest.mark.parametrize("chunk", [1, 5 * V, 2**24])
def test_total_variation_equals_plain_autograd(tensors, monkeypatch, chunk):
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", chunk)
    student, teacher, weight = tensors
    row_weight = torch.linspace(-1, 2, N)
    plain = (torch.softmax(student @ weight.T, -1) - torch.softmax(teacher @ weight.T, -1)).abs().sum(-1) / 2
    expected = gradient_of(plain, student, row_weight)
    ours = linear_total_variation(student, teacher, weight)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient_of(ours, student, row_weight), expected, rtol=1e-4, atol=1e-6)


def test_total_variation_of_equal_rows_and_its_gradient_are_zero(tensors):
    student, _, weight = tensors
    value = linear_total_variation(student, student.detach(), weight)
    assert not value.any() and not gradient_of(value, student, 1.0).any()


def test_no_rows_give_no_values():
    empty, block = torch.zeros(0, H, requires_grad=True), torch.zeros(0, dtype=torch.long)
    weight = torch.zeros(V, H)
    assert linear_total_variation(empty, empty, weight).shape == (0,)
    _, choice = linear_kl_and_choice(empty, empty, weight, MASK)
    assert chosen_position_loss(choice.log_prob, block, chosen_positions(block, choice.score)).sum() == 0


def test_the_chosen_position_is_the_surest_of_each_block():
    block = torch.tensor([7, 7, 7, 2, 2, 2, 2, 9, 9])
    score = torch.log(torch.tensor([0.1, 0.5, 0.4, 0.9, 0.8, 0.7, 0.9, 0.2, 0.3]))
    assert chosen_positions(block, score).nonzero()[:, 0].tolist() == [1, 3, 8]  # the first of equals


def test_chosen_position_loss_is_cross_entropy_over_log_odds():
    q = torch.tensor([0.9, 0.5, 0.2, 0.7, 0.99], dtype=torch.float64)
    block, chosen = torch.tensor([3, 3, 3, 8, 8]), torch.tensor([False, True, False, False, True])
    odds = q / (1 - q)
    first = -(odds[1] / odds[:3].sum()).log() - q[1].log()
    second = -(odds[4] / odds[3:].sum()).log() - q[4].log()
    expected = torch.stack([0 * first, 3 * first, 0 * first, 0 * first, 2 * second])
    torch.testing.assert_close(chosen_position_loss(q.log(), block, chosen), expected)


def test_certain_positions_keep_a_finite_loss_and_gradient():
    log_prob = torch.tensor([0.0, -1e-9, -200.0], requires_grad=True)
    loss = chosen_position_loss(log_prob, torch.zeros(3, dtype=torch.long), torch.tensor([False, False, True]))
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert loss.isfinite().all() and gradient.isfinite().all()

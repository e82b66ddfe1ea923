"""The teacher's choice of token, computed from the same logits as the loss."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from linear_kl_cases import IMPLEMENTATIONS, MASK, Implementation, random_hidden, relative_error

from mrp_trainer.losses.linear_kl import Choice, linear_kl_and_choice


@pytest.fixture(params=IMPLEMENTATIONS)
def ours(request):
    return Implementation(*request.param)


def exact_choice(h_student, h_teacher, weight, mask_token_id):
    """Return token, score and log_prob by their definitions in float64."""
    student, teacher = (
        (hidden.double() @ weight.double().t()).index_fill(1, torch.tensor([mask_token_id]), -torch.inf)
        for hidden in (h_student, h_teacher)
    )
    score, token = F.log_softmax(teacher, dim=-1).max(-1)
    return token, score, F.log_softmax(student, dim=-1).gather(1, token[:, None])[:, 0]


def choice_of(ours, h_student, h_teacher, weight, **options):
    """Return KL, choice, and the gradients of the sums of KL and log_prob, on the CPU."""
    h_student, h_teacher, weight = (tensor.detach().to(ours.device) for tensor in (h_student, h_teacher, weight))
    h_student.requires_grad_()
    kl, choice = linear_kl_and_choice(h_student, h_teacher, weight, MASK, backend=ours.backend, **options)
    kl_gradient, log_prob_gradient = (
        torch.autograd.grad(value.sum(), h_student, retain_graph=True)[0] for value in (kl, choice.log_prob)
    )
    return (
        kl.detach().cpu(),
        Choice(*(field.detach().cpu() for field in choice)),
        kl_gradient.cpu(),
        log_prob_gradient.cpu(),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [97, 5000])
def test_choice_and_kl_equal_their_definitions(ours, vocab_size, temperature):
    h_student, h_teacher, weight = random_hidden(9, vocab_size, change=0.5)
    weight[MASK] = 4 * h_teacher[0]  # what the first row would choose
    kl, choice, kl_gradient, log_prob_gradient = choice_of(ours, h_student, h_teacher, weight, temperature=temperature)

    exact_student = h_student.double().requires_grad_()
    token, score, log_prob = exact_choice(exact_student, h_teacher, weight, MASK)
    assert torch.equal(choice.token, token) and (h_teacher[0] @ weight.t()).argmax() == MASK
    torch.testing.assert_close(choice.score.double(), score, rtol=5e-5, atol=1e-6)
    torch.testing.assert_close(choice.log_prob.double(), log_prob.detach(), rtol=5e-5, atol=1e-6)
    (exact_gradient,) = torch.autograd.grad(log_prob.sum(), exact_student)
    assert relative_error(log_prob_gradient, exact_gradient) < 3e-4

    kl_alone, gradient_alone = ours.kl_and_gradient(h_student, h_teacher, weight, temperature=temperature)
    torch.testing.assert_close(kl, kl_alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(kl_gradient, gradient_alone, rtol=1e-5, atol=1e-7)


def test_choice_in_bf16_is_accurate_to_the_rounding_of_its_logits(ours):
    inputs = random_hidden(32, 4000, hidden=64, change=0.1, dtype=torch.bfloat16)
    _, choice, _, log_prob_gradient = choice_of(ours, *inputs)
    exact_student = inputs[0].double().requires_grad_()
    token, best, log_prob = exact_choice(exact_student, *inputs[1:], MASK)
    rounding = 2**-8 * 16  # half a unit in the last place of a logit of 16
    of_its_token = F.log_softmax((inputs[1].double() @ inputs[2].double().t()), dim=-1).gather(
        1, choice.token[:, None]
    )
    assert (best - of_its_token[:, 0]).max() < 2 * rounding  # a token as good as the best
    same = choice.token == token
    torch.testing.assert_close(choice.score.double(), best, rtol=0, atol=2 * rounding)
    torch.testing.assert_close(choice.log_prob.double()[same], log_prob.detach()[same], rtol=0, atol=4 * rounding)
    (exact_gradient,) = torch.autograd.grad(log_prob[same].sum(), exact_student)
    assert relative_error(log_prob_gradient[same], exact_gradient[same]) < 5e-2


def test_the_odds_of_a_nearly_certain_token_are_accurate(ours):
    """The token's logit is 19 above the others; in float32 its probability has no accurate distance from 1."""
    h_student, h_teacher, weight = random_hidden(24, 500, change=0.02, logit_scale=1.0)
    weight[3] = 0
    weight[3, 0], h_teacher[:, 0], h_student[:, 0] = 3.0, 6.2, 6.1
    weight[:3, 0] = weight[4:, 0] = 0
    _, choice, _, log_prob_gradient = choice_of(ours, h_student, h_teacher, weight)
    exact_student = h_student.double().requires_grad_()
    token, score, log_prob = exact_choice(exact_student, h_teacher, weight, MASK)
    assert torch.equal(choice.token, token)
    (exact_gradient,) = torch.autograd.grad(log_prob.sum(), exact_student)
    assert relative_error(log_prob_gradient, exact_gradient) < 1e-4
    log_prob = log_prob.detach()
    doubt = -torch.expm1(log_prob)
    assert (doubt < 2e-5).all() and (doubt > 2e-6).all()
    for ours_, exact in ((choice.log_prob, log_prob), (choice.score, score)):
        assert (-torch.expm1(ours_.double()) / -torch.expm1(exact) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("chunk_rows", [1, 5, 24])
def test_chunks_and_tiles_do_not_change_the_choice(ours, monkeypatch, chunk_rows):
    inputs = random_hidden(12, 300, change=0.5)
    whole = choice_of(ours, *inputs)
    monkeypatch.setitem(import_module("mrp_trainer.losses.kl_rows").TILE_ELEMENTS, "cpu", 700)
    kl, choice, *gradients = choice_of(ours, *inputs, chunk_rows=chunk_rows)
    assert torch.equal(choice.token, whole[1].token)
    for value, expected in zip((kl, *choice[1:], *gradients), (whole[0], *whole[1][1:], *whole[2:]), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_nan_in_a_row_does_not_change_the_choice_of_others(ours):
    h_student, h_teacher, weight = random_hidden(4, 300)
    clean = choice_of(ours, h_student, h_teacher, weight)
    h_teacher[2, 0] = torch.nan
    _, choice, _, log_prob_gradient = choice_of(ours, h_student, h_teacher, weight)
    others = [0, 1, 3]
    assert choice.score[2].isnan() and choice.log_prob[2].isnan() and 0 <= choice.token[2] < 300
    assert all(torch.equal(field[others], before[others]) for field, before in zip(choice, clean[1], strict=True))
    assert torch.equal(log_prob_gradient[others], clean[3][others])


def test_gradcheck_of_both_values_in_float64():
    h_student, h_teacher, weight = random_hidden(5, 23, hidden=6, change=0.7, dtype=torch.float64)

    def values(h):
        kl, choice = linear_kl_and_choice(h, h_teacher, weight, MASK, chunk_rows=2)
        return kl, choice.log_prob

    assert torch.autograd.gradcheck(values, h_student.requires_grad_(), atol=1e-8)


def test_mask_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"mask_token_id must lie in \[0, 20\), the rows of weight; got 20"):
        linear_kl_and_choice(*random_hidden(2, 20), 20)

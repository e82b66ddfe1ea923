"""The residual loss against float64 formulas, golden values and properties, with every backend that can run here."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from linear_kl_cases import IMPLEMENTATIONS, Implementation, exact_kl_and_gradient, random_hidden, relative_error
from safetensors.torch import load_file

from mrp_trainer import linear_kl

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(params=IMPLEMENTATIONS)
def ours(request):
    return Implementation(*request.param)


def test_gradcheck_in_float64():
    h_student, h_teacher, weight = random_hidden(5, 23, hidden=6, change=0.7, dtype=torch.float64)
    for temperature in (0.5, 1.0, 2.0):
        assert torch.autograd.gradcheck(
            lambda h, t=temperature: linear_kl(h, h_teacher, weight, temperature=t, chunk_rows=2),
            h_student.requires_grad_(),
            atol=1e-8,
        )


@pytest.mark.parametrize("name", ["block4", "block8-tied"])
def test_loss_and_gradient_equal_the_golden_values(ours, name):
    expected = {key: value for key, value in load_file(GOLDEN / name / "expected.safetensors").items()}
    tensors = load_file(GOLDEN / name / "model.safetensors")
    weight = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float()
    masked, revealed = expected["train.masked"].bool(), expected["train.reveal"].bool()
    supervised = masked & ~revealed & (expected["train.labels"] != -100)  # [2, L]
    row_weight = (1 / expected["train.p_mask"])[:, None].expand_as(supervised)[supervised]
    h_student = (expected["train.hidden_t"] + expected["train.residual_hidden"])[supervised]

    kl, gradient = ours.kl_and_gradient(h_student, expected["train.hidden_next"][supervised], weight)
    uncorrected = ours.kl(expected["train.hidden_t"][supervised], expected["train.hidden_next"][supervised], weight)
    loss = (kl * row_weight).sum() / expected["train.normaliser"]
    full_gradient = torch.zeros_like(expected["train.grad_residual_hidden"])
    full_gradient[supervised] = gradient * row_weight[:, None] / expected["train.normaliser"]

    assert relative_error(kl, expected["train.kl_per_token"][supervised].double()) < 1e-5
    assert relative_error(uncorrected, expected["train.kl_uncorrected_per_token"][supervised].double()) < 1e-5
    assert loss.item() == pytest.approx(expected["train.loss"].item(), rel=1e-5)
    assert relative_error(full_gradient, expected["train.grad_residual_hidden"].double()) < 1e-5


@pytest.mark.parametrize(
    ("vocab_size", "change"), [(97, 0.03), (97, 1.0), (1000, 0.03), (1000, 1.0), (151669, 0.1), (151936, 0.1)]
)
def test_float32_is_close_to_float64(ours, vocab_size, change):
    inputs = random_hidden(3, vocab_size, change=change)
    kl, gradient = ours.kl_and_gradient(*inputs)
    exact_kl, exact_gradient = exact_kl_and_gradient(*inputs)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), exact_kl, rtol=5e-5, atol=0)
    assert relative_error(gradient, exact_gradient) < 3e-4


def test_loss_is_exact_far_below_rounding_of_the_logits(ours):
    """At a KL of 1e-7, exp(r) - 1 - r is a difference of numbers ten thousand times as large as itself."""
    inputs = random_hidden(8, 1000, change=2e-4)
    exact_kl, _ = exact_kl_and_gradient(*inputs)
    assert 5e-8 < exact_kl.mean() < 5e-7
    torch.testing.assert_close(ours.kl(*inputs).double(), exact_kl, rtol=2e-5, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_logits_and_loss(ours, temperature):
    inputs = random_hidden(4, 1000, change=0.3)
    kl, gradient = ours.kl_and_gradient(*inputs, temperature=temperature)
    exact_kl, exact_gradient = exact_kl_and_gradient(*inputs, temperature)
    torch.testing.assert_close(kl.double(), exact_kl, rtol=5e-5, atol=0)
    assert relative_error(gradient, exact_gradient) < 3e-4


def test_bf16_gradient_is_accurate_where_that_of_two_rounded_logit_tensors_is_not(ours):
    """The comparison is generous: it rounds only the finished logits and does all else in float64."""
    h_student, h_teacher, weight = random_hidden(64, 4000, hidden=64, change=0.02, logit_scale=5.0)
    h_teacher, weight = h_teacher.bfloat16(), weight.bfloat16()
    exact_kl, exact_gradient = exact_kl_and_gradient(h_student, h_teacher, weight)
    assert 2e-3 < exact_kl.mean() < 8e-3
    _, gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    assert relative_error(gradient, exact_gradient) < 5e-2

    rounded = [(h.double() @ weight.double().t()).bfloat16() for h in (h_student, h_teacher)]
    student, teacher = (F.softmax(logits.double(), dim=-1) for logits in rounded)
    control = (student - teacher) @ weight.double()
    assert relative_error(control, exact_gradient) > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_of_equal_inputs_are_exactly_zero(ours, dtype):
    _, h_teacher, weight = random_hidden(5, 5000, dtype=dtype)
    kl, gradient = ours.kl_and_gradient(h_teacher, h_teacher, weight)
    assert torch.equal(kl, torch.zeros(5))
    assert torch.equal(gradient, torch.zeros_like(h_teacher))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit_scale", [3.0, 1e4])
def test_loss_is_finite_and_never_negative(ours, dtype, logit_scale):
    for change in (1e-7, 1e-5, 1e-3, 1e-2, 0.1, 1.0, 10.0):
        h_student, h_teacher, weight = random_hidden(16, 500, change=change, logit_scale=logit_scale)
        kl = ours.kl(h_student, h_teacher.to(dtype), weight.to(dtype))
        assert (kl >= 0).all(), f"change {change}: {kl.min()}"
        assert kl.isfinite().all()


def test_logits_of_100000_neither_overflow_nor_lose_the_loss(ours):
    """Such logits make the teacher one-hot and share large parts between teacher and student."""
    inputs = random_hidden(16, 1000, change=0.5, logit_scale=3e4)
    kl, gradient = ours.kl_and_gradient(*inputs)
    exact_kl, exact_gradient = exact_kl_and_gradient(*inputs)
    assert gradient.isfinite().all()
    # float32 logits of 1e5 are good to 1e-2, so is the loss
    torch.testing.assert_close(kl.double(), exact_kl, rtol=1e-4, atol=2e-2)
    assert relative_error(gradient, exact_gradient) < 2e-2


@pytest.mark.parametrize("rows", [1, 12])
def test_loss_and_gradient_do_not_depend_on_the_chunk_size(ours, rows):
    inputs = random_hidden(rows, 300, change=0.5)
    whole_kl, whole_gradient = ours.kl_and_gradient(*inputs)
    for chunk_rows in (1, 7, max(1, rows - 1), rows, 2 * rows):
        kl, gradient = ours.kl_and_gradient(*inputs, chunk_rows=chunk_rows)
        torch.testing.assert_close(kl, whole_kl, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)


def test_loss_and_gradient_do_not_depend_on_the_tile_size(monkeypatch):
    """A tile of 2 rows, chunks of 5: every chunk ends in a shorter tile."""
    inputs = random_hidden(12, 300, change=0.5)
    implementation = Implementation("torch", "cpu")
    whole_kl, whole_gradient = implementation.kl_and_gradient(*inputs)
    monkeypatch.setitem(import_module("mrp_trainer.losses.kl_rows").TILE_ELEMENTS, "cpu", 700)
    kl, gradient = implementation.kl_and_gradient(*inputs, chunk_rows=5)
    torch.testing.assert_close(kl, whole_kl, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)


def test_no_rows_give_an_empty_loss_and_gradient(ours):
    _, _, weight = random_hidden(1, 50)
    kl, gradient = ours.kl_and_gradient(torch.empty(0, 32), torch.empty(0, 32), weight)
    assert kl.shape == (0,) and gradient.shape == (0, 32)


def test_suppressed_ids_are_left_out_of_both_distributions(ours):
    h_student, h_teacher, weight = random_hidden(4, 60, change=0.5)
    suppressed = [0, 17, 59]
    kept = [token for token in range(60) if token not in suppressed]
    kl, gradient = ours.kl_and_gradient(h_student, h_teacher, weight, suppress_ids=suppressed)
    exact_kl, exact_gradient = exact_kl_and_gradient(h_student, h_teacher, weight[kept])
    torch.testing.assert_close(kl.double(), exact_kl, rtol=5e-5, atol=0)
    assert relative_error(gradient, exact_gradient) < 3e-4
    assert torch.equal(kl, ours.kl(h_student, h_teacher, weight, suppress_ids=torch.tensor(suppressed)))


def test_padded_vocabulary_rows_are_not_read(ours):
    h_student, h_teacher, weight = random_hidden(4, 50, change=0.5)
    padded = torch.cat([weight, torch.full((14, 32), torch.nan)])
    kl, gradient = ours.kl_and_gradient(h_student, h_teacher, padded, vocab_size=50, suppress_ids=[3, 51])
    expected_kl, expected_gradient = ours.kl_and_gradient(h_student, h_teacher, weight, suppress_ids=[3])
    assert torch.equal(kl, expected_kl)
    assert torch.equal(gradient, expected_gradient)


def test_loss_and_gradient_are_zero_if_every_token_is_suppressed(ours):
    kl, gradient = ours.kl_and_gradient(*random_hidden(3, 40), suppress_ids=range(40))
    assert torch.equal(kl, torch.zeros(3))
    assert torch.equal(gradient, torch.zeros(3, 32))


def test_loss_is_infinite_if_the_student_alone_rules_a_token_out(ours):
    """Token 0 has a weight so large that the student's logit overflows to -inf where its h differs."""
    h_student, h_teacher, weight = random_hidden(3, 40)
    h_teacher[:, 0] = h_student[:, 0] = 0
    weight[0] = 0
    weight[0, 0] = 3e38
    h_student[1, 0] = -10
    kl = ours.kl(h_student, h_teacher, weight)
    assert kl[1] == torch.inf
    assert kl[[0, 2]].isfinite().all()


def test_nan_stays_in_its_row(ours):
    h_student, h_teacher, weight = random_hidden(6, 300)
    clean_kl, clean_gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    h_student[1, 3] = torch.nan
    h_teacher[4, 0] = torch.nan
    kl, gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    others = [0, 2, 3, 5]
    assert kl[[1, 4]].isnan().all() and gradient[[1, 4]].isnan().all()
    assert torch.equal(kl[others], clean_kl[others])
    assert torch.equal(gradient[others], clean_gradient[others])


def test_non_contiguous_inputs_give_the_same_loss(ours):
    h_student, h_teacher, weight = random_hidden(6, 80, change=0.5)
    expected_kl, expected_gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    wide = torch.empty(6, 64)
    wide[:, ::2] = h_student
    strided = wide[:, ::2], h_teacher.t().contiguous().t(), weight.t().contiguous().t()
    assert not any(tensor.is_contiguous() for tensor in strided)
    kl, gradient = ours.kl_and_gradient(*strided)
    torch.testing.assert_close(kl, expected_kl)
    torch.testing.assert_close(gradient, expected_gradient)


def test_only_the_student_gets_a_gradient():
    h_student, h_teacher, weight = (tensor.requires_grad_() for tensor in random_hidden(3, 40))
    linear_kl(h_student, h_teacher, weight).sum().backward()
    assert h_student.grad.abs().sum() > 0
    assert weight.grad is None
    assert h_teacher.grad is None


def test_row_weights_and_normaliser_scale_the_gradient(ours):
    h_student, h_teacher, weight = random_hidden(5, 40, change=0.5)
    row_weight = torch.tensor([0.0, 1.0, 2.5, 10.0, 1e-3])
    leaf = h_student.detach().to(ours.device).requires_grad_()
    kl = linear_kl(leaf, h_teacher.to(ours.device), weight.to(ours.device), backend=ours.backend)
    ((kl * row_weight.to(ours.device)).sum() / 7).backward()
    _, row_gradient = exact_kl_and_gradient(h_student, h_teacher, weight)
    torch.testing.assert_close(leaf.grad.cpu().double(), row_gradient * row_weight[:, None] / 7, rtol=1e-3, atol=1e-6)


def test_float32_student_with_bf16_weight_gets_a_float32_gradient():
    h_student, h_teacher, weight = random_hidden(3, 40)
    h_student.requires_grad_()
    linear_kl(h_student, h_teacher.bfloat16(), weight.bfloat16()).sum().backward()
    assert h_student.grad.dtype == torch.float32


def test_autocast_does_not_change_the_loss():
    inputs = random_hidden(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_kl(*inputs)
    assert torch.equal(inside, linear_kl(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h_student": torch.zeros(2, 3, 4)}, "h_student must be a floating-point matrix"),
        ({"h_teacher": torch.zeros(2, 8, dtype=torch.long)}, "h_teacher must be a floating-point matrix"),
        ({"h_teacher": torch.zeros(3, 8)}, "must have the same shape"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \[V, 8\]"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"vocab_size": 0}, "vocab_size must be from 1 to 5"),
        ({"vocab_size": 6}, "vocab_size must be from 1 to 5"),
        ({"suppress_ids": [5]}, r"suppress_ids must lie in \[0, 5\)"),
        ({"suppress_ids": [-1]}, "suppress_ids"),
        ({"suppress_ids": [0.5]}, "suppress_ids must be a flat list of token ids"),
        ({"chunk_rows": 0}, "chunk_rows must be"),
        ({"chunk_rows": "big"}, "chunk_rows must be"),
        ({"backend": "cuda"}, "backend must be one of auto, torch, triton"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    arguments = {"h_student": torch.zeros(2, 8), "h_teacher": torch.zeros(2, 8), "weight": torch.zeros(5, 8)} | change
    with pytest.raises(ValueError, match=message):
        linear_kl(**arguments)

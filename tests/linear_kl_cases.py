"""linear_kl with every backend that can run here, exact float64 references, and random inputs.

Triton's interpreter must be chosen before triton is imported, so on a CPU the "triton" cases exist only in a process
of their own: see test_linear_kl_triton.py.
"""

import os

import pytest
import torch
import torch.nn.functional as F

from mrp_trainer import linear_kl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MASK = 7

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IMPLEMENTATIONS = [
    pytest.param(("torch", "cpu"), id="torch"),
    *([pytest.param(("triton", "cpu"), id="triton")] if INTERPRETED else []),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=on_gpu),
]


class Implementation:
    """linear_kl with one backend on one device; inputs are moved there and results back."""

    def __init__(self, backend: str, device: str):
        self.backend, self.device = backend, device

    def kl(self, h_student, h_teacher, weight, **options):
        moved = (tensor.detach().to(self.device) for tensor in (h_student, h_teacher, weight))
        return linear_kl(*moved, backend=self.backend, **options).cpu()

    def kl_and_gradient(self, h_student, h_teacher, weight, **options):
        h_student = h_student.detach().to(self.device).requires_grad_()
        kl = linear_kl(h_student, h_teacher.to(self.device), weight.to(self.device), backend=self.backend, **options)
        (gradient,) = torch.autograd.grad(kl.sum(), h_student)
        return kl.detach().cpu(), gradient.cpu()


def exact_kl_and_gradient(h_student, h_teacher, weight, temperature=1.0):
    """The definition in float64, and its gradient by autograd."""
    h_student = h_student.detach().double().requires_grad_()
    weight = weight.double()
    teacher = F.log_softmax(h_teacher.double() @ weight.t() / temperature, dim=-1)
    student = F.log_softmax(h_student @ weight.t() / temperature, dim=-1)
    kl = temperature**2 * F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    (gradient,) = torch.autograd.grad(kl.sum(), h_student)
    return kl.detach(), gradient


def random_hidden(rows, vocab_size, hidden=32, change=0.1, dtype=torch.float32, logit_scale=3.0, seed=0):
    """h_student, h_teacher, weight; the KL is about (logit_scale * change)^2 / 2."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab_size, hidden, generator=generator) * logit_scale / hidden**0.5
    h_teacher = torch.randn(rows, hidden, generator=generator)
    h_student = h_teacher + change * torch.randn(rows, hidden, generator=generator)
    return h_student.to(dtype), h_teacher.to(dtype), weight.to(dtype)


def relative_error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()

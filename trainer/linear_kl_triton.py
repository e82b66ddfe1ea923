"""The row kernel of the residual loss, see linear_kl.py for the formulas."""

import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# Triton reads it too when a kernel is decorated, that is when this file is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MAX_BLOCK = 4096


def kl_rows_triton(teacher: Tensor, delta: Tensor, kl: Tensor, temperature: float, write_gradient: bool) -> None:
    """KL * T^2 of each row of logits, one program per row; the same signature as `kl_rows_reference`.

    Args:
        teacher: [R, V] logits of the teacher.
        delta: [R, V] logits of the student minus those of the teacher. With `write_gradient` it becomes
            dKL / d(delta / T).
        kl: [R] float32, receives the losses.
        temperature: T.
        write_gradient: whether the gradient is wanted.
    """
    rows, vocab_size = teacher.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(teacher):  # triton launches on the current device, wherever the tensors are
        _kl_rows_kernel[(rows,)](
            teacher,
            delta,
            kl,
            teacher.stride(0),
            delta.stride(0),
            vocab_size,
            1.0 / temperature,
            BLOCK=block,
            WRITE_GRADIENT=write_gradient,
            num_warps=8 if block >= 2048 else 4,
        )


if HAS_TRITON:

    @triton.jit
    def _kl_rows_kernel(
        teacher_ptr,
        delta_ptr,
        kl_ptr,
        teacher_stride,
        delta_stride,
        vocab_size,
        inverse_temperature,
        BLOCK: tl.constexpr,
        WRITE_GRADIENT: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        teacher_ptr += row * teacher_stride
        delta_ptr += row * delta_stride
        NEG_INF: tl.constexpr = float("-inf")
        SMALL: tl.constexpr = 1 / 16

        # Pass 1: both log-sum-exps. The student's peak is kept relative to the teacher's, so that large common
        # parts never enter, and equal inputs go through equal operations.
        b_peak = tl.full((), NEG_INF, tl.float32)
        s_peak = tl.full((), NEG_INF, tl.float32)
        b_sum = tl.full((), 0.0, tl.float32)
        s_sum = tl.full((), 0.0, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            b = tl.load(teacher_ptr + columns, mask=inside, other=NEG_INF).to(tl.float32) * inverse_temperature
            d = tl.load(delta_ptr + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
            new_b_peak = tl.maximum(b_peak, tl.max(b, axis=0))
            b_base = tl.where(new_b_peak == NEG_INF, 0.0, new_b_peak)
            s = (b - b_base) + d
            moved_s_peak = s_peak + tl.where(b_peak == NEG_INF, 0.0, b_peak - b_base)
            new_s_peak = tl.maximum(moved_s_peak, tl.max(s, axis=0))
            s_base = tl.where(new_s_peak == NEG_INF, 0.0, new_s_peak)
            b_sum = b_sum * tl.exp(b_peak - b_base) + tl.sum(tl.exp(b - b_base), axis=0)
            s_sum = s_sum * tl.exp(moved_s_peak - s_base) + tl.sum(tl.exp(s - s_base), axis=0)
            b_peak = new_b_peak
            s_peak = new_s_peak
        b_peak = tl.where(b_peak == NEG_INF, 0.0, b_peak)
        b_lse = tl.where(b_sum == 0.0, 0.0, tl.log(b_sum))
        lse_change = tl.where(s_sum == 0.0, 0.0, s_peak + tl.log(s_sum) - b_lse)

        # Pass 2: the loss, and the gradient in place of delta.
        kl = tl.full((), 0.0, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            b = tl.load(teacher_ptr + columns, mask=inside, other=NEG_INF).to(tl.float32) * inverse_temperature
            d = tl.load(delta_ptr + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
            log_p = (b - b_peak) - b_lse
            r = d - lse_change
            is_small = tl.abs(r) < SMALL
            small_r = tl.where(is_small, r, 0.0)
            series = 0.5 * small_r * small_r * (1.0 + small_r / 3 * (1.0 + small_r / 4 * (1.0 + small_r / 5)))
            # |p (exp(r) - 1)| = max(p, q) (1 - exp(-|r|)): no overflow whichever of p and q is the larger
            larger = tl.exp(log_p + tl.where(r > 0, r, 0.0))
            shrink = tl.exp(-tl.abs(r))
            p = tl.where(r > 0, larger * shrink, larger)
            gradient = tl.where(r > 0, larger - p, larger * (shrink - 1.0))
            kl += tl.sum(tl.where(is_small, p * series, gradient - tl.where(p == 0.0, 0.0, p * r)), axis=0)
            if WRITE_GRADIENT:
                gradient = tl.where(is_small, p * (small_r + series), gradient)
                tl.store(delta_ptr + columns, gradient.to(delta_ptr.dtype.element_ty), mask=inside)
        tl.store(kl_ptr + row, kl / (inverse_temperature * inverse_temperature))

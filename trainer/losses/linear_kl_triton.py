"""The row function of linear_kl.py as a Triton kernel, one program per row of logits.

The formulas are in linear_kl.py; kl_rows.py has the same steps in PyTorch. The kernel reads a row twice:

    pass 1   running peaks and sums: both log-sum-exps, and the teacher's choice
    pass 2   the loss, and the gradients in place of the logits

Everything is loaded and then cast to float32: in Triton's interpreter, arithmetic in bf16 is silently wrong.
"""

import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# Triton reads this variable when a kernel is decorated, which happens when this file is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MAX_BLOCK = 4096  # elements of a row that a program holds at a time


def kl_rows_triton(
    teacher: Tensor,
    delta: Tensor,
    kl: Tensor,
    temperature: float,
    write_gradient: bool,
    choice: tuple[Tensor, Tensor, Tensor] | None = None,
    mask_token_id: int | None = None,
) -> None:
    """Compute KL * T^2 of each row of logits. The same signature as `kl_rows_reference`.

    Args:
        teacher: logits of the teacher, [R, V]. With a choice and `write_gradient` they are overwritten by the gradient
            of the choice's log_prob in the student's logits.
        delta: logits of the student minus those of the teacher, [R, V]. With `write_gradient` they are overwritten by
            dKL / d(delta / T).
        kl: receives the losses, float32 [R].
        temperature: temperature T.
        write_gradient: whether to compute gradients.
        choice: receives the teacher's choice: token (int64 [R]), score and log_prob (float32 [R]); None skips it.
        mask_token_id: the token that is never chosen.
    """
    rows, vocab_size = teacher.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(teacher):  # triton launches on the current device, which may not be the tensors'
        kl_rows_kernel[(rows,)](
            teacher,
            delta,
            kl,
            *(choice or (None, None, None)),
            teacher.stride(0),
            delta.stride(0),
            vocab_size,
            1.0 / temperature,
            mask_token_id,
            BLOCK=block,
            WRITE_GRADIENT=write_gradient,
            CHOOSE=choice is not None,
            num_warps=8 if block >= 2048 else 4,
        )


if HAS_TRITON:

    @triton.jit
    def _merge_block(x, index, here, at, peak, rest):
        """Add a block to a running peak and to `rest`, the sum of exp(x - peak) over all elements but the peak.

        The block's elements are x, numbered by `index`; its own peak is `here`, at number `at`. If that is the new
        peak, it is left out of the sum and the old peak (the + 1) enters it.
        """
        higher = here > peak
        new_peak = tl.where(higher, here, peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        block = tl.sum(tl.where(index == tl.where(higher, at, -1), 0.0, tl.exp(x - base)), axis=0)
        return new_peak, block + tl.where(higher, (rest + 1) * tl.exp(peak - base), rest)

    @triton.jit
    def _logits(teacher_ptr, delta_ptr, columns, inside):
        """Load the teacher's logits and the student's differences; -inf and 0 outside the vocabulary."""
        teacher = tl.load(teacher_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
        return teacher, tl.load(delta_ptr + columns, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _one_minus_exp(x):
        """Compute 1 - exp(x) for x <= 0, from its series near 0: libdevice's expm1 is not in the interpreter."""
        return tl.where(x > -0.01, -x * (1 + x * (0.5 + x / 6)), 1 - tl.exp(x))

    @triton.jit
    def _log1p(x):
        """Compute log(1 + x) for x >= 0, from its series near 0: libdevice's log1p is not in the interpreter."""
        return tl.where(x < 0.01, x * (1 - x * (0.5 - x * (1 / 3 - x / 4))), tl.log(1 + x))

    @triton.jit
    def kl_rows_kernel(  # noqa: ANN201  (Triton compiles it: no annotations)
        teacher_ptr,
        delta_ptr,
        kl_ptr,
        token_ptr,
        score_ptr,
        log_prob_ptr,
        teacher_stride,
        delta_stride,
        vocab_size,
        inverse_temperature,
        mask_token_id,
        BLOCK: tl.constexpr,
        WRITE_GRADIENT: tl.constexpr,
        CHOOSE: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        teacher_ptr += row * teacher_stride
        delta_ptr += row * delta_stride
        NEG_INF: tl.constexpr = float("-inf")
        SMALL: tl.constexpr = 1 / 16

        # Pass 1: both log-sum-exps (b: the teacher, s: the student), rescaled whenever a block has a higher peak. The
        # student's peak is kept relative to the teacher's: what both share cancels before it can be rounded away, and
        # equal inputs go through equal operations and give exactly 0.
        b_peak = tl.full((), NEG_INF, tl.float32)
        s_peak = tl.full((), NEG_INF, tl.float32)
        b_sum = tl.full((), 0.0, tl.float32)
        s_sum = tl.full((), 0.0, tl.float32)
        # For the choice, without the mask token and at temperature 1: the teacher (c) and the student (q). Peaks are
        # left out of the sums: 1 - p of a token that is nearly certain would be lost in a sum that includes its 1.
        token = tl.full((), 0, tl.int32)
        q_of_token = tl.full((), 0.0, tl.float32)
        c_peak = tl.full((), NEG_INF, tl.float32)
        q_peak = tl.full((), NEG_INF, tl.float32)
        c_rest = tl.full((), 0.0, tl.float32)
        q_rest = tl.full((), 0.0, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            raw_b, raw_d = _logits(teacher_ptr, delta_ptr, columns, inside)
            b = raw_b * inverse_temperature
            d = raw_d * inverse_temperature
            new_b_peak = tl.maximum(b_peak, tl.max(b, axis=0))
            b_base = tl.where(new_b_peak == NEG_INF, 0.0, new_b_peak)
            s = (b - b_base) + d  # student's logits relative to the teacher's new peak
            # The old student's peak, relative to the new peak of the teacher.
            moved_s_peak = s_peak + tl.where(b_peak == NEG_INF, 0.0, b_peak - b_base)
            new_s_peak = tl.maximum(moved_s_peak, tl.max(s, axis=0))
            s_base = tl.where(new_s_peak == NEG_INF, 0.0, new_s_peak)
            b_sum = b_sum * tl.exp(b_peak - b_base) + tl.sum(tl.exp(b - b_base), axis=0)
            s_sum = s_sum * tl.exp(moved_s_peak - s_base) + tl.sum(tl.exp(s - s_base), axis=0)
            b_peak = new_b_peak
            s_peak = new_s_peak
            if CHOOSE:
                c = tl.where(columns == mask_token_id, NEG_INF, raw_b)
                q = c + raw_d
                here, at = tl.max(c, axis=0, return_indices=True)
                q_here = tl.sum(tl.where(columns == start + at, q, 0.0), axis=0)
                q_of_token = tl.where(here > c_peak, q_here, q_of_token)
                token = tl.where(here > c_peak, start + at, token)
                c_peak, c_rest = _merge_block(c, columns - start, here, at, c_peak, c_rest)
                here, at = tl.max(q, axis=0, return_indices=True)
                q_peak, q_rest = _merge_block(q, columns - start, here, at, q_peak, q_rest)
        b_peak = tl.where(b_peak == NEG_INF, 0.0, b_peak)
        b_lse = tl.where(b_sum == 0.0, 0.0, tl.log(b_sum))
        lse_change = tl.where(s_sum == 0.0, 0.0, s_peak + tl.log(s_sum) - b_lse)
        if CHOOSE:
            log_q_sum = _log1p(q_rest)
            log_prob = (q_of_token - q_peak) - log_q_sum
            doubt = _one_minus_exp(log_prob)  # 1 - q of the chosen token, its entry in the gradient
            tl.store(token_ptr + row, token)
            tl.store(score_ptr + row, -_log1p(c_rest))  # the token's own logit is the peak
            tl.store(log_prob_ptr + row, log_prob)

        # Pass 2: the loss, and the gradients in place of delta (KL) and of the teacher (choice).
        kl = tl.full((), 0.0, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            raw_b, raw_d = _logits(teacher_ptr, delta_ptr, columns, inside)
            b = raw_b * inverse_temperature
            d = raw_d * inverse_temperature
            log_p = (b - b_peak) - b_lse
            r = d - lse_change  # log p_S - log p_B
            is_small = tl.abs(r) < SMALL
            small_r = tl.where(is_small, r, 0.0)
            series = 0.5 * small_r * small_r * (1.0 + small_r / 3 * (1.0 + small_r / 4 * (1.0 + small_r / 5)))
            # |p (exp(r) - 1)| = max(p, q) (1 - exp(-|r|)), with q = p exp(r): no overflow whichever is larger
            larger = tl.exp(log_p + tl.where(r > 0, r, 0.0))
            shrink = tl.exp(-tl.abs(r))
            p = tl.where(r > 0, larger * shrink, larger)
            gradient = tl.where(r > 0, larger - p, larger * (shrink - 1.0))
            kl += tl.sum(tl.where(is_small, p * series, gradient - tl.where(p == 0.0, 0.0, p * r)), axis=0)
            if WRITE_GRADIENT:
                gradient = tl.where(is_small, p * (small_r + series), gradient)
                tl.store(delta_ptr + columns, gradient.to(delta_ptr.dtype.element_ty), mask=inside)
                if CHOOSE:
                    q = tl.where(columns == mask_token_id, NEG_INF, raw_b) + raw_d
                    gradient = tl.where(columns == token, doubt, -tl.exp((q - q_peak) - log_q_sum))
                    tl.store(teacher_ptr + columns, gradient.to(teacher_ptr.dtype.element_ty), mask=inside)
        tl.store(kl_ptr + row, kl / (inverse_temperature * inverse_temperature))

"""The row function of linear_kl.py in PyTorch: from a chunk of logits to losses and gradients.

It runs where there is no Triton, and it is the reference for the kernel in linear_kl_triton.py, which has the same
signature. See linear_kl.py for the formulas.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Elements that the row function works on at a time. Smaller tiles would stay in a CPU's cache, but every operation on
# a tile ends in a barrier between threads, and on a busy machine those barriers cost far more than the cache saves.
TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}
# Below SMALL, exp(r) - 1 - r is computed from its series, above it from exp; both are good to a few ulp there.
SMALL = 1 / 16
# Largest factorial in that series: the terms left out are below the rounding of the dtype.
SERIES_ORDER = {torch.float32: 5, torch.float64: 11}


class Choice(NamedTuple):
    """The teacher's token at each of N positions, with the mask token ruled out as in decoding.

    Attributes:
        token: the teacher's most likely token, int64 [N].
        score: its log-probability under the teacher, [N].
        log_prob: its log-probability under the student, [N]; has a gradient.
    """

    token: Tensor
    score: Tensor
    log_prob: Tensor

    def rows(self, rows: slice) -> "Choice":
        """Return the choice at some of the positions, as views."""
        return Choice(*(field[rows] for field in self))


def kl_rows_reference(
    teacher: Tensor,
    delta: Tensor,
    kl: Tensor,
    temperature: float,
    write_gradient: bool,
    choice: Choice | None = None,
    mask_token_id: int | None = None,
) -> None:
    """Compute KL * T^2 of each row of logits, in place. The same signature as `kl_rows_triton`.

    Args:
        teacher: logits of the teacher, [R, V]. They are overwritten: with a choice and `write_gradient` by the
            gradient of the choice's log_prob in the student's logits.
        delta: logits of the student minus those of the teacher, [R, V]. They are overwritten: with `write_gradient` by
            dKL / d(delta / T).
        kl: receives the losses, [R]. Its dtype is the one in which they are computed.
        temperature: temperature T.
        write_gradient: whether to compute gradients.
        choice: receives the teacher's choice at each row; None skips it.
        mask_token_id: the token that is never chosen.
    """
    rows = max(1, TILE_ELEMENTS.get(teacher.device.type, TILE_ELEMENTS["cuda"]) // teacher.shape[1])
    for start in range(0, len(kl), rows):
        tile = slice(start, start + rows)
        d = delta[tile].to(kl.dtype)  # a view of delta, or a copy if its dtype is narrower
        z = teacher[tile].to(kl.dtype, copy=choice is not None)  # teacher[tile] becomes the gradient, and z is read on
        if choice is not None:
            found, gradient = _choice_tile(z, d, mask_token_id, write_gradient)
            for field, value in zip(choice.rows(tile), found, strict=True):
                field.copy_(value)
            if write_gradient:
                teacher[tile].copy_(gradient)
            del gradient  # free its memory before the KL allocates buffers
        kl[tile] = _kl_tile(z, d, temperature) * temperature**2
        if write_gradient:
            delta[tile].copy_(d)


def _choice_tile(
    z: Tensor, d: Tensor, mask_token_id: int, write_gradient: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return the fields of `Choice`, each [R], and if wanted d log_prob / d (z + d), [R, V].

    The arguments are those of `_kl_tile`, and are only read. With q the student's distribution and c the chosen token,
    d log q_c / d logit_v = [v = c] - q_v; its entry at c is 1 - q_c = -expm1(log q_c), exact also where q_c is near 1.
    """
    logits = z.clone()
    logits[:, mask_token_id] = -torch.inf
    buffer = torch.empty_like(logits)
    token, score = _log_softmax_(logits, buffer)
    log_q = logits.add_(d)  # a shift of each row does not matter: it is normalised again
    _log_softmax_(log_q, buffer)
    log_prob = log_q.gather(1, token)
    found = token[:, 0], score[:, 0], log_prob[:, 0]
    if not write_gradient:
        return found, None
    return found, log_q.exp_().neg_().scatter_(1, token, -log_prob.expm1())


def _log_softmax_(logits: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits [R, V] into log-probabilities, in place.

    The peak is left out of the sum: log p_peak = -log1p(sum over all others of exp(logit - peak)). Where a token is
    nearly certain, 1 - p_peak would be lost in a sum that includes its 1.

    Returns:
        The most likely token and its log-probability, both [R, 1].
    """
    peak, token = logits.max(-1, keepdim=True)
    rest = torch.exp(logits.sub_(peak), out=buffer).scatter_(1, token, 0.0).sum(-1, keepdim=True)
    log_prob = rest.log1p().neg_()
    logits.add_(log_prob)
    return token, log_prob


def _kl_tile(z: Tensor, d: Tensor, temperature: float) -> Tensor:
    """Return the KL of each row, [R].

    Besides its arguments it needs two buffers of their size and three masks, which is why it writes with `out=` and
    reuses storage under new names.

    Args:
        z: logits of the teacher, [R, V]; overwritten.
        d: logits of the student minus those of the teacher, [R, V]; becomes dKL / d(d / T).
        temperature: temperature T.
    """
    if temperature != 1:
        z.div_(temperature)
        d.div_(temperature)
    z.sub_(_finite_peak(z))
    s = z + d  # student logits relative to the teacher's peak: what both share cancels before it can be rounded away
    s_peak = _finite_peak(s)
    sum_s = s.sub_(s_peak).exp_().sum(-1, keepdim=True)
    sum_b = torch.exp(z, out=s).sum(-1, keepdim=True)
    # Sums are 0 only where every token of a row is suppressed: such a row gets loss 0 instead of NaN.
    lse_b = torch.where(sum_b == 0, 0.0, sum_b.log())
    lse_change = torch.where(sum_s == 0, 0.0, s_peak + sum_s.log() - lse_b)  # lse_S - lse_B

    log_p = z.sub_(lse_b)
    r = d.sub_(lse_change)  # log p_S - log p_B
    # |p (exp(r) - 1)| = max(p, q) (1 - exp(-|r|)), with q = p exp(r): no overflow whichever of p and q is larger
    gradient = torch.clamp(r, min=0, out=s).add_(log_p).exp_()  # max(p, q)
    shrink = torch.copysign(r, -1.0).expm1_()  # exp(-|r|) - 1
    gradient.mul_(shrink)
    is_small = shrink > math.expm1(-SMALL)  # |r| < SMALL

    p = log_p.exp_()
    p_is_zero = p == 0
    p_r = p.mul_(r).masked_fill_(p_is_zero, 0.0)  # r may be -inf there, and 0 * -inf is NaN
    small_terms = _series(r, out=shrink).mul_(r).mul_(p_r)  # p (exp(r) - 1 - r) where |r| is small ...
    gradient = torch.copysign(gradient, r, out=d)
    large_terms = torch.sub(gradient, p_r, out=p_r)  # ... and where it is not
    # Two fills and two sums: on a CPU `where` on such a mask takes longer than exp.
    return large_terms.masked_fill_(is_small, 0.0).sum(-1) + small_terms.masked_fill_(~is_small, 0.0).sum(-1)


def _finite_peak(x: Tensor) -> Tensor:
    """Return the maximum of each row [R, 1], or 0 if the whole row is -inf."""
    peak = x.amax(-1, keepdim=True)
    return torch.where(peak == -torch.inf, 0.0, peak)


def _series(r: Tensor, out: Tensor) -> Tensor:
    """Compute (exp(r) - 1 - r) / r^2 = 1/2! + r/3! + r^2/4! + ... for small r by Horner's rule."""
    order = SERIES_ORDER[r.dtype]
    torch.mul(r, 1 / math.factorial(order), out=out).add_(1 / math.factorial(order - 1))
    for k in range(order - 2, 1, -1):
        torch.addcmul(r.new_tensor(1 / math.factorial(k)), out, r, out=out)
    return out

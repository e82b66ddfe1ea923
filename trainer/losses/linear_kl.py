"""The residual loss: KL between two vocabulary distributions, straight from hidden states.

With z_B = W h_B and delta = W (h_S - h_B), both divided by T, and r = delta - (lse_S - lse_B):

    KL = sum p_B (exp(r) - 1 - r)        d KL / d delta = p_B (exp(r) - 1)

Every term of the sum is >= 0 and small where student and teacher agree, so nothing cancels, even in bf16.
Two rounded logit tensors subtracted from one another lose the gradient long before training ends.

`linear_kl_and_choice` also reads off the same logits which token the teacher would reveal and how likely the student
finds it, for the term on the chosen position of objectives.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BACKENDS = ("auto", "torch", "triton")
# Elements of one [rows, V] buffer that chunk_rows="auto" aims at: small enough to save memory, large enough for
# matrix products at full speed.
CHUNK_ELEMENTS = {"cpu": 3 * 2**22, "cuda": 2**27}
CHUNK_MULTIPLE = 256  # rows, on a GPU
# Elements the PyTorch row function works on at a time. Smaller tiles would stay in a CPU's cache, but each operation
# on one ends in a barrier between threads, and on a busy machine those barriers cost far more than the cache saves.
TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}
# Below it exp(r) - 1 - r comes from its series, above it from exp: either way good to a few ulp.
SMALL = 1 / 16
# Last factorial of that series, cut off below the rounding of the dtype.
SERIES_ORDER = {torch.float32: 5, torch.float64: 11}


class Choice(NamedTuple):
    """The teacher's token at each of N positions, with the mask token ruled out as in decoding.

    Attributes:
        token: int64 [N], the teacher's likeliest.
        score: [N], its log-probability under the teacher.
        log_prob: [N], its log-probability under the student; has a gradient.
    """

    token: Tensor
    score: Tensor
    log_prob: Tensor

    def rows(self, rows: slice) -> "Choice":
        """Some of the positions."""
        return Choice(*(field[rows] for field in self))


RowFunction = Callable[[Tensor, Tensor, Tensor, float, bool, Choice | None, int | None], None]


def linear_kl(
    h_student: Tensor,
    h_teacher: Tensor,
    weight: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    suppress_ids: Sequence[int] | Tensor | None = None,
    chunk_rows: int | str = "auto",
    backend: str = "auto",
) -> Tensor:
    """KL(softmax(W h_teacher / T) || softmax(W h_student / T)) * T^2 of each row, without keeping logits.

    Only `h_student` gets a gradient; the teacher and the weight are frozen. Memory is
    O(chunk_rows * V + N * H). The matrix products run in the dtype of `weight`, whatever autocast says; the
    difference of the hidden states and all work on rows run in float32 (float64 for a float64 weight).
    Remove rows that do not count before the call; weight the others after it.

    Args:
        h_student: [N, H], the corrected hidden states h_A + h_C.
        h_teacher: [N, H], the backbone's hidden states on the revealed block, h_B.
        weight: [V, H], the output embedding.
        temperature: T > 0.
        vocab_size: use only the first `vocab_size` rows of `weight` (padded vocabularies). Default: all.
        suppress_ids: token ids whose logits count as -inf in both student and teacher.
        chunk_rows: rows whose logits exist at one time; "auto" chooses by device and vocabulary.
        backend: "torch", "triton" (CUDA tensors, or any with TRITON_INTERPRET=1), or "auto": triton on CUDA
            where it is installed, else torch.

    Returns:
        [N] losses in nats, float32 (float64 for a float64 weight), never negative. 0 where every token is
        suppressed, +inf where the student rules out a token that the teacher allows, NaN where the row holds one.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or an option is out of its range.
    """
    _check_tensors(h_student, h_teacher, weight)
    _check_options(temperature, vocab_size, chunk_rows, weight.shape[0])
    suppressed = _suppressed_columns(suppress_ids, weight.shape[0], vocab_size, weight.device)
    weight = weight.detach()[:vocab_size].contiguous()
    kl, *_ = _fused(h_student, h_teacher, weight, suppressed, temperature, chunk_rows, backend)
    return kl


def linear_kl_and_choice(
    h_student: Tensor,
    h_teacher: Tensor,
    weight: Tensor,
    mask_token_id: int,
    *,
    temperature: float = 1.0,
    chunk_rows: int | str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Choice]:
    """`linear_kl`, and the teacher's choice with both its likelihoods, from the same logits.

    Four matrix products instead of the six of the two apart: both logits, and one gradient each.

    Args:
        h_student, h_teacher, weight, temperature, chunk_rows, backend: as in `linear_kl`.
        mask_token_id: the token that is never chosen. The KL counts it, and T does not touch the choice.

    Returns:
        The losses [N], and the `Choice` at each of the N positions, in the losses' dtype.

    Raises:
        ValueError: as `linear_kl`, and for a `mask_token_id` outside the vocabulary.
    """
    _check_tensors(h_student, h_teacher, weight)
    _check_options(temperature, None, chunk_rows, weight.shape[0])
    if not 0 <= mask_token_id < weight.shape[0]:
        raise ValueError(f"mask_token_id must lie in [0, {weight.shape[0]}), the rows of weight; got {mask_token_id}")
    weight = weight.detach().contiguous()
    kl, *choice = _fused(h_student, h_teacher, weight, None, temperature, chunk_rows, backend, mask_token_id)
    return kl, Choice(*choice)


def _fused(h_student, h_teacher, weight, suppressed, temperature, chunk_rows, backend, mask_token_id=None):
    """Losses and the fields of the choice, None without a mask token."""
    row_function = _row_function(backend, weight)
    if chunk_rows == "auto":
        chunk_rows = auto_chunk_rows(h_student.shape[0], weight)
    want_gradient = torch.is_grad_enabled() and h_student.requires_grad
    options = (suppressed, float(temperature), chunk_rows, row_function, want_gradient, mask_token_id)
    return _LinearKL.apply(h_student, h_teacher.detach(), weight, *options)


class _LinearKL(torch.autograd.Function):
    """Computes the gradients along with the values, while the logits are at hand; backward only scales their rows."""

    @staticmethod
    def forward(ctx, h_student, h_teacher, weight, suppressed, temperature, *options):
        values = _kl_in_chunks(h_student, h_teacher, weight, suppressed, temperature, *options)
        kl, choice, of_kl, of_log_prob = values
        ctx.save_for_backward(of_kl, of_log_prob)
        ctx.temperature = temperature  # T^2 of the loss over T of the logits
        ctx.dtype = h_student.dtype
        if choice is None:
            return kl, None, None, None
        ctx.mark_non_differentiable(choice.token, choice.score)
        return kl, *choice

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_kl, grad_token, grad_score, grad_log_prob):
        of_kl, of_log_prob = ctx.saved_tensors
        gradient = of_kl * (grad_kl * ctx.temperature)[:, None]
        if of_log_prob is not None:
            gradient += of_log_prob * grad_log_prob[:, None]
        return (gradient.to(ctx.dtype),) + (None,) * 8


def _kl_in_chunks(
    h_student, h_teacher, weight, suppressed, temperature, chunk_rows, row_function, want_gradient, mask_token_id
) -> tuple[Tensor, Choice | None, Tensor | None, Tensor | None]:
    """One chunk of rows at a time: losses [N], the choice if there is a mask token, and, if wanted, the gradients.

    They are [N, H]: dKL / d(delta / T) @ weight, and that of the choice's log_prob.
    """
    n, hidden = h_student.shape
    chunk_rows = max(1, min(chunk_rows, n))
    wide = _accumulation_dtype(weight)
    kl, choice = torch.empty(n, dtype=wide, device=weight.device), None
    if mask_token_id is not None:
        choice = Choice(torch.empty_like(kl, dtype=torch.long), torch.empty_like(kl), torch.empty_like(kl))
    of_kl, of_log_prob = (
        weight.new_empty(n, hidden) if want_gradient and wanted else None for wanted in (True, choice is not None)
    )
    stacked = weight.new_empty(2 * chunk_rows, hidden)
    logits = weight.new_empty(2 * chunk_rows, weight.shape[0])
    for start in range(0, n, chunk_rows):
        rows = slice(start, min(start + chunk_rows, n))
        size = rows.stop - start
        stacked[:size] = h_teacher[rows]
        stacked[size : 2 * size] = h_student[rows].to(wide) - h_teacher[rows].to(wide)
        # A product with out= is not subject to autocast.
        z = torch.mm(stacked[: 2 * size], weight.t(), out=logits[: 2 * size])
        teacher, delta = z[:size], z[size:]
        if suppressed is not None:
            teacher.index_fill_(1, suppressed, -torch.inf)
            delta.index_fill_(1, suppressed, 0.0)
        chosen = choice and choice.rows(rows)
        row_function(teacher, delta, kl[rows], temperature, want_gradient, chosen, mask_token_id)
        if want_gradient:
            torch.mm(delta, weight, out=of_kl[rows])
        if of_log_prob is not None:
            torch.mm(teacher, weight, out=of_log_prob[rows])
    return kl, choice, of_kl, of_log_prob


def kl_rows_reference(
    teacher: Tensor,
    delta: Tensor,
    kl: Tensor,
    temperature: float,
    write_gradient: bool,
    choice: Choice | None = None,
    mask_token_id: int | None = None,
) -> None:
    """KL * T^2 of each row of logits, in PyTorch; the same signature as `kl_rows_triton`.

    Args:
        teacher: [R, V] logits of the teacher. Overwritten; with a choice and `write_gradient` it becomes the gradient
            of the choice's log_prob in the logits of the student.
        delta: [R, V] logits of the student minus those of the teacher. With `write_gradient` it becomes
            dKL / d(delta / T), otherwise it is overwritten.
        kl: [R] receives the losses; its dtype is the one that is calculated in.
        temperature: T.
        write_gradient: whether the gradients are wanted.
        choice: [R], receives the teacher's choice where it is wanted.
        mask_token_id: the token that is never chosen.
    """
    rows = max(1, TILE_ELEMENTS.get(teacher.device.type, TILE_ELEMENTS["cuda"]) // teacher.shape[1])
    for start in range(0, len(kl), rows):
        tile = slice(start, start + rows)
        d = delta[tile].to(kl.dtype)  # itself unless narrower
        z = teacher[tile].to(kl.dtype, copy=choice is not None)
        if choice is not None:
            found, gradient = _choice_tile(z, d, mask_token_id, write_gradient)
            for field, value in zip(choice.rows(tile), found, strict=True):
                field.copy_(value)
            if write_gradient:
                teacher[tile].copy_(gradient)
            del gradient  # before the KL takes its buffers
        kl[tile] = _kl_tile(z, d, temperature) * temperature**2
        if write_gradient:
            delta[tile].copy_(d)


def _choice_tile(
    z: Tensor, d: Tensor, mask_token_id: int, write_gradient: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """The fields of `Choice` [R] of logits as `_kl_tile` takes them, and d log_prob / d (z + d) [R, V] if wanted."""
    logits = z.clone()
    logits[:, mask_token_id] = -torch.inf
    buffer = torch.empty_like(logits)
    token, score = _normalise(logits, buffer)
    log_q = logits.add_(d)
    _normalise(log_q, buffer)
    log_prob = log_q.gather(1, token)
    found = token[:, 0], score[:, 0], log_prob[:, 0]
    if not write_gradient:
        return found, None
    return found, log_q.exp_().neg_().scatter_(1, token, -log_prob.expm1())


def _normalise(logits: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits [R, V] log-probabilities in place; the likeliest token and its own, both [R, 1].

    The peak stays out of the sum: the odds of a token that is nearly certain are those of all others.
    """
    peak, token = logits.max(-1, keepdim=True)
    rest = torch.exp(logits.sub_(peak), out=buffer).scatter_(1, token, 0.0).sum(-1, keepdim=True)
    log_prob = rest.log1p().neg_()
    logits.add_(log_prob)
    return token, log_prob


def _kl_tile(z: Tensor, d: Tensor, temperature: float) -> Tensor:
    """KL [R] of teacher logits z and differences d, both [R, V]; z is overwritten, d becomes dKL/d(d/T).

    Beyond them it takes two buffers of their size and three masks; hence the `out=` and the reused storage.
    """
    if temperature != 1:
        z.div_(temperature)
        d.div_(temperature)
    z.sub_(_finite_peak(z))
    s = z + d  # student logits, relative to the teacher's peak: large common parts never enter
    s_peak = _finite_peak(s)
    sum_s = s.sub_(s_peak).exp_().sum(-1, keepdim=True)
    sum_b = torch.exp(z, out=s).sum(-1, keepdim=True)
    lse_b = torch.where(sum_b == 0, 0.0, sum_b.log())
    lse_change = torch.where(sum_s == 0, 0.0, s_peak + sum_s.log() - lse_b)

    log_p = z.sub_(lse_b)
    r = d.sub_(lse_change)
    # |p (exp(r) - 1)| = max(p, q) (1 - exp(-|r|)): no overflow whichever of p and q is the larger
    gradient = torch.clamp(r, min=0, out=s).add_(log_p).exp_()
    shrink = torch.copysign(r, -1.0).expm1_()
    gradient.mul_(shrink)
    is_small = shrink > math.expm1(-SMALL)

    p = log_p.exp_()
    p_is_zero = p == 0
    p_r = p.mul_(r).masked_fill_(p_is_zero, 0.0)  # r may be -inf there
    small_terms = _series(r, out=shrink).mul_(r).mul_(p_r)  # p (exp(r) - 1 - r) where |r| is small ...
    gradient = torch.copysign(gradient, r, out=d)
    large_terms = torch.sub(gradient, p_r, out=p_r)  # ... and where it is not
    # Two fills and sums: on a CPU a `where` on such a mask takes longer than exp.
    return large_terms.masked_fill_(is_small, 0.0).sum(-1) + small_terms.masked_fill_(~is_small, 0.0).sum(-1)


def _finite_peak(x: Tensor) -> Tensor:
    """Row maxima [R, 1], or 0 where a row is -inf throughout."""
    peak = x.amax(-1, keepdim=True)
    return torch.where(peak == -torch.inf, 0.0, peak)


def _series(r: Tensor, out: Tensor) -> Tensor:
    """(exp(r) - 1 - r) / r^2 = 1/2! + r/3! + r^2/4! + ... for small r."""
    order = SERIES_ORDER[r.dtype]
    torch.mul(r, 1 / math.factorial(order), out=out).add_(1 / math.factorial(order - 1))
    for k in range(order - 2, 1, -1):
        torch.addcmul(r.new_tensor(1 / math.factorial(k)), out, r, out=out)
    return out


def _accumulation_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def auto_chunk_rows(n: int, weight: Tensor, dtype: torch.dtype | None = None) -> int:
    """Rows whose logits to make at a time, of `n` in all, near the element target of the weight's device.

    Args:
        n: at least 0.
        weight: [V, H].
        dtype: of the [rows, V] buffers; default: the weight's. A wider one gets fewer rows for the same bytes.
    """
    size = chunk_bytes(weight) // (weight.dtype if dtype is None else dtype).itemsize
    most = max(1, size // weight.shape[0])
    if weight.device.type != "cpu":  # whole tiles of a product, and the same sizes whatever n is
        return most - most % CHUNK_MULTIPLE or most
    chunks = max(1, math.ceil(n / most))  # of about equal size
    return max(1, math.ceil(n / chunks))


def chunk_bytes(weight: Tensor) -> int:
    """Bytes of one [rows, V] buffer of `auto_chunk_rows`, at most, unless a single row needs more."""
    return CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cuda"]) * weight.element_size()


def _row_function(backend: str, weight: Tensor) -> RowFunction:
    """The function that turns a chunk's logits into losses and gradients."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and not weight.is_cuda):
        return kl_rows_reference
    # Imported only when asked for: a CPU run needs no triton.
    from .linear_kl_triton import HAS_TRITON, INTERPRETED, kl_rows_triton

    obstacle = None
    if not HAS_TRITON:
        obstacle = "triton is not installed"
    elif weight.dtype == torch.float64:
        obstacle = "it calculates in float32 and the weight is float64"
    elif not weight.is_cuda and not INTERPRETED:
        obstacle = f"the tensors are on {weight.device}; move them to CUDA or set TRITON_INTERPRET=1 before importing"
    if obstacle is None:
        return kl_rows_triton
    if backend == "auto":
        return kl_rows_reference
    raise ValueError(f"backend='triton' cannot be used: {obstacle}, or use backend='torch'")


def _suppressed_columns(
    ids: Sequence[int] | Tensor | None, padded_size: int, vocab_size: int | None, device: torch.device
) -> Tensor | None:
    """The suppressed ids that lie inside the vocabulary, as an index, or None."""
    if ids is None:
        return None
    columns = torch.as_tensor(ids)
    if columns.numel() == 0:
        return None
    if columns.dim() != 1 or columns.is_floating_point() or columns.dtype == torch.bool:
        raise ValueError(f"suppress_ids must be a flat list of token ids, got {ids!r}")
    if columns.min() < 0 or columns.max() >= padded_size:
        raise ValueError(
            f"suppress_ids must lie in [0, {padded_size}), the rows of weight; got {columns.min()} to {columns.max()}"
        )
    return columns[columns < (vocab_size or padded_size)].to(device, torch.long)


def _check_tensors(h_student: Tensor, h_teacher: Tensor, weight: Tensor) -> None:
    named = {"h_student": h_student, "h_teacher": h_teacher, "weight": weight}
    for name, tensor in named.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point matrix, got {tensor.dtype} of shape {list(tensor.shape)}; "
                "flatten hidden states to [N, H] first"
            )
        if tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device} and weight on {weight.device}; move them together")
    if h_student.shape != h_teacher.shape:
        raise ValueError(
            "h_student and h_teacher must have the same shape, "
            f"got {list(h_student.shape)} and {list(h_teacher.shape)}"
        )
    if weight.shape[0] == 0 or weight.shape[1] != h_student.shape[1]:
        raise ValueError(
            f"weight must be [V, {h_student.shape[1]}] with V >= 1 to fit the hidden states, got {list(weight.shape)}"
        )


def _check_options(temperature: float, vocab_size: int | None, chunk_rows: int | str, padded_size: int) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a finite number above 0, got {temperature}")
    if vocab_size is not None and not 1 <= vocab_size <= padded_size:
        raise ValueError(f"vocab_size must be from 1 to {padded_size}, the rows of weight; got {vocab_size}")
    if chunk_rows != "auto" and not (isinstance(chunk_rows, int) and chunk_rows >= 1):
        raise ValueError(f'chunk_rows must be "auto" or a whole number of at least 1, got {chunk_rows!r}')

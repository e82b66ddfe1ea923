"""The residual loss: KL between two vocabulary distributions, computed from hidden states.

The teacher is B = softmax(W h_B / T), the student S = softmax(W h_S / T). With

    z_B = W h_B / T                  logits of the teacher
    delta = W (h_S - h_B) / T        how much the student's logits differ, from the difference of the hidden states
    r = delta - (lse_S - lse_B)      log p_S - log p_B, with lse the log-sum-exp of each one's logits

the loss and its gradient are

    KL = -sum p_B r = sum p_B (exp(r) - 1 - r)          d KL / d delta = p_B (exp(r) - 1) = p_S - p_B

where the second form adds sum p_B (exp(r) - 1) = sum p_S - sum p_B = 0. Every term of it is >= 0, and small where
student and teacher agree, so nothing cancels, even in bf16. With two rounded logit tensors subtracted from each other
the gradient would drown in rounding long before training ends (a test shows both).

Logits exist for one chunk of rows at a time. One matrix product makes both halves of them:

    stacked [2c, H]             logits = stacked @ W^T [2c, V]
      h_B           c rows        z_B        then, if the choice is wanted, the gradient of its log_prob
      h_S - h_B     c rows        delta      then the gradient of the KL

A row function (PyTorch in kl_rows.py, Triton in linear_kl_triton.py) turns them into losses and writes the gradients
in their place; a further product with W takes the gradients to the hidden states. That is 3 N V H multiplications in
all, and the backward pass only scales rows.

`linear_kl_and_choice` also reads from the same logits which token the teacher would reveal and how likely the student
finds it, for the loss of the chosen position in acceptance.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kl_rows import Choice, kl_rows_reference

BACKENDS = ("auto", "torch", "triton")
# Elements of one [rows, V] buffer that chunk_rows="auto" aims at: small enough to save memory, large enough for matrix
# products at full speed.
CHUNK_ELEMENTS = {"cpu": 3 * 2**22, "cuda": 2**27}
CHUNK_MULTIPLE = 256  # rows; chunks on a GPU are multiples of it

# (teacher, delta, kl, temperature, write_gradient, choice, mask_token_id), see kl_rows_reference
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
    """Compute KL(softmax(W h_teacher / T) || softmax(W h_student / T)) * T^2 of each row, without keeping logits.

    Only `h_student` gets a gradient; teacher and weight are frozen. Memory is O(chunk_rows * V + N * H). Matrix
    products run in the dtype of `weight`, also under autocast; the difference of the hidden states and all work on
    rows run in float32 (float64 for a float64 weight). Remove rows that do not count before the call, and multiply
    by weights after it.

    Args:
        h_student: corrected hidden states h_A + h_C, [N, H].
        h_teacher: the backbone's hidden states on the revealed block h_B, [N, H].
        weight: output embedding, [V, H].
        temperature: temperature T > 0.
        vocab_size: use only the first `vocab_size` rows of `weight`, for padded vocabularies. None uses all.
        suppress_ids: token ids whose logits count as -inf in both student and teacher.
        chunk_rows: number of rows whose logits exist at one time; "auto" chooses by device and vocabulary.
        backend: "torch"; "triton" (CUDA tensors, or any tensors with TRITON_INTERPRET=1); or "auto": triton for CUDA
            tensors if it is installed, else torch.

    Returns:
        The losses in nats, [N], float32 (float64 for a float64 weight), never negative. A loss is 0 if every token is
        suppressed, +inf if the student rules out a token that the teacher allows, and NaN if its row holds a NaN.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit together, or an option is out of its range.
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
    """Compute `linear_kl`, and from the same logits the teacher's choice and its likelihood under both.

    This takes four matrix products (the logits of both, and a gradient for each value); two separate functions would
    take six.

    Args:
        h_student: as in `linear_kl`.
        h_teacher: as in `linear_kl`.
        weight: as in `linear_kl`.
        mask_token_id: the token that is never chosen. The KL includes it. The choice is made at temperature 1.
        temperature: temperature T of the KL.
        chunk_rows: as in `linear_kl`.
        backend: as in `linear_kl`.

    Returns:
        The losses [N], and the `Choice` at each of the N positions, in the losses' dtype.

    Raises:
        ValueError: as `linear_kl`, and if `mask_token_id` lies outside the vocabulary.
    """
    _check_tensors(h_student, h_teacher, weight)
    _check_options(temperature, None, chunk_rows, weight.shape[0])
    if not 0 <= mask_token_id < weight.shape[0]:
        raise ValueError(f"mask_token_id must lie in [0, {weight.shape[0]}), the rows of weight; got {mask_token_id}")
    weight = weight.detach().contiguous()
    kl, *choice = _fused(h_student, h_teacher, weight, None, temperature, chunk_rows, backend, mask_token_id)
    return kl, Choice(*choice)


def _fused(
    h_student: Tensor,
    h_teacher: Tensor,
    weight: Tensor,
    suppressed: Tensor | None,
    temperature: float,
    chunk_rows: int | str,
    backend: str,
    mask_token_id: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the losses and the fields of the choice, which are None without a mask token."""
    row_function = _row_function(backend, weight)
    if chunk_rows == "auto":
        chunk_rows = auto_chunk_rows(h_student.shape[0], weight)
    want_gradient = torch.is_grad_enabled() and h_student.requires_grad
    options = (suppressed, float(temperature), chunk_rows, row_function, want_gradient, mask_token_id)
    return _LinearKL.apply(h_student, h_teacher.detach(), weight, *options)


class _LinearKL(torch.autograd.Function):
    """Computes the gradients together with the values, while the logits exist; backward only scales their rows.

    That is possible because every loss depends on one row of `h_student`: the incoming gradient is one factor per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_student: Tensor,
        h_teacher: Tensor,
        weight: Tensor,
        suppressed: Tensor | None,
        temperature: float,
        *options: Any,
    ) -> tuple:
        values = _kl_in_chunks(h_student, h_teacher, weight, suppressed, temperature, *options)
        kl, choice, kl_gradient, log_prob_gradient = values
        ctx.save_for_backward(kl_gradient, log_prob_gradient)
        ctx.temperature = temperature  # the factor T^2 of the loss, divided by the T in delta / T
        ctx.dtype = h_student.dtype
        if choice is None:
            return kl, None, None, None
        ctx.mark_non_differentiable(choice.token, choice.score)
        return kl, *choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, grad_token: None, grad_score: None, grad_log_prob: Tensor | None) -> tuple:
        kl_gradient, log_prob_gradient = ctx.saved_tensors
        gradient = kl_gradient * (grad_kl * ctx.temperature)[:, None]
        if log_prob_gradient is not None:
            gradient += log_prob_gradient * grad_log_prob[:, None]
        return (gradient.to(ctx.dtype),) + (None,) * 8


def _kl_in_chunks(
    h_student: Tensor,
    h_teacher: Tensor,
    weight: Tensor,
    suppressed: Tensor | None,
    temperature: float,
    chunk_rows: int,
    row_function: RowFunction,
    want_gradient: bool,
    mask_token_id: int | None,
) -> tuple[Tensor, Choice | None, Tensor | None, Tensor | None]:
    """Run the row function over chunks of rows, see the picture at the top of this file.

    Returns:
        The losses [N]; the choice, if there is a mask token; and, if wanted, the gradients with respect to the hidden
        states: d(KL / T^2) / d(delta / T) @ weight and that of the choice's log_prob, both [N, H].
    """
    n, hidden = h_student.shape
    chunk_rows = max(1, min(chunk_rows, n))
    wide = _accumulation_dtype(weight)
    kl = torch.empty(n, dtype=wide, device=weight.device)
    choice = kl_gradient = log_prob_gradient = None
    if want_gradient:
        kl_gradient = weight.new_empty(n, hidden)
    if mask_token_id is not None:
        choice = Choice(torch.empty_like(kl, dtype=torch.long), torch.empty_like(kl), torch.empty_like(kl))
        log_prob_gradient = torch.empty_like(kl_gradient) if want_gradient else None
    stacked = weight.new_empty(2 * chunk_rows, hidden)
    logits = weight.new_empty(2 * chunk_rows, weight.shape[0])
    for start in range(0, n, chunk_rows):
        rows = slice(start, min(start + chunk_rows, n))
        size = rows.stop - start
        stacked[:size] = h_teacher[rows]
        # Subtract in float32 and round the difference: rounding both first would leave little of it.
        stacked[size : 2 * size] = h_student[rows].to(wide) - h_teacher[rows].to(wide)
        # With out= a product is not subject to autocast, and its buffer is reused.
        z = torch.mm(stacked[: 2 * size], weight.t(), out=logits[: 2 * size])
        teacher, delta = z[:size], z[size:]  # [c, V] each
        if suppressed is not None:
            teacher.index_fill_(1, suppressed, -torch.inf)
            delta.index_fill_(1, suppressed, 0.0)  # the student's logit is their sum, -inf too
        chosen = None if choice is None else choice.rows(rows)
        row_function(teacher, delta, kl[rows], temperature, want_gradient, chosen, mask_token_id)
        # From here on `delta` and `teacher` hold gradients.
        if kl_gradient is not None:
            torch.mm(delta, weight, out=kl_gradient[rows])
        if log_prob_gradient is not None:
            torch.mm(teacher, weight, out=log_prob_gradient[rows])
    return kl, choice, kl_gradient, log_prob_gradient


def _accumulation_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def auto_chunk_rows(n: int, weight: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return how many rows of logits to compute at a time, to come near the target size for the weight's device.

    Args:
        n: number of rows in all, at least 0.
        weight: output embedding, [V, H].
        dtype: dtype of the [rows, V] buffers; None means the weight's. A wider one gets fewer rows for the same bytes.
    """
    size = chunk_bytes(weight) // (weight.dtype if dtype is None else dtype).itemsize
    most = max(1, size // weight.shape[0])
    if weight.device.type != "cpu":  # whole tiles of a matrix product, and the same size in every step
        return most - most % CHUNK_MULTIPLE or most
    chunks = max(1, math.ceil(n / most))  # of about equal size
    return max(1, math.ceil(n / chunks))


def chunk_bytes(weight: Tensor) -> int:
    """Return the largest size in bytes of a [rows, V] buffer of `auto_chunk_rows`; a single row may be larger."""
    return CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cuda"]) * weight.element_size()


def _row_function(backend: str, weight: Tensor) -> RowFunction:
    """Return the function that turns a chunk's logits into losses and gradients.

    Raises:
        ValueError: if the backend is unknown, or it is "triton" and Triton cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and not weight.is_cuda):
        return kl_rows_reference
    # Imported only here, so that runs on a CPU do not need Triton.
    from .linear_kl_triton import HAS_TRITON, INTERPRETED, kl_rows_triton

    obstacle = None
    if not HAS_TRITON:
        obstacle = "triton is not installed"
    elif weight.dtype == torch.float64:
        obstacle = "it computes in float32 and the weight is float64"
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
    """Return the suppressed ids that lie inside the vocabulary as an index tensor, or None if there are none."""
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
        raise ValueError(f'chunk_rows must be "auto" or an integer of at least 1, got {chunk_rows!r}')

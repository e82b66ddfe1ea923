"""One read of logits: the token, its log-probability and the entropy of every row, in PyTorch or in a Triton kernel.

The scores of a row are its logits over the temperature. The token is the argmax of scores plus noise; log-probability
and entropy are those of the softmax of the scores alone. Both implementations have the same signature; the kernel,
ops_triton.py, passes over the logits once and makes no other tensor of their size.
"""

from typing import NamedTuple

import torch

from .keyed_noise import keyed_gumbel
from .ops_triton import HAS_TRITON, INTERPRETED, read_logits_triton

BACKENDS = ("auto", "torch", "triton")


class Reading(NamedTuple):
    """What was read from N rows of logits.

    A row whose scores allow no choice has a `log_prob` that is NaN. Then either a score is NaN or infinite, or every
    score is minus infinity; only in the second case is `score` minus infinity.

    Attributes:
        token: id of the token with the highest score plus noise, the first of equals, int64 [N].
        log_prob: its log-probability under the softmax of the scores, float32 [N].
        entropy: entropy of that softmax in nats, float32 [N]; None unless asked for.
        score: the token's score, float32 [N].
    """

    token: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    score: torch.Tensor


def read_logits(
    logits: torch.Tensor,
    excluded: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    keys: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    with_entropy: bool = False,
    backend: str = "auto",
) -> Reading:
    """Choose a token from each row of logits.

    Args:
        logits: the logits, [N, V]. The excluded column is overwritten.
        excluded: index of a column that is never chosen and has no part in the softmax, int64 [1], or None.
        temperature: divisor of the logits.
        keys: keys of the Gumbel noise (see keyed_noise.py), int64 [N]; None: no noise.
        token_ids: ids of the tokens that the columns stand for, int64 [V]; None: 0 to V - 1.
        with_entropy: whether to compute the entropy.
        backend: "torch"; "triton" (CUDA tensors, or any tensors with TRITON_INTERPRET=1); or "auto": triton for CUDA
            tensors where it is installed.

    Raises:
        ValueError: if the backend is unknown, or it is "triton" and Triton cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton" and not (HAS_TRITON and (logits.is_cuda or INTERPRETED)):
        raise ValueError(
            f"backend='triton' cannot be used with logits on {logits.device}: install triton and move them to a CUDA "
            "device, set TRITON_INTERPRET=1, or use backend='torch'"
        )
    use_triton = backend == "triton" or (backend == "auto" and HAS_TRITON and logits.is_cuda)
    read = read_logits_triton if use_triton else read_logits_reference
    return Reading(*read(logits, excluded, temperature, keys, token_ids, with_entropy))


def read_logits_reference(
    logits: torch.Tensor,
    excluded: torch.Tensor | None,
    temperature: float,
    keys: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute the fields of `Reading` in PyTorch; the arguments are those of `read_logits`."""
    scores = logits.float()
    if excluded is not None:
        scores.index_fill_(-1, excluded, -torch.inf)
    if temperature != 1.0:
        scores = scores / temperature
    if keys is None:
        score, column = scores.max(-1)
    else:
        noise = keyed_gumbel(keys, scores.shape[-1] if token_ids is None else token_ids)
        column = (scores + noise).argmax(-1)
        score = scores.gather(-1, column[:, None])[:, 0]
    log_probs = scores.log_softmax(-1)
    log_prob = log_probs.gather(-1, column[:, None])[:, 0]
    entropy = torch.special.entr(log_probs.exp()).sum(-1) if with_entropy else None
    return column if token_ids is None else token_ids[column], log_prob, entropy, score

"""Stand-in."""

from typing import NamedTuple

import torch


class Reading(NamedTuple):
    token: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    score: torch.Tensor


def read_logits(logits, excluded, *, temperature=1.0, keys=None, token_ids=None, with_entropy=False, backend="auto"):
    from .sampling import _shift, combine_keys

    scores = logits.float()
    if excluded is not None:
        scores.index_fill_(-1, excluded, -torch.inf)
    if temperature != 1.0:
        scores = scores / temperature
    total = scores.logsumexp(-1)
    if keys is None:
        score, token = scores.max(-1)
    else:
        ids = torch.arange(scores.shape[-1], device=keys.device) if token_ids is None else token_ids
        bits = _shift(combine_keys(keys[..., None], ids), 11)
        uniform = (bits.double() + 0.5) * 2.0**-53
        token = (scores - torch.log(-torch.log(uniform)).float()).argmax(-1)
        score = scores.gather(-1, token[:, None])[:, 0]
    entropy = torch.special.entr((scores - total[:, None]).exp()).sum(-1) if with_entropy else None
    if token_ids is not None:
        token = token_ids[token]
    return Reading(token, score - total, entropy, score)

"""The draft vocabulary: the tokens among which drafts are chosen.

A head step reads its hidden states against the whole of `lm_head`, and with 150,000 rows that costs more than a layer
of the head. Most text consists of few tokens, so a checkpoint may name the most frequent ones (`mrp calibrate` counts
them): drafts are then chosen among these alone. Verification reads all tokens, so the text stays the same; a draft
that needed another token is not confirmed. Modes that do not verify read all tokens too.

The config keeps the tokens as text, one bit per token id: 25 kB for 150,000 tokens, on one line.
"""

import base64
import binascii
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch


class DraftVocabulary(NamedTuple):
    """The tokens of a draft vocabulary.

    Attributes:
        ids: their ids in ascending order, [n].
        weight: their rows of `lm_head`'s weight, [n, H].
    """

    ids: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, model: torch.nn.Module) -> "DraftVocabulary | None":
        """Return the draft vocabulary of a model, or None if its config names none."""
        if model.config.draft_vocabulary is None:
            return None
        weight = model.lm_head.weight
        ids = torch.tensor(unpack_ids(model.config.draft_vocabulary), device=weight.device)
        return cls(ids, weight.index_select(0, ids))


def pack_ids(ids: Iterable[int]) -> str:
    """Return a set of token ids as text."""
    ids = set(ids)
    bits = bytearray(max(ids, default=-1) // 8 + 1)
    for token in ids:
        bits[token // 8] |= 1 << token % 8
    return base64.b64encode(bits).decode("ascii")


@lru_cache(maxsize=8)  # every `generate` call asks for the ids
def unpack_ids(text: str) -> tuple[int, ...]:
    """Return the token ids that `pack_ids` has turned into text, in ascending order.

    Raises:
        ValueError: if the text is not such a text, or holds no id.
    """
    try:
        bits = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not the text of a draft vocabulary: {error}") from error
    ids = tuple(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)
    if not ids:
        raise ValueError("the draft vocabulary holds no token")
    return ids

"""From logits to a token, its confidence and the entropy at every position; the noise of sampling is keyed.

A sample is argmax(processed logits / T + Gumbel noise), where the noise is a pure function of (seed, the row's own
key, absolute position, steps done in this block, token id). So a draft and its verification see the same noise, and
what a row samples depends neither on its neighbours nor on how many states were read before.
"""

from typing import NamedTuple

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Read(NamedTuple):
    """What was read off the logits of a state; all [..., B], float32 but `token`; scores [..., B, V]."""

    token: torch.Tensor
    confidence: torch.Tensor
    entropy: torch.Tensor | None
    scores: torch.Tensor | None


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), on int64 that wraps."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def combine_keys(*parts: torch.Tensor) -> torch.Tensor:
    """One int64 key from several integers that broadcast; order matters."""
    key = torch.zeros((), dtype=torch.long, device=parts[0].device)
    for part in parts:
        key = _mix((key ^ part) + _GOLDEN)
    return key


def row_keys(prompts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """A key per row that depends on its prompt and on how many equal prompts stand before it, [R].

    So a row draws the same sample alone and in a batch, and the copies of `num_return_sequences` differ.

    Args:
        prompts, valid: token ids and whether they count, [R, P], left-aligned.
    """
    index = torch.arange(prompts.shape[1], device=prompts.device)
    fingerprint = torch.where(valid, combine_keys(prompts, index), 0).sum(1)
    same = fingerprint[:, None] == fingerprint[None, :]
    return combine_keys(fingerprint, same.tril(-1).sum(1))


def keyed_gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise, float32 [..., V], one stream per int64 key [...]."""
    token = torch.arange(vocab_size, device=keys.device)
    bits = _shift(combine_keys(keys[..., None], token), 11)  # 53 random bits
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform)).float()


class Sampler:
    """Reads tokens off logits the way one call of `generate` asks for.

    Args:
        mask_token_id: never chosen, and outside every softmax.
        shaping: logits processors that shape the distribution (temperature, suppressed tokens, the user's own).
        truncation: those that cut it (top-k, top-p, ...): they bound what may be chosen, not its confidence.
        keys: per-row keys of the noise [R], or None for greedy.
        seed: drawn once per call.
        with_entropy, with_scores: whether to return these.
    """

    def __init__(self, mask_token_id, shaping, truncation, keys=None, seed=0, with_entropy=False, with_scores=False):
        self.mask_token_id = mask_token_id
        self.shaping = shaping
        self.truncation = truncation
        self.keys = None if keys is None else combine_keys(torch.as_tensor(seed, device=keys.device), keys)
        self.with_entropy = with_entropy
        self.with_scores = with_scores

    @property
    def samples(self) -> bool:
        return self.keys is not None

    @property
    def processes(self) -> bool:
        """Whether logits processors will look at the context."""
        return bool(self.shaping or self.truncation)

    def keep(self, rows: torch.Tensor):
        """Go on for these rows [n] only."""
        self.keys = None if self.keys is None else self.keys[rows]

    def read(self, logits, positions, steps, context) -> Read:
        """Token, confidence and entropy at every position.

        Args:
            logits: [R, ..., B, V].
            positions: absolute positions, [R, ..., B].
            steps: denoising steps done in the block at each state, [R, ...].
            context: ids that processors of the user's see, [R, P].
        """
        log_probs, scores = self._distributions(logits, context)
        token = self.with_noise(scores, positions, steps).argmax(-1)
        confidence = log_probs.gather(-1, token[..., None])[..., 0].exp()
        entropy = torch.special.entr(log_probs.exp()).sum(-1) if self.with_entropy else None
        return Read(token, confidence, entropy, scores if self.with_scores else None)

    def with_noise(self, scores, positions, steps) -> torch.Tensor:
        """Processed scores [R, ..., B, V] plus the noise of their state; unchanged in greedy decoding."""
        if not self.samples:
            return scores
        keys = self.keys.view(-1, *[1] * (positions.dim() - 1))
        return scores + keyed_gumbel(combine_keys(keys, positions, steps[..., None]), scores.shape[-1])

    def confidence_of(self, logits, tokens, context) -> torch.Tensor:
        """Probability of given tokens [R, ...] under logits [R, ..., V], temperature applied, not truncated."""
        log_probs, _ = self._distributions(logits, context)
        return log_probs.gather(-1, tokens[..., None])[..., 0].exp()

    def _distributions(self, logits, context):
        """(log softmax before truncation, processed scores that the choice is made from), float32 [R, ..., V]."""
        shape = logits.shape
        scores = self._forbid_mask(logits.float().reshape(-1, shape[-1]))
        if not self.processes:
            return scores.log_softmax(-1).view(shape), scores.view(shape)
        context = context.repeat_interleave(scores.shape[0] // shape[0], dim=0)
        for processor in self.shaping:
            scores = processor(context, scores)
        scores = self._forbid_mask(scores)  # a processor may have allowed it again, and no step would end then
        log_probs = scores.log_softmax(-1)
        for processor in self.truncation:
            scores = processor(context, scores)
        return log_probs.view(shape), self._forbid_mask(scores).view(shape)

    def _forbid_mask(self, scores):
        return scores.index_fill(-1, torch.tensor(self.mask_token_id, device=scores.device), -torch.inf)

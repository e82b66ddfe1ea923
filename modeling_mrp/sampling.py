"""Choosing tokens from logits with the settings of one `generate` call: token, confidence and entropy."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import TemperatureLogitsWarper

from .keyed_noise import combine_keys, keyed_gumbel
from .ops import read_logits


class TokenChoice(NamedTuple):
    """The token chosen at every position of a state, and what step rules need to know about the choice.

    Attributes:
        token: chosen token ids, [..., B].
        confidence: probability of the chosen token under the full softmax, float32 [..., B].
        entropy: entropy of that softmax in nats, float32 [..., B]; None unless asked for.
        scores: processed scores that the token was chosen from, without noise, float32 [..., B, V]; None unless asked
            for.
        score: the chosen token's entry in them, float32 [..., B]: NaN where any of them is NaN, and minus infinity
            where processors have left no token.
    """

    token: torch.Tensor
    confidence: torch.Tensor
    entropy: torch.Tensor | None
    scores: torch.Tensor | None
    score: torch.Tensor


class Sampler:
    """Chooses tokens from logits with the settings of one `generate` call.

        logits -> mask id excluded -> shaping processors -> softmax: confidence and entropy
                                            |
                                            +-> truncating processors -> + noise -> argmax: token

    Args:
        mask_token_id: id of [MASK]; it is never chosen and has no part in any softmax.
        shaping: logits processors that shape the distribution (temperature, suppressed tokens, the user's own).
        truncation: logits processors that truncate it (top-k, top-p, ...). They restrict which token may be chosen
            and leave its confidence unchanged.
        keys: one key per row for the noise [R], or None for greedy decoding.
        seed: seed of the noise, drawn once per call.
        with_entropy: whether `read` returns the entropy.
        with_scores: whether `read` returns the scores.
        reads_context: whether a logits processor may depend on the tokens decoded so far.
    """

    def __init__(
        self,
        mask_token_id: int,
        shaping: Sequence[Callable],
        truncation: Sequence[Callable],
        keys: torch.Tensor | None = None,
        seed: int = 0,
        with_entropy: bool = False,
        with_scores: bool = False,
        reads_context: bool = False,
    ) -> None:
        self._mask_index = torch.tensor([mask_token_id])
        self.shaping = shaping
        self.truncation = truncation
        # a temperature by itself, the most common processor, reads no tokens and needs no pass of its own
        plain = not truncation and [type(processor) for processor in shaping] in ([], [TemperatureLogitsWarper])
        self.temperature = (shaping[0].temperature if shaping else 1.0) if plain else None
        self.keys = None if keys is None else combine_keys(torch.as_tensor(seed, device=keys.device), keys)
        self.with_entropy = with_entropy
        self.with_scores = with_scores
        self.reads_context = reads_context

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled (otherwise the choice is greedy)."""
        return self.keys is not None

    @property
    def processes(self) -> bool:
        """Whether there are logits processors beside a temperature; they read the tokens decoded so far."""
        return self.temperature is None

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but those with the given indices [n]."""
        self.keys = None if self.keys is None else self.keys[rows]

    def noise_keys(self, positions: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the key of the noise at every position.

        Args:
            positions: absolute positions, [R, ..., B].
            steps: denoising steps done in the block at each state, [R, ...].
        """
        return combine_keys(self.keys.view(-1, *[1] * (positions.dim() - 1)), positions, steps[..., None])

    def read(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor | None,
        steps: torch.Tensor | None,
        context: torch.Tensor | None,
    ) -> TokenChoice:
        """Choose a token at every position of whole states; `choose` takes positions one by one.

        Args:
            logits: logits of the states, [R, ..., B, V]; they may be changed.
            positions: absolute positions, [R, ..., B]; read only when sampling.
            steps: denoising steps done in the block at each state, [R, ...]; read only when sampling.
            context: token ids that logits processors see, [R, P]; read only when there are processors.
        """
        shape = logits.shape[:-1]
        keys = self.noise_keys(positions, steps).flatten() if self.samples else None
        context = context.repeat_interleave(shape[1:].numel(), dim=0) if self.processes else None
        choice = self.choose(logits.flatten(0, -2), keys, context)
        return TokenChoice(*(None if field is None else field.view(*shape, *field.shape[1:]) for field in choice))

    def choose(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor | None,
        context: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
    ) -> TokenChoice:
        """Choose a token at each of N positions.

        Args:
            logits: the logits, [N, V]; they may be changed.
            keys: keys of the noise, [N]; None for a greedy choice.
            context: token ids that logits processors see, [N, P]; read only when there are processors.
            token_ids: ids that the logits are of, [V]; None: all tokens in order. Only without processors.
        """
        if self.processes or self.with_scores:
            return self._choose_from_scores(logits, keys, context)
        excluded = self._mask(logits.device) if token_ids is None else None
        reading = read_logits(
            logits,
            excluded,
            temperature=self.temperature,
            keys=keys,
            token_ids=token_ids,
            with_entropy=self.with_entropy,
        )
        return TokenChoice(reading.token, reading.log_prob.exp(), reading.entropy, None, reading.score)

    def _choose_from_scores(self, logits, keys, context) -> TokenChoice:
        log_probs, scores = self._distributions(logits, context)
        noisy = scores if keys is None else scores + keyed_gumbel(keys, scores.shape[-1])
        token = noisy.argmax(-1)
        score, confidence = (values.gather(-1, token[:, None])[:, 0] for values in (scores, log_probs))
        entropy = torch.special.entr(log_probs.exp()).sum(-1) if self.with_entropy else None
        return TokenChoice(token, confidence.exp(), entropy, scores if self.with_scores else None, score)

    def confidence_of(self, logits: torch.Tensor, tokens: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Return the probability of given tokens [N] under logits [N, V], before truncation.

        The mask token has probability 0.
        """
        log_probs, _ = self._distributions(logits, context)
        return log_probs.gather(-1, tokens[:, None])[:, 0].exp()

    def _distributions(self, logits, context):
        """Return the log softmax before truncation and the scores that tokens are chosen from, float32 [N, V]."""
        scores = self._forbid_mask(logits.float())
        for processor in self.shaping:
            scores = processor(context, scores)
        if self.shaping:
            # again: a processor may have allowed the mask token, and a step that chose it would never reveal anything
            scores = self._forbid_mask(scores)
        log_probs = scores.log_softmax(-1)
        for processor in self.truncation:
            scores = processor(context, scores)
        return log_probs, self._forbid_mask(scores) if self.truncation else scores

    def _forbid_mask(self, scores):
        return scores.index_fill(-1, self._mask(scores.device), -torch.inf)

    def _mask(self, device: torch.device) -> torch.Tensor:
        # the index goes to the device once, not at every read: copying it there makes the host wait
        self._mask_index = self._mask_index.to(device)
        return self._mask_index

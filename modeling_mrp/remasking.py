"""Remasking: taking back tokens that were revealed, by the head's judgement or by the backbone's own."""

import torch

from .block_state import BlockState
from .cached_forwards import CachedForwards
from .options import DecodingOptions
from .reader import Reader
from .step_rules import confidence_rank
from .verification import BackboneStep


class HeadRemasker:
    """Masks reveals of a backbone step again where the head, which has seen all of them, doubts them.

    The most confident reveal of a step always stays, so a block ends after at most block_size rounds.

    Args:
        forwards: forwards of the backbone and of the head.
        reader: computes confidences from hidden states.
        options: decoding options of this call; `remask_criterion` selects how the head is asked.
    """

    def __init__(self, forwards: CachedForwards, reader: Reader, options: DecodingOptions) -> None:
        self.forwards = forwards
        self.reader = reader
        self.threshold = options.keep_threshold
        self.criterion = {
            "leave_one_out": self._confidence_when_left_out,
            "confidence": self._confidence,
            "residual": self._residual,
        }[options.remask_criterion]
        # keep a token whose confidence is high, or whose residual is small
        self.keeps = torch.le if options.remask_criterion == "residual" else torch.ge

    def remask(self, state: BlockState, step: BackboneStep, context: torch.Tensor | None) -> torch.Tensor:
        """Return the block after a step without the reveals that the head doubts, [R, B].

        Args:
            state: the rows; `hidden` holds the backbone's hidden states before the step.
            step: the backbone's step.
            context: finished tokens for the logits processors, or None.
        """
        surest = confidence_rank(step.confidence, step.revealed) == 0
        asked = step.revealed & ~surest & state.running[:, None]  # reveals that the head judges, [R, B]
        # waits for the device: where there is nothing to judge, no head forward may run (every forward is counted).
        # The most reveals of a row and those of all rows, in one number: one wait
        judged, base = asked.sum(1), asked.numel() + 1
        most, total = divmod(int(judged.max() * base + judged.sum()), base)
        if not most:
            return step.after
        value = self.criterion(state, step, asked, most, total, context)
        state.note_faults(asked, value, by_head=True)
        return torch.where(asked & ~self.keeps(value, self.threshold), state.mask_token_id, step.after)

    def _residual(self, state, step, asked, most, total, context) -> torch.Tensor:
        """How far the corrected logit of each token is from the backbone's on the state before the step, [R, B]."""
        hidden, live = state.hidden[:, None], asked.any(1)[:, None]
        residual = self.forwards.head(state, step.before[:, None], hidden, live)[:, 0] - state.hidden
        return self.reader.logit_of(self.reader.select(residual, asked, total), step.after).abs()

    def _confidence(self, state, step, asked, most, total, context) -> torch.Tensor:
        """The corrected confidence of each token on the state after the step, [R, B]."""
        hidden, live = state.hidden[:, None], asked.any(1)[:, None]
        corrected = self.forwards.head(state, step.after[:, None], hidden, live)[:, 0]
        return self.reader.confidence_of(self.reader.select(corrected, asked, total), step.after, context)

    def _confidence_when_left_out(self, state, step, asked, most, total, context) -> torch.Tensor:
        """The corrected confidence of each token where it alone of the reveals is masked again, [R, B].

        One head step reads a state per token that is judged, as many as the row with the most of them needs:

            after the step       a b c d      b, c and d are judged
            state 0              a _ c d      asks for b
            state 1              a b _ d      asks for c
            state 2              a b c _      asks for d
        """
        after, size = step.after, state.block_size
        # judged positions first, in order: state g of a row masks the g-th of them
        where = asked.long().argsort(dim=1, descending=True, stable=True)[:, :most]  # [R, G]
        live = asked.gather(1, where)
        masked = torch.arange(size, device=after.device) == where[..., None]  # [R, G, B], one position per state
        blocks = torch.where(masked, state.mask_token_id, after[:, None])
        hidden = state.hidden[:, None].expand(-1, most, -1, -1)
        # [R, G, B, H], read at the masked position only
        corrected = self.forwards.head(state, blocks, hidden, live, total_live=total)
        at = where[..., None, None].expand(-1, -1, 1, corrected.shape[-1])
        selection = self.reader.select(corrected.gather(2, at)[:, :, 0], live, total)
        confidence = self.reader.confidence_of(selection, after.gather(1, where), context)  # [R, G]
        return torch.zeros(after.shape, device=after.device).scatter(1, where, confidence)


def revoke_doubted_tokens(
    state: BlockState, step: BackboneStep, confidence: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Return the block after a step with doubted tokens of earlier steps masked again, [R, B].

    This is the narrow-out half of wide-in / narrow-out decoding (arXiv 2507.18578). The least confident tokens are
    taken back first, and always fewer than the step reveals, so a block ends after at most block_size rounds whatever
    the thresholds are.

    Args:
        state: the rows, before the step is written.
        step: the backbone's step.
        confidence: confidence of each token of the block if it alone were masked, [R, B].
        threshold: confidence below which a token is doubted.
    """
    doubted = state.revocable & (confidence < threshold)
    fewer = confidence_rank(-confidence, doubted) < step.revealed.sum(-1, keepdim=True) - 1
    return torch.where(doubted & fewer, state.mask_token_id, step.after)

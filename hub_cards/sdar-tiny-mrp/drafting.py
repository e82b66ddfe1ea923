"""Drafting: the candidate states of a round, guessed before the backbone verifies them."""

import torch

from .block_state import BlockState
from .cached_forwards import CachedForwards, Candidates
from .options import DecodingOptions
from .sampling import Sampler


def current_states(state: BlockState) -> Candidates:
    """Return one candidate per running row: its current block as it is."""
    stream = torch.ones(1, dtype=torch.long, device=state.tokens.device)
    return Candidates(state.block[:, None], state.running[:, None], stream)


def with_shadow(state: BlockState, candidates: Candidates) -> Candidates:
    """Add a shadow of masks to the current states: it asks for each of their tokens as if that one were masked.

    A block that has just been opened holds no generated token to ask about, so its shadow is dead.
    """
    shadow = torch.full_like(candidates.blocks, state.mask_token_id)
    asks = state.revocable.any(-1, keepdim=True)  # [R, 1]
    return Candidates(
        torch.cat([candidates.blocks, shadow], dim=1),
        torch.cat([candidates.live, candidates.live & asks], dim=1),
        torch.cat([candidates.stream, -candidates.stream]),
    )


class ChainDrafter:
    """Drafts a chain of states per row, each of them one more step of the step rule on estimated logits.

        candidate 0    the current block: it already holds the last round's backbone step, which is certain
        candidate 1    candidate 0 after a step on the logits that the head estimates for it
        candidate 2    candidate 1 after a step on the logits that the head estimates for it, and so on

    With `mrp_draft="self"` there is no head: every step reads the backbone's logits of the last round.

    Args:
        forwards: forwards of the backbone and of the head.
        sampler: chooses tokens from logits.
        options: decoding options of this call.
    """

    def __init__(self, forwards: CachedForwards, sampler: Sampler, options: DecodingOptions) -> None:
        self.forwards = forwards
        self.sampler = sampler
        self.rule = options.step_rule
        self.candidates = options.candidates
        self.uses_head = options.mrp_draft == "head"
        self.steps_per_head_step = options.mrp_drafts_per_head_step
        self.threshold = options.mrp_draft_threshold

    def draft(self, state: BlockState, context: torch.Tensor | None) -> Candidates:
        """Draft candidates for all rows, as many as the options allow and at least one row can use.

        Rows leave the chain one by one: when their state is settled, or when a draft is not confident enough. Their
        later candidates are dead. A row that has just opened its block has no logits to draft from, so candidate 0 is
        its only one. `live` is therefore a prefix of each row's candidates.

        Args:
            state: the rows; their `proposed` counters are raised.
            context: finished tokens for the logits processors, or None.
        """
        block, hidden = state.block, state.hidden  # [R, B], [R, B, H]
        blocks, live = [block], [state.running]
        drafting = state.running & ~state.opening  # rows whose chain goes on, [R]
        logits, placement = None, None
        for depth in range(1, self.candidates if state.running_rows > state.opening_rows else 1):
            if self.uses_head and (depth - 1) % self.steps_per_head_step == 0:
                # one placement for the whole chain: rows that stop drafting keep their slots, unread
                placement = self.forwards.place_states(state, drafting[:, None]) if placement is None else placement
                hidden = self.forwards.head(state, block[:, None], hidden[:, None], drafting[:, None], placement)[:, 0]
                logits = None
            if logits is None:
                logits = self.forwards.model.logits(hidden)  # [R, B, V]
            choice = self.sampler.read(logits, state.positions, state.steps + depth - 1, context)
            masked = block == state.mask_token_id
            state.note_faults(masked & drafting[:, None], choice.confidence, choice.score, by_head=self.uses_head)
            reveal = self.rule(choice.confidence, choice.entropy, masked)
            if self.threshold is not None:
                lowest = choice.confidence.masked_fill(~reveal, torch.inf).amin(-1)
                drafting = drafting & (lowest >= self.threshold)
            block = torch.where(reveal, choice.token, block)
            drafting = drafting & ~state.settled(block)  # a settled state needs no logits, so no candidate either
            # waits for the device: a head step or a candidate that no row uses would cost more than the wait
            if not drafting.any():
                break
            blocks.append(block)
            live.append(drafting)
            state.proposed[:, depth] += drafting
        stream = torch.arange(1, len(blocks) + 1, device=block.device)
        return Candidates(torch.stack(blocks, dim=1), torch.stack(live, dim=1), stream)

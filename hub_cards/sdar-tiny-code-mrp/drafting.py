"""Drafting: the candidate states of a round, guessed before the backbone verifies them."""

import torch

from .block_state import BlockState
from .cached_forwards import CachedForwards, Candidates
from .masks import CLEAN
from .options import DecodingOptions
from .sampling import Sampler


def current_states(state: BlockState) -> Candidates:
    """Return one candidate per running row: its current block as it is."""
    live = state.running[:, None]
    stream = torch.ones_like(live, dtype=torch.long)
    return Candidates(state.block[:, None], live, stream, total_live=state.running_rows)


def with_shadow(state: BlockState, candidates: Candidates) -> Candidates:
    """Add a shadow of masks to the current states: it asks for each of their tokens as if that one were masked.

    A block that has just been opened holds no generated token to ask about, so its shadow is dead.
    """
    shadow = torch.full_like(candidates.blocks, state.mask_token_id)
    asks = state.revocable.any(-1, keepdim=True)  # [R, 1]
    return Candidates(
        torch.cat([candidates.blocks, shadow], dim=1),
        torch.cat([candidates.live, candidates.live & asks], dim=1),
        torch.cat([candidates.stream, -candidates.stream], dim=1),
    )


class ChainDrafter:
    """Drafts a chain of states per row, each of them one more step of the step rule on estimated logits.

        candidate 0    the current block: it already holds the last round's backbone step, which is certain
        candidate 1    candidate 0 after a step on the logits that the head estimates for it
        candidate 2    candidate 1 after a step on the logits that the head estimates for it, and so on

    With `mrp_draft="self"` there is no head: every step reads the backbone's logits of the last round.

    Across the block border. A draft that completes its block is followed by the *opening state* of the next block, all
    masked, as the last candidate of its row. The complete draft is labelled as a clean block, so the opening state
    sees it as its context. If the backbone confirms the draft, the same forward has also opened the next block:

        candidate 1    a b _ d
        candidate 2    a b c d                                  complete: read as a clean block
        candidate 3             _ _ _ _                         the next block, which sees a b c d

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
        # a processor that reads the tokens so far would have to see each candidate's own tokens at the border
        self.crosses_border = not sampler.reads_context

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
        never = torch.zeros_like(state.running)
        blocks, live, complete, opens = [block], [state.running], [never], [never]  # per candidate: [R, B], then [R]
        drafting = state.running & ~state.opening  # rows whose chain goes on, [R]
        drafting_rows, complete_rows = state.running_rows - state.opening_rows, 0  # numbers that the host knows
        total_live = state.running_rows
        crossing, logits = False, None
        for depth in range(1, self.candidates if drafting_rows else 1):
            completed, completed_rows = complete[-1], complete_rows  # their next candidate is an opening state
            complete.append(never)
            complete_rows = 0
            if drafting_rows:
                if self.uses_head and (depth - 1) % self.steps_per_head_step == 0:
                    states = block[:, None], hidden[:, None], drafting[:, None]
                    hidden = self.forwards.head(state, *states, drafting_rows)[:, 0]
                    logits = None
                if logits is None:
                    logits = self.forwards.model.logits(hidden)  # [R, B, V]
                block, drafted = self._next_draft(state, block, drafting, logits, depth, context)
                settled = state.settled(block)
                if self.crosses_border and depth + 1 < self.candidates:  # there is room for an opening state
                    complete[-1] = drafted & settled & state.continues_after(block)
                drafting = drafted & ~settled  # a settled state needs no logits
                state.proposed[:, depth] += drafting | complete[-1]
                # waits for the device: a head step or a candidate that no row uses would cost more than the wait
                base = len(block) + 1  # two numbers of rows in one: one wait
                complete_rows, drafting_rows = divmod(int(drafting.sum() + base * complete[-1].sum()), base)
            if not (drafting_rows or complete_rows or completed_rows):
                break
            total_live += drafting_rows + complete_rows + completed_rows
            blocks.append(torch.where(completed[:, None], state.mask_token_id, block))
            live.append(drafting | complete[-1] | completed)
            opens.append(completed)
            crossing = crossing or completed_rows > 0
        return self._candidates(blocks, live, complete, opens, crossing, total_live)

    def _next_draft(self, state, block, drafting, logits, depth, context):
        """Take a step on estimated logits [R, B, V]; return the states [R, B] and the rows that dare the step [R]."""
        choice = self.sampler.read(logits, state.positions, state.steps + depth - 1, context)
        masked = block == state.mask_token_id
        state.note_faults(masked & drafting[:, None], choice.confidence, choice.score, by_head=self.uses_head)
        reveal = self.rule(choice.confidence, choice.entropy, masked)
        if self.threshold is not None:
            lowest = choice.confidence.masked_fill(~reveal, torch.inf).amin(-1)
            drafting = drafting & (lowest >= self.threshold)
        return torch.where(reveal, choice.token, block), drafting

    def _candidates(self, blocks, live, complete, opens, crossing: bool, total_live: int) -> Candidates:
        """Stack the candidates of all depths."""
        live, opens = torch.stack(live, dim=1), torch.stack(opens, dim=1)  # [R, C]
        complete = torch.stack(complete[: live.shape[1]], dim=1)
        number = torch.arange(1, live.shape[1] + 1, device=live.device)
        # a complete draft is a clean block to the opening state after it, and hidden from the drafts of its own block
        stream = torch.where(complete, CLEAN, number)
        opens = opens if crossing else None
        return Candidates(torch.stack(blocks, dim=1), live, stream, total_live=total_live, opens=opens)

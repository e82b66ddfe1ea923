"""The decoding engine: one loop for every mode.

A round is one forward of the backbone over candidate states of the current block of every row. The backbone's own
step on the last state that it confirms is always taken, so each round gains at least that step. The modes differ in
what else a round does: `spec` drafts the further candidates, `direct` and `remask` let the head change the state
after the step. `remask` by the backbone itself takes back tokens of earlier steps, fewer than the step reveals.
"""

from typing import NamedTuple

import torch

from .block_cache import BlockCache
from .block_state import BlockState
from .masks import CLEAN, PADDING, Tokens
from .options import DecodingOptions
from .sampling import Sampler
from .step_rules import confidence_rank

BACKBONE, HEAD, PREFILL = 0, 1, 2  # columns of BlockState.forwards
WORTH_DROPPING = 0.25  # share of ended rows at which the cache is copied without them


class Candidates(NamedTuple):
    """States of the current block that one forward reads.

    Attributes:
        blocks: [R, C, B]; live: which are real, [R, C]; stream: what the masks know them by, [C], see masks.py.
    """

    blocks: torch.Tensor
    live: torch.Tensor
    stream: torch.Tensor


class Place(NamedTuple):
    """Where the tokens of a forward stand, [R, Q], and the mask of what they see; the cache has slots for them."""

    positions: torch.Tensor
    mask: torch.Tensor


class Decoder:
    """Decodes the rows of one `BlockState`.

    Args:
        model: an `MRPForDiffusionLM`.
        state: the rows.
        options: how.
        sampler: reads tokens off logits.
        pad_token_id: fills what logits processors see of shorter rows.
    """

    def __init__(self, model, state: BlockState, options: DecodingOptions, sampler: Sampler, pad_token_id: int = 0):
        self.model = model
        self.state = state
        self.options = options
        self.sampler = sampler
        self.pad_token_id = pad_token_id
        self.rule = options.step_rule
        # a finished prompt block and the next one, or K candidates, behind the last block but one
        capacity = state.width + max(options.candidates, 2) * state.block_size
        if options.mrp_mode == "remask" and not options.revokes:
            capacity += state.block_size**2  # leave-one-out states
        self.cache = BlockCache(len(state.tokens), capacity, state.block_size, state.tokens.device)

    def run(self, on_progress):
        """Decode until no row runs; `on_progress(state)` is called after every round and may stop rows."""
        whole, rows = self.state, torch.arange(len(self.state.tokens), device=self.state.tokens.device)
        while self.state.running_rows:
            self.decode_round()
            whole.put(rows, self.state)
            on_progress(whole)
            self.state.running = whole.running[rows]
            self.state.synchronise()
            rows = rows[self.drop_ended_rows()]

    def decode_round(self):
        """One forward of the backbone, and what the mode makes of it."""
        self.context = self.state.finished_tokens(self.pad_token_id) if self.sampler.processes else None
        candidates = self.draft_chain()
        if self.options.revokes:
            hidden, shadow = self.forward_candidates(self.with_shadow(candidates)).split(1, dim=1)
            self.shadow_hidden = shadow[:, 0]
        else:
            hidden = self.forward_candidates(candidates)
        self.verify_and_step(candidates, hidden)
        if self.options.mrp_mode == "direct":
            self.step_from_corrected_logits()
        self.state.advance()

    def drop_ended_rows(self) -> torch.Tensor | slice:
        """Go on without the rows that have ended, once they are many; which rows [n] of the state are left."""
        state, rows = self.state, len(self.state.tokens)
        few = state.running_rows > (1 - WORTH_DROPPING) * rows
        if few or not state.running_rows or self.sampler.with_scores:  # logits rows are too wide to copy
            return slice(None)
        running = state.running.nonzero()[:, 0]
        self.state = state.take(running)
        self.cache.keep(running)
        self.sampler.keep(running)
        return running

    # -- drafts

    def draft_chain(self) -> Candidates:
        """The current state and up to K - 1 drafted ones behind it.

        The current state already holds the backbone's certain step, the first draft of the round. A row that has
        just opened its block knows no logits to draft from and has one candidate.
        """
        state = self.state
        block, hidden = state.block, state.hidden
        blocks, live = [block], [state.running]
        drafting = state.running & ~state.opening
        logits, place = None, None
        for depth in range(1, self.options.candidates if state.running_rows > state.opening_rows else 1):
            if self.options.mrp_draft == "head" and (depth - 1) % self.options.mrp_drafts_per_head_step == 0:
                # rows that stop drafting keep their place: what comes of them is not read
                place = self.place_of_states(drafting[:, None]) if place is None else place
                hidden = self.corrected_hidden(block[:, None], hidden[:, None], drafting[:, None], place)[:, 0]
                logits = None
            if logits is None:
                logits = self.model.logits(hidden)
            read = self.sampler.read(logits, state.positions, state.steps + depth - 1, self.context)
            reveal = self.rule(read.confidence, read.entropy, block == state.mask_token_id)
            if self.options.mrp_draft_threshold is not None:
                lowest = read.confidence.masked_fill(~reveal, torch.inf).amin(-1)
                drafting = drafting & (lowest >= self.options.mrp_draft_threshold)
            block = torch.where(reveal, read.token, block)
            drafting = drafting & ~state.settled(block)  # a settled state needs no logits
            if not drafting.any():
                break
            blocks.append(block)
            live.append(drafting)
            state.proposed[:, depth] += drafting
        stream = torch.arange(1, len(blocks) + 1, device=block.device)
        return Candidates(torch.stack(blocks, dim=1), torch.stack(live, dim=1), stream)

    def with_shadow(self, candidates: Candidates) -> Candidates:
        """The current state and its shadow of masks, which asks for each of its tokens again."""
        shadow = torch.full_like(candidates.blocks, self.state.mask_token_id)
        asks = self.state.revocable.any(-1, keepdim=True)  # a block that has just opened has nothing to ask about
        return Candidates(
            torch.cat([candidates.blocks, shadow], dim=1),
            torch.cat([candidates.live, candidates.live & asks], dim=1),
            torch.cat([candidates.stream, -candidates.stream]),
        )

    # -- forwards

    def forward_candidates(self, candidates: Candidates) -> torch.Tensor:
        """One forward of the backbone: [pending clean blocks | candidates]; h of the candidates, [R, C, B, H].

        The clean blocks ride along and are committed to the cache, so no forward only stores. A state and its shadow
        are one forward too, over twice the block's positions.
        """
        state = self.state
        blocks, live = candidates.blocks, candidates.live
        positions = state.positions[:, None].expand_as(blocks)
        stream = candidates.stream[:, None].expand_as(blocks)
        real = live[..., None].expand_as(blocks)
        if not state.max_pending:
            state.forwards[:, BACKBONE] += state.running
            return self._backbone(blocks, positions, stream, real)

        # group g of a row is its clean block g, or behind these its candidate g - pending
        pending, count = (state.pending * state.running)[:, None], live.shape[1]
        groups = int((pending[:, 0] + live.sum(1)).max())
        group = torch.arange(groups, device=pending.device)[None]
        number = (group - pending).clamp(0, count - 1)
        is_candidate = (group >= pending) & (group - pending < count)
        fields = (
            field.gather(1, number[..., None].expand(-1, -1, state.block_size))
            for field in (blocks, positions, stream, real)
        )
        ids, positions, stream, real = fields
        real = real & is_candidate[..., None]
        clean_ids, clean_positions, clean_real = state.clean_blocks(state.max_pending)
        fill = groups - state.max_pending
        ids, positions, stream, real = (
            torch.where(_extend(clean_real, fill), _extend(ours, fill), theirs)
            for ours, theirs in (
                (clean_ids, ids),
                (clean_positions, positions),
                (torch.full_like(clean_ids, CLEAN), stream),
                (clean_real, real),
            )
        )
        hidden = self._backbone(ids, positions, stream, real)

        state.forwards[:, BACKBONE] += state.running
        state.forwards[:, PREFILL] += state.running & (state.forwards[:, BACKBONE] == 1) & (state.pending > 0)
        self._commit(clean_ids, clean_positions, clean_real, hidden[:, : state.max_pending])
        at = (pending + torch.arange(count, device=pending.device)).clamp(max=groups - 1)
        return hidden.gather(1, at[..., None, None].expand(-1, -1, *hidden.shape[2:]))

    def _backbone(self, ids, positions, stream, real) -> torch.Tensor:
        """h of a row's groups of tokens, [R, G, B, H]; all arguments are [R, G, B]."""
        place = self.place(positions, stream, real)
        hidden = self.model.backbone_hidden_states(ids.flatten(1), *place, self.cache)
        return hidden.unflatten(1, ids.shape[1:])

    def _commit(self, ids, positions, real, hidden):
        """Keep the clean blocks' keys and values, after the head has added its own from their hidden states."""
        state = self.state
        if self.options.uses_head:
            place = self.place(positions, torch.full_like(ids, CLEAN), real)
            self.model.corrected_hidden_states(ids.flatten(1), hidden.flatten(1, 2), *place, self.cache)
            state.forwards[:, HEAD] += real.any(-1).any(-1)
        committed = state.pending * state.running
        self.cache.commit(committed * state.block_size, state.next_longest)
        state.pending = state.pending - committed

    def corrected_hidden(self, blocks, hidden, real, place: Place | None = None) -> torch.Tensor:
        """acc_k, [R, G, B, H], of states [R, G, B] of the current block after hidden states [R, G, B, H].

        The states do not see one another; `real` [R, G] marks those that count. `place` is that of the first of
        several head steps in a row, on as many states.
        """
        place = self.place_of_states(real) if place is None else place
        corrected = self.model.corrected_hidden_states(blocks.flatten(1), hidden.flatten(1, 2), *place, self.cache)
        self.state.forwards[:, HEAD] += real.any(1)
        return corrected.unflatten(1, blocks.shape[1:])

    def place_of_states(self, real: torch.Tensor) -> Place:
        """The place of states of the current block that do not see one another; `real` [R, G]: those that count."""
        positions = self.state.positions[:, None].expand(-1, real.shape[1], -1)
        stream = torch.arange(1, real.shape[1] + 1, device=real.device)[None, :, None].expand_as(positions)
        return self.place(positions, stream, real[..., None].expand_as(positions))

    def place(self, positions, stream, real) -> Place:
        """The place of groups of tokens [R, G, B] that all take the clean prefix as context."""
        segment = torch.where(real, 0, PADDING)
        block = positions // self.state.block_size
        position = positions if self.options.revokes else None
        tokens = Tokens(segment, block, stream, torch.full_like(stream, CLEAN), position).map(lambda f: f.flatten(1))
        return Place(positions.flatten(1), self.model.attention_mask(tokens, self.cache.place(tokens)))

    # -- verification and steps

    def verify_and_step(self, candidates: Candidates, hidden: torch.Tensor):
        """Go to the last candidate that the backbone confirms, and take the backbone's own step on it."""
        state, row = self.state, torch.arange(len(hidden), device=hidden.device)
        count = candidates.live.shape[1]
        depth = torch.arange(count, device=hidden.device)
        positions = state.positions[:, None].expand_as(candidates.blocks)
        read = self.sampler.read(self.model.logits(hidden), positions, state.steps[:, None] + depth, self.context)
        masked = candidates.blocks == state.mask_token_id
        reveal = self.rule(read.confidence, read.entropy, masked)
        following = torch.where(reveal, read.token, candidates.blocks)  # the backbone's step on every candidate

        confirmed = self._confirmed(candidates, read, following)
        last = confirmed.sum(1) - 1  # the first candidate is certain
        state.accepted += torch.nn.functional.pad(confirmed & (depth > 0), (0, state.accepted.shape[1] - count))
        drafted = candidates.blocks[row, last]
        # masked in the first j candidates on the way: revealed at the step on the j-th
        steps = state.steps[:, None] + (masked & (depth <= last[:, None])[..., None]).sum(1) - 1
        if count > 1:
            state.write(drafted, state.running, steps, by_head=self.options.mrp_draft == "head")
        if self.sampler.with_scores:
            self._write_path_scores(candidates, following, read.scores, last)
        state.hidden = hidden[row, last]
        step = following[row, last]
        if self.options.revokes:
            step = self.narrow_out(drafted, reveal[row, last], step)
            steps = steps.masked_fill(step == state.mask_token_id, -1)
        elif self.options.mrp_mode == "remask":
            step = self.remask(drafted, reveal[row, last], read.confidence[row, last], step)
        state.write(step, state.running, steps)
        state.steps = state.steps + torch.where(state.running, last + 1, 0)
        state.opening = torch.zeros_like(state.opening)

    def _confirmed(self, candidates: Candidates, read, following) -> torch.Tensor:
        """Which candidates the backbone reaches too, [R, C]: a prefix of each chain, the first always."""
        first = torch.ones_like(candidates.live[:, :1])
        if candidates.live.shape[1] == 1:
            return first
        drafted = candidates.blocks[:, 1:]
        agrees = (following[:, :-1] == drafted).all(-1)
        if self.options.mrp_acceptance == "token":
            new = drafted != candidates.blocks[:, :-1]
            sure = read.confidence[:, :-1] >= self.options.mrp_acceptance_floor
            agrees = agrees | (((read.token[:, :-1] == drafted) & sure) | ~new).all(-1)
        return torch.cat([first, agrees & candidates.live[:, 1:]], dim=1).cumprod(1).bool()

    def _write_path_scores(self, candidates: Candidates, following, scores, last):
        """Scores of every token revealed on the way from the first candidate through the step on the last."""
        state, row = self.state, torch.arange(len(last), device=last.device)
        for depth in range(candidates.live.shape[1]):
            beyond = (depth < last) & state.running
            ends = (depth == last) & state.running
            after = candidates.blocks[:, min(depth + 1, candidates.live.shape[1] - 1)]
            after = torch.where(ends[:, None], following[row, last], after)
            changed = (after != candidates.blocks[:, depth]) & (beyond | ends)[:, None]
            state.write_scores(scores[:, depth], changed)

    def step_from_corrected_logits(self):
        """`direct`: up to K steps by the same rule on corrected logits, unverified."""
        state, hidden, place = self.state, self.state.hidden, None
        for _ in range(self.options.mrp_steps):
            block = state.block
            stepping = state.running & ~state.settled(block)
            if not stepping.any():
                return
            place = self.place_of_states(stepping[:, None]) if place is None else place
            hidden = self.corrected_hidden(block[:, None], hidden[:, None], stepping[:, None], place)[:, 0]
            read = self.sampler.read(self.model.logits(hidden), state.positions, state.steps, self.context)
            reveal = self.rule(read.confidence, read.entropy, block == state.mask_token_id)
            if self.sampler.with_scores:
                state.write_scores(read.scores, reveal & stepping[:, None])
            after = torch.where(reveal, read.token, block)
            state.write(after, stepping, state.steps[:, None].expand_as(block), by_head=True)
            state.steps = state.steps + stepping.long()

    # -- remask

    def narrow_out(self, before, proposed, after) -> torch.Tensor:
        """The state [R, B] that is left of a step once tokens of earlier steps that are doubted now are masked again.

        A token is doubted when its confidence, were it alone masked, is below the threshold (the shadow has asked
        this in the very forward that the step reads). The least sure go first, and fewer than the step reveals, so a
        block ends after at most block_size rounds whatever the thresholds are.

        Args:
            before, after: the state before the step and with everything that it reveals, [R, B].
            proposed: the positions that it reveals, [R, B].
        """
        confidence = self.sampler.confidence_of(self.model.logits(self.shadow_hidden), before, self.context)
        doubted = self.state.revocable & (confidence < self.options.keep_threshold)
        fewer = confidence_rank(-confidence, doubted) < proposed.sum(-1, keepdim=True) - 1
        return torch.where(doubted & fewer, self.state.mask_token_id, after)

    def remask(self, before, proposed, confidence, after) -> torch.Tensor:
        """The state [R, B] that is left of a step once the head has masked its doubtful reveals again.

        Args:
            before, after: the state before the step and with everything that it proposes, [R, B].
            proposed: the positions that it reveals, [R, B].
            confidence: the backbone's, [R, B]; the surest proposal always stays.
        """
        state, options = self.state, self.options
        surest = confidence_rank(confidence, proposed) == 0
        doubted = proposed & ~surest & state.running[:, None]
        if not doubted.any():
            return after
        if options.remask_criterion == "residual":
            keep = self._residual_size(before, after, doubted.any(1)) <= options.keep_threshold
        elif options.remask_criterion == "confidence":
            corrected = self.corrected_hidden(after[:, None], state.hidden[:, None], doubted.any(1)[:, None])[:, 0]
            keep = (
                self.sampler.confidence_of(self.model.logits(corrected), after, self.context) >= options.keep_threshold
            )
        else:
            keep = self._leave_one_out(after, doubted) >= options.keep_threshold
        return torch.where(doubted & ~keep, state.mask_token_id, after)

    def _residual_size(self, before, after, rows):
        """|C|, corrected less backbone logit, of the proposed tokens on the state before they are revealed, [R, B]."""
        hidden = self.state.hidden
        residual = self.corrected_hidden(before[:, None], hidden[:, None], rows[:, None])[:, 0] - hidden
        return self.model.logits(residual).float().gather(-1, after[..., None])[..., 0].abs()

    def _leave_one_out(self, after, doubted) -> torch.Tensor:
        """Corrected confidence of each doubted token where it alone of the proposals is masked again, [R, B]."""
        state = self.state
        size = state.block_size
        count = int(doubted.sum(1).max())
        # doubted positions first, in order: state g of a row masks its g-th doubted position
        where = doubted.long().argsort(dim=1, descending=True, stable=True)[:, :count]
        real = doubted.gather(1, where)
        hides = torch.arange(size, device=after.device) == where[..., None]  # [R, G, B]
        blocks = torch.where(hides, state.mask_token_id, after[:, None])
        hidden = state.hidden[:, None].expand(-1, count, -1, -1)
        corrected = self.corrected_hidden(blocks, hidden, real)[hides].view(*where.shape, -1)  # [R, G, H]
        confidence = self.sampler.confidence_of(self.model.logits(corrected), after.gather(1, where), self.context)
        return torch.zeros(after.shape, device=after.device).scatter(1, where, confidence)


def _extend(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Append `groups` empty groups to [R, G, B]."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, groups))

"""Drafting: the candidate states of a round, guessed before the backbone verifies them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .block_state import BlockState, fetch
from .cached_forwards import CachedForwards, Candidates, take_groups
from .draft_graph import CandidateCount, DraftGraph, Nodes, merged
from .draft_plan import DraftPlan
from .draft_vocabulary import DraftVocabulary
from .options import DecodingOptions
from .reader import Reader, Selection
from .sampling import TokenChoice

# a step whose tokens have probabilities p is that much less likely: the product of p to this power. On both embedded
# checkpoints, exponents from 0 to 1 saved equally many forwards within one percent
TOKEN_EXPONENT = 0.5


def current_states(state: BlockState) -> Candidates:
    """Return one candidate per running row: its current block as it is."""
    live = state.running[:, None]
    number = torch.ones_like(live, dtype=torch.long)
    depth = torch.zeros_like(number)
    totals = {"total_live": state.running_rows, "total_masked": state.masked_positions}
    return Candidates(state.block[:, None], live, number, depth, **totals)


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
        torch.cat([candidates.depth, candidates.depth], dim=1),
    )


class Drafts(NamedTuple):
    """The candidates of a round, and what drafting them took.

    Attributes:
        candidates: the candidates.
        depths: depths drafted, beyond that of the current block.
        head_steps: head steps, one forward of the head each.
    """

    candidates: Candidates
    depths: int = 0
    head_steps: int = 0


class Drafter:
    """Drafts a graph of states per row, each of them some more steps of the step rule on estimated logits.

        depth 0    the current block: it already holds the last round's backbone step, which is certain
        depth 1    depth 0 after a step on the logits that the head estimates for it, and alternatives of that step
        depth 2    the heaviest states of depth 1 after a step on the logits that the head estimates for each of them,
                   and alternatives; equal states are one node (see draft_graph.py)
        ...        up to depth K - 1

    All states of one depth go through one batched head step. In a chain, which is a graph of width 1, there are no
    alternatives. With `mrp_draft="self"` there is no head: every step reads the backbone's logits of the last round.

    Across the block border. A draft that completes its block is followed by the *opening state* of the next block, all
    masked. The complete draft is labelled as a clean block, so the opening state sees it as its context. If the
    backbone confirms the draft, the same forward has also opened the next block:

        candidate 1    a b _ d
        candidate 2    a b c d                                  complete: read as a clean block
        candidate 3             _ _ _ _                         the next block, which sees a b c d

    Args:
        forwards: forwards of the backbone and of the head.
        reader: chooses tokens from hidden states.
        options: decoding options of this call.
    """

    def __init__(self, forwards: CachedForwards, reader: Reader, options: DecodingOptions) -> None:
        self.forwards = forwards
        self.reader = reader
        self.rule = options.step_rule
        self.uses_head = options.mrp_draft == "head"
        self.threshold = options.mrp_draft_threshold
        drafts = options.mrp_mode == "spec" and options.depths > 1
        self.vocabulary = DraftVocabulary.of(reader.model) if drafts and options.mrp_draft_vocabulary else None
        # a processor that reads the tokens so far would have to see each candidate's own tokens at the border
        self.crosses_border = not reader.sampler.reads_context

    def draft(self, state: BlockState, context: torch.Tensor | None, plan: DraftPlan) -> Drafts:
        """Draft candidates for all rows, as many as the plan allows and at least one row can use.

        A row that has just opened its block has no logits to draft from, so the current block is its only candidate.

        Args:
            state: the rows; their `proposed` counters are raised.
            context: finished tokens for the logits processors, or None.
            plan: how far to draft.
        """
        drafting = state.running_rows - state.opening_rows  # rows and later nodes from which drafting continues
        if plan.depths == 1 or not drafting:
            return Drafts(current_states(state))
        graph = DraftGraph(state.block, state.running, plan.candidates)
        level = graph.start.weighing(graph.start.weight.masked_fill(state.opening[:, None], 0.0))
        # rows that open their block draft nothing: the masked positions of all running rows are a bound
        masked, head_steps, estimate = state.masked_positions, 0, Estimate(state.hidden[:, None])
        for depth in range(1, plan.depths):
            if depth > 1:
                # waits for the device: a head step that no row uses would cost more than the wait
                drafting, masked = self._remaining(state, level)
                if not drafting:
                    break
            if self.uses_head and (depth - 1) % plan.drafts_per_head_step == 0:
                before = take_groups(estimate.hidden, level.source)
                estimate = Estimate(self.forwards.head(state, level.blocks, before, level.weight > 0, drafting))
                number = torch.arange(level.weight.shape[1], device=level.source.device)
                level = level._replace(source=number.expand_as(level.source))
                head_steps += 1
            steps = self._steps(state, level, estimate, masked, depth, context, plan.alternatives)
            settled, continues = state.outlook(steps.blocks)
            level = graph.add(steps, settled, continues & self.crosses_border)
            if level.weight.shape[1] > plan.width:
                level = level.take(level.order()[:, : plan.width])
            reached = depth
        chosen = graph.chosen(state.mask_token_id)
        size = CandidateCount(*fetch(torch.stack(chosen.size)))  # waits: no candidate without use may be read
        candidates = chosen.candidates(size, reached, state.mask_token_id)
        drafts = candidates.live & (candidates.depth > 0)
        depths = torch.arange(1, state.proposed.shape[1], device=drafts.device)
        state.proposed[:, 1:] += (drafts[..., None] & (candidates.depth[..., None] == depths)).any(1)
        return Drafts(candidates, reached, head_steps)

    @staticmethod
    def _remaining(state: BlockState, level: Nodes) -> tuple[int, int]:
        """Return from how many nodes of a level drafting continues, and how many positions of theirs are masked."""
        continuing = level.weight > 0
        masked = (level.blocks == state.mask_token_id) & continuing[..., None]
        drafting, total_masked = fetch(torch.stack([continuing.sum(), masked.sum()]))
        return drafting, total_masked

    def _read(self, state, level: Nodes, estimate: "Estimate", total_masked: int, depth: int, context) -> TokenChoice:
        """Choose tokens from an estimate, if need be: with noise, which changes with the depth, again at each depth.

        A new estimate has one source for each node of the level.
        """
        sources = estimate.hidden.shape[1]
        if estimate.selection is None:
            masked = (level.blocks == state.mask_token_id) & (level.weight > 0)[..., None]
            estimate.selection = self.reader.select(estimate.hidden, masked, total_masked)
        if estimate.choice is None or self.reader.sampler.samples:
            positions = state.positions[:, None].expand(-1, sources, -1)
            done = (state.steps + depth - 1)[:, None].expand(-1, sources)
            estimate.choice = self.reader.read(estimate.selection, positions, done, context, self.vocabulary)
        return estimate.choice

    def _steps(
        self, state, level: Nodes, estimate: "Estimate", total_masked: int, depth: int, context, alternatives: int
    ) -> Nodes:
        """Take a step, and its alternatives, from every node of a level on estimated logits; [R, N x A] nodes.

        `total_masked` bounds the number of masked positions of the level's nodes.
        """
        is_new = estimate.selection is None  # then source n of the estimate is node n of the level
        choice = self._read(state, level, estimate, total_masked, depth, context)
        token, confidence, entropy, score = (
            field if is_new or field is None else take_groups(field, level.source)
            for field in (choice.token, choice.confidence, choice.entropy, choice.score)
        )  # [R, N, B] each
        masked = level.blocks == state.mask_token_id
        drafting = level.weight > 0
        state.note_faults(masked & drafting[..., None], confidence, score, by_head=self.uses_head)
        if alternatives == 1:
            reveal = self.rule(confidence, entropy, masked)[:, :, None]  # [R, N, A, B]
            likelihood = torch.ones_like(confidence[..., :1])  # [R, N, A]
        else:
            reveal, likelihood = self.rule.alternatives(confidence, entropy, masked, alternatives)
            likelihood = likelihood * confidence[:, :, None].where(reveal, 1.0).prod(-1) ** TOKEN_EXPONENT
        if self.threshold is not None:
            lowest = confidence[:, :, None].masked_fill(~reveal, torch.inf).amin(-1)
            likelihood = likelihood * (lowest >= self.threshold)
        blocks = torch.where(reveal, token[:, :, None], level.blocks[:, :, None])
        before = level.weight[..., None].expand_as(likelihood)
        source = level.source[..., None].expand_as(likelihood)
        weight = torch.where(before > 0, before * likelihood, 0.0).flatten(1)  # padding may hold NaN
        nodes = Nodes(blocks.flatten(1, 2), weight, torch.full_like(source.flatten(1), depth), source.flatten(1))
        return merged(nodes, before.flatten(1))


@dataclass
class Estimate:
    """Estimates of the backbone's hidden states on S states of every row, and what was read from them.

    Attributes:
        hidden: the estimates, [R, S, B, H].
        selection: those at masked positions; None until they are read.
        choice: the token chosen at each position, fields [R, S, B]; None until it is read.
    """

    hidden: torch.Tensor
    selection: Selection | None = None
    choice: TokenChoice | None = None

"""Verification: how far the backbone follows the drafted candidates, and its own step from there.

The backbone's step on a candidate is the candidate after one step of the step rule on the backbone's own logits. One
forward gives the steps on all candidates. The *walk* starts at the current block, which is certain, and moves from
candidate to candidate for as long as the step leads to one. With five candidates (see draft_graph.py):

    current block --step--> candidate 2 --step--> candidate 4 --step--> no candidate
    a _ _ _                 a b _ _               a b _ d               a b c d

Candidates 1 and 3, drafted for other steps, are not confirmed. Candidate 4 is the last confirmed one, and the step on
it is taken too: three denoising steps for one forward. A round gains at least the step on the current block. Since
every step is the backbone's own, the tokens are those of decoding without drafts.
"""

from typing import NamedTuple

import torch

from .block_state import BlockState
from .cached_forwards import Candidates
from .masks import CLEAN
from .options import DecodingOptions
from .reader import Reader
from .sampling import TokenChoice


class BackboneStep(NamedTuple):
    """The last candidate of each row that the backbone confirms, and the backbone's step on it.

    Attributes:
        last: index of that candidate, [R].
        depth: its depth, [R].
        before: its tokens, [R, B].
        after: its tokens after the step, [R, B].
        revealed: positions that the step reveals, boolean [R, B].
        confidence: confidence of the backbone's choice at each position, [R, B].
        reveal_steps: denoising step at which each position of the block that was masked is revealed, [R, B].
        opened: the first step of the next block, in rows whose confirmed candidate completes the current one and is
            followed by the opening state; None if no candidate is an opening state.
    """

    last: torch.Tensor
    depth: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    revealed: torch.Tensor
    confidence: torch.Tensor
    reveal_steps: torch.Tensor
    opened: "Opened | None" = None


class Opened(NamedTuple):
    """The backbone's first step in the next block of rows that cross the block border.

    Attributes:
        rows: which rows cross, boolean [R]; the other fields mean nothing in other rows.
        after: the next block after the step, [R, B].
        at: index of the opening state among the candidates, [R].
        choice: the backbone's choice at the positions of the opening state, its fields [R, B] or [R, B, V].
    """

    rows: torch.Tensor
    after: torch.Tensor
    at: torch.Tensor
    choice: TokenChoice


class Verifier:
    """Compares the backbone's steps with the drafts.

    Args:
        reader: chooses tokens from hidden states.
        options: decoding options of this call.
    """

    def __init__(self, reader: Reader, options: DecodingOptions) -> None:
        self.reader = reader
        self.rule = options.step_rule
        # confidence at which a draft that is out of order is accepted; None: exact acceptance
        self.floor = options.mrp_acceptance_floor if options.mrp_acceptance == "token" else None

    def verify(
        self, state: BlockState, candidates: Candidates, hidden: torch.Tensor, context: torch.Tensor | None
    ) -> BackboneStep:
        """Find the last confirmed candidate of every row and the backbone's step on it.

        Args:
            state: the rows; their `accepted` counters are raised, and their scores written if they are asked for.
            candidates: the candidates; the first of every row is its current block.
            hidden: the backbone's hidden states on them, [R, C, B, H].
            context: finished tokens for the logits processors, or None.
        """
        blocks = candidates.blocks  # [R, C, B]
        steps = state.steps[:, None] + candidates.depth
        if candidates.opens is not None:
            steps = steps.masked_fill(candidates.opens, 0)
        masked = blocks == state.mask_token_id
        selection = self.reader.select(hidden, masked & candidates.live[..., None], candidates.total_masked)
        choice = self.reader.read(selection, candidates.positions(state), steps, context)
        reveal = self.rule(choice.confidence, choice.entropy, masked)
        following = torch.where(reveal, choice.token, blocks)  # the backbone's step on every candidate, [R, C, B]

        if blocks.shape[1] == 1:
            return self._only_step(state, blocks, masked, choice, reveal, following)
        row = torch.arange(len(blocks), device=blocks.device)
        walk = self._walk(candidates, choice, following)
        last, visited = walk.last, walk.visited & state.running[:, None]
        state.accepted.scatter_add_(1, candidates.depth, (visited & (candidates.depth > 0)).long())
        # a candidate that is not confirmed is a state that decoding does not visit
        state.note_faults(masked & visited[..., None], choice.confidence, choice.score)
        if choice.scores is not None:
            self._write_scores(state, candidates, following, choice.scores, walk)
        # a token that is masked in the first j confirmed candidates is revealed by the j-th of the steps on them
        masked_in = (masked & walk.visited[..., None]).sum(1)
        return BackboneStep(
            last=last,
            depth=candidates.depth[row, last],
            before=blocks[row, last],
            after=following[row, last],
            revealed=reveal[row, last],
            confidence=choice.confidence[row, last],
            reveal_steps=state.steps[:, None] + masked_in - 1,
            opened=None if candidates.opens is None else self._opened(state, candidates, choice, following, last),
        )

    def _only_step(self, state, blocks, masked, choice: TokenChoice, reveal, following) -> BackboneStep:
        """Return the step on the current block, where that is the only candidate."""
        state.note_faults(masked[:, 0] & state.running[:, None], choice.confidence[:, 0], choice.score[:, 0])
        if choice.scores is not None:
            state.write_scores(choice.scores[:, 0], reveal[:, 0] & state.running[:, None])
        first = torch.zeros_like(state.steps)
        return BackboneStep(
            last=first,
            depth=first,
            before=blocks[:, 0],
            after=following[:, 0],
            revealed=reveal[:, 0],
            confidence=choice.confidence[:, 0],
            reveal_steps=state.steps[:, None].expand_as(following[:, 0]),
        )

    def _opened(self, state, candidates: Candidates, choice: TokenChoice, following, last) -> Opened:
        """Find the rows whose last confirmed candidate is followed by an opening state."""
        row = torch.arange(len(last), device=last.device)
        at = candidates.opens.long().argmax(1)
        return Opened(
            rows=candidates.opens[row, at] & (candidates.stream[row, last] == CLEAN) & state.running,
            after=following[row, at],
            at=at,
            choice=TokenChoice(*(field if field is None else field[row, at] for field in choice)),
        )

    def _walk(self, candidates: Candidates, choice: TokenChoice, following: torch.Tensor) -> "Walk":
        """Follow the backbone's steps from the current block as long as they lead to candidates."""
        blocks, depth = candidates.blocks, candidates.depth
        last = torch.zeros_like(depth[:, :1])
        visited = torch.zeros_like(candidates.live).scatter(1, last, True)
        leads = (following[:, :, None] == blocks[:, None]).all(-1)  # from each candidate to each, [R, C, C]
        if self.floor is not None:
            # token acceptance: every new token is the backbone's confident choice, whichever the rule takes first
            new = blocks[:, None] != blocks[:, :, None]
            sure = (choice.token[:, :, None] == blocks[:, None]) & (choice.confidence >= self.floor)[:, :, None]
            leads = leads | (sure | ~new).all(-1)
        # opening states have depth 0 and so follow no step
        leads = leads & (depth[:, :, None] + 1 == depth[:, None]) & candidates.live[:, None]
        # the candidate that the step on each leads to, and the candidate itself if there is none
        itself = torch.arange(depth.shape[1], device=depth.device)
        successor = torch.where(leads.any(-1), leads.long().argmax(-1), itself)
        for _ in range(candidates.deepest):
            last = successor.gather(1, last)
            visited = visited.scatter(1, last, True)
        return Walk(last[:, 0], visited, successor)

    def _write_scores(self, state: BlockState, candidates: Candidates, following, scores, walk: "Walk"):
        """Write the scores of every token revealed from the first candidate on, the step on the last included."""
        number = torch.arange(candidates.live.shape[1], device=scores.device)
        reached = candidates.blocks.gather(1, walk.successor[..., None].expand_as(candidates.blocks))
        after = torch.where((number == walk.last[:, None])[..., None], following, reached)
        changed = (after != candidates.blocks) & (walk.visited & state.running[:, None])[..., None]
        for index in range(candidates.live.shape[1]):
            state.write_scores(scores[:, index], changed[:, index])


class Walk(NamedTuple):
    """The confirmed candidates of every row.

    Attributes:
        last: index of the last one, [R].
        visited: which candidates are confirmed, boolean [R, C].
        successor: the candidate that the backbone's step on each leads to, or itself if there is none, [R, C].
    """

    last: torch.Tensor
    visited: torch.Tensor
    successor: torch.Tensor

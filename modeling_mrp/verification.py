"""Verification: how far the backbone follows the drafted candidates, and its own step from there.

The backbone's step on a candidate is the candidate after one step of the step rule on the backbone's own logits. A
chain of drafts is confirmed as long as each candidate equals the step on the one before it:

    candidate 0        candidate 1        candidate 2
         |                  |                  |
       step 0             step 1             step 2          (one forward gives the logits of all candidates)
         |                  |                  |
      equals             equals          not compared
    candidate 1? yes   candidate 2? no

Here candidate 1 is the last confirmed one, and step 1 is taken: two denoising steps for one forward. Candidate 0 is
certain and needs no confirmation, so a round gains at least one step. Since every step is the backbone's own, the
tokens are those of decoding without drafts.
"""

from typing import NamedTuple

import torch

from .block_state import BlockState
from .cached_forwards import Candidates
from .options import DecodingOptions
from .sampling import Sampler, TokenChoice


class BackboneStep(NamedTuple):
    """The last candidate of each row that the backbone confirms, and the backbone's step on it.

    Attributes:
        last: index of that candidate, [R].
        before: its tokens, [R, B].
        after: its tokens after the step, [R, B].
        revealed: positions that the step reveals, boolean [R, B].
        confidence: confidence of the backbone's choice at each position, [R, B].
        reveal_steps: denoising step at which each position of the block that was masked is revealed, [R, B].
        opened: the first step of the next block, in rows whose confirmed candidate completes the current one and is
            followed by the opening state; None if no candidate is an opening state.
    """

    last: torch.Tensor
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
        sampler: chooses tokens from logits.
        options: decoding options of this call.
    """

    def __init__(self, sampler: Sampler, options: DecodingOptions) -> None:
        self.sampler = sampler
        self.rule = options.step_rule
        # confidence at which a draft that is out of order is accepted; None: exact acceptance
        self.floor = options.mrp_acceptance_floor if options.mrp_acceptance == "token" else None

    def verify(
        self, state: BlockState, candidates: Candidates, logits: torch.Tensor, context: torch.Tensor | None
    ) -> BackboneStep:
        """Find the last confirmed candidate of every row and the backbone's step on it.

        Args:
            state: the rows; their `accepted` counters are raised, and their scores written if they are asked for.
            candidates: the candidates, `live` a prefix in every row.
            logits: the backbone's logits on them, [R, C, B, V].
            context: finished tokens for the logits processors, or None.
        """
        blocks = candidates.blocks  # [R, C, B]
        row = torch.arange(len(blocks), device=blocks.device)
        depth = torch.arange(blocks.shape[1], device=blocks.device)
        steps = state.steps[:, None] + depth
        if candidates.opens is not None:
            steps = steps.masked_fill(candidates.opens, 0)
        choice = self.sampler.read(logits, candidates.positions(state), steps, context)
        masked = blocks == state.mask_token_id
        reveal = self.rule(choice.confidence, choice.entropy, masked)
        following = torch.where(reveal, choice.token, blocks)  # the backbone's step on every candidate, [R, C, B]

        confirmed = self._confirmed(candidates, choice, following)  # [R, C]
        last = confirmed.sum(1) - 1
        if len(depth) > 1:
            unused = state.accepted.shape[1] - len(depth)
            state.accepted += torch.nn.functional.pad(confirmed & (depth > 0), (0, unused))
        # a candidate that is not confirmed is a state that decoding does not visit
        visited = (depth <= last[:, None]) & state.running[:, None]
        state.note_faults(masked & visited[..., None], choice.confidence, choice.score)
        if choice.scores is not None:
            self._write_scores(state, candidates, following, choice.scores, last)
        # a token that is masked in the first j confirmed candidates is revealed by the j-th of the steps on them
        masked_in = (masked & (depth <= last[:, None])[..., None]).sum(1)
        return BackboneStep(
            last=last,
            before=blocks[row, last],
            after=following[row, last],
            revealed=reveal[row, last],
            confidence=choice.confidence[row, last],
            reveal_steps=state.steps[:, None] + masked_in - 1,
            opened=None if candidates.opens is None else self._opened(state, candidates, choice, following, last),
        )

    def _opened(self, state, candidates: Candidates, choice: TokenChoice, following, last) -> Opened:
        """Find the rows whose last confirmed candidate is followed by an opening state."""
        row = torch.arange(len(last), device=last.device)
        at = (last + 1).clamp(max=candidates.live.shape[1] - 1)
        return Opened(
            rows=candidates.opens[row, at] & (at > last) & state.running,
            after=following[row, at],
            at=at,
            choice=TokenChoice(*(field if field is None else field[row, at] for field in choice)),
        )

    def _confirmed(self, candidates: Candidates, choice: TokenChoice, following: torch.Tensor) -> torch.Tensor:
        """Return which candidates are confirmed, [R, C]: the first, and a prefix of the others."""
        first = torch.ones_like(candidates.live[:, :1])
        if candidates.live.shape[1] == 1:
            return first
        drafted = candidates.blocks[:, 1:]
        agrees = (following[:, :-1] == drafted).all(-1)
        if self.floor is not None:
            # token acceptance: every new token is the backbone's confident choice, whichever the rule takes first
            new = drafted != candidates.blocks[:, :-1]
            sure = choice.confidence[:, :-1] >= self.floor
            agrees = agrees | (((choice.token[:, :-1] == drafted) & sure) | ~new).all(-1)
        drafts = candidates.live if candidates.opens is None else candidates.live & ~candidates.opens
        return torch.cat([first, agrees & drafts[:, 1:]], dim=1).cumprod(1).bool()

    def _write_scores(self, state: BlockState, candidates: Candidates, following, scores, last):
        """Write the scores of every token revealed from the first candidate on, the step on the last included."""
        row = torch.arange(len(last), device=last.device)
        for depth in range(candidates.live.shape[1]):
            beyond = (depth < last) & state.running
            ends = (depth == last) & state.running
            after = candidates.blocks[:, min(depth + 1, candidates.live.shape[1] - 1)]
            after = torch.where(ends[:, None], following[row, last], after)
            changed = (after != candidates.blocks[:, depth]) & (beyond | ends)[:, None]
            state.write_scores(scores[:, depth], changed)

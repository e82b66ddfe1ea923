"""The rows of a decoding call: their tokens, the block each of them is decoding, and what decoding has cost so far."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch

NO_FAULT = torch.iinfo(torch.long).max


class Fault(NamedTuple):
    """Why a row cannot go on: the scores at one of its positions allow no choice.

    Attributes:
        row: index of the row in the state.
        position: position of the token.
        by_head: whether the scores are the head's (otherwise the backbone's).
        no_token: whether no token is left; otherwise the scores are NaN or infinite.
    """

    row: int
    position: int
    by_head: bool
    no_token: bool


def fetch(numbers: torch.Tensor) -> list[int]:
    """Copy integers [n] from the device to the host, which waits for them."""
    return numbers.tolist()


class BlockState:
    """Tokens, position and statistics of every row; the rows progress independently of one another.

    Rows are left-aligned without padding, so column i of `tokens` holds position i. A row with a prompt of 9 tokens
    and blocks of 4 just after its first new block has become complete (`#`: a token, `_`: the mask token):

        position   0       4       8       12      16
        tokens     # # # # # # # # # # # # _ _ _ _ _ _ _ _
                   [  in the cache ][pending][current]          starts = 12, pending = 1

    The current block is the one that is being decoded. All blocks before it are clean: they hold no mask and never
    change again. Pending blocks are the clean blocks that are not in the cache yet. Invariants: the cache holds
    `starts / block_size - pending` blocks of the row, and pending blocks exist only while the row is `opening`.

    Args:
        prompts: token ids, left-aligned, [R, P].
        prompt_lengths: number of tokens of each prompt, [R].
        max_new_tokens: the most new tokens per row.
        block_size: tokens per block B.
        mask_token_id: id of [MASK].
        eos_token_ids: ids that end a row, [E]; may be empty.
        depth: number of depths for which drafts are counted.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        prompt_lengths: torch.Tensor,
        max_new_tokens: int,
        block_size: int,
        mask_token_id: int,
        eos_token_ids: torch.Tensor,
        depth: int,
    ) -> None:
        rows, device = len(prompts), prompts.device
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.eos_token_ids = eos_token_ids
        self.prompt_lengths = prompt_lengths
        self.limits = prompt_lengths + max_new_tokens  # position after the last token that may be returned, [R]
        self.width = -(-int(self.limits.max()) // block_size) * block_size
        self.tokens = torch.full((rows, self.width), mask_token_id, device=device)
        column = torch.arange(self.width, device=device)
        shown = prompts[:, : self.width]
        self.tokens[:, : shown.shape[1]] = shown
        self.tokens[column >= prompt_lengths[:, None]] = mask_token_id

        # where each row is
        self.starts = prompt_lengths // block_size * block_size  # first position of the current block, [R]
        self.positions = self.starts[:, None] + torch.arange(block_size, device=device)  # of that block, [R, B]
        self.pending = prompt_lengths // block_size  # clean blocks that are not in the cache yet, [R]
        self.unread = torch.zeros_like(prompt_lengths)  # clean blocks in the cache that the head has not read yet, [R]
        self.steps = torch.zeros_like(prompt_lengths)  # denoising steps done in the current block, [R]
        self.opening = torch.ones(rows, dtype=torch.bool, device=device)  # no forward has read the current block, [R]
        self.running = torch.ones(rows, dtype=torch.bool, device=device)  # the row has not ended, [R]
        self.faulty = torch.zeros(rows, dtype=torch.bool, device=device)  # see `note_faults`, [R]
        self._noted: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = []  # of `note_faults` in this round
        self.hidden = None  # backbone's hidden states of the current block before its last step, [R, B, H]

        # what `generate` returns
        self.scores = None  # scores at which each token was revealed, [R, width, V]; only when asked for
        self.forwards = torch.zeros(rows, 3, dtype=torch.long, device=device)  # of backbone, head, prefill
        self.revealed_by_head = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.reveal_steps = torch.full_like(self.tokens, -1)  # denoising step of its block that revealed each token
        self.proposed = torch.zeros(rows, depth, dtype=torch.long, device=device)  # drafts per depth
        self.accepted = torch.zeros(rows, depth, dtype=torch.long, device=device)
        self.synchronise()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "BlockState":
        """Return a state each of whose per-row tensors is the function's result for this one's."""
        mapped = copy.copy(self)
        mapped.prompt_lengths, mapped.limits = function(self.prompt_lengths), function(self.limits)
        mapped.tokens = function(self.tokens)
        mapped.starts, mapped.positions = function(self.starts), function(self.positions)
        mapped.pending, mapped.unread = function(self.pending), function(self.unread)
        mapped.steps = function(self.steps)
        mapped.opening, mapped.running = function(self.opening), function(self.running)
        mapped.faulty = function(self.faulty)
        mapped.hidden = None if self.hidden is None else function(self.hidden)
        mapped.scores = None if self.scores is None else function(self.scores)
        mapped.forwards, mapped.revealed_by_head = function(self.forwards), function(self.revealed_by_head)
        mapped.reveal_steps = function(self.reveal_steps)
        mapped.proposed, mapped.accepted = function(self.proposed), function(self.accepted)
        mapped.synchronise()
        return mapped

    def take(self, rows: torch.Tensor) -> "BlockState":
        """Return a state of the rows [n] alone, which changes independently of this one until `put` copies it back."""
        return self.map(lambda tensor: tensor[rows])

    def put(self, rows: torch.Tensor, subset: "BlockState") -> None:
        """Copy the tokens, the progress and the counters of a subset back; logits rows (`scores`) are not copied.

        Args:
            rows: indices of the subset's rows in this state, [n].
            subset: a state that `take` made, or this state itself.
        """
        if subset is not self:
            for own, theirs in zip(self._copied_back(), subset._copied_back(), strict=True):
                own[rows] = theirs

    def _copied_back(self) -> tuple[torch.Tensor, ...]:
        return (
            self.tokens,
            self.starts,
            self.running,
            self.forwards,
            self.revealed_by_head,
            self.reveal_steps,
            self.proposed,
            self.accepted,
        )

    def synchronise(self) -> None:
        """Copy the scalars that determine the next round's shapes to the host, in one transfer.

        A round waits for the device in other places too: decoding.py lists them all.
        """
        running = self.running.long()
        pending = self.pending * running  # rows that have ended keep their cached length: nothing is committed there
        unread = self.unread * running
        cached = self.starts - self.pending * self.block_size
        next_lengths = cached + pending * self.block_size
        masked = (self.block == self.mask_token_id).sum(1) * running
        opening, accepted = self.opening * running, self.accepted.sum(1)
        sums = torch.stack([running, opening, pending, accepted, masked, unread, self.faulty]).sum(1)
        maxima = torch.stack([pending, unread, cached, next_lengths, self.starts]).amax(1)
        (
            self.running_rows,
            self.opening_rows,
            self.pending_blocks,
            self.accepted_drafts,
            self.masked_positions,
            self.unread_blocks,
            self.faulty_rows,
            self.max_pending,
            self.max_unread,
            self.longest_cached,
            self.next_longest,
            self.longest_start,
        ) = fetch(torch.cat([sums, maxima]))
        if not self.faulty_rows:
            self._noted = []

    @property
    def block(self) -> torch.Tensor:
        """The current block's tokens, [R, B]."""
        return self.tokens.gather(1, self.positions)

    @property
    def revocable(self) -> torch.Tensor:
        """Which positions of the current block hold a token that was generated, [R, B]."""
        return (self.block != self.mask_token_id) & (self.positions >= self.prompt_lengths[:, None])

    def write(
        self, block: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor, by_head: torch.Tensor | bool = False
    ) -> None:
        """Write the current block of some rows, and record how each token that changes was revealed.

        Args:
            block: new tokens of the block, [R, B].
            rows: which rows to write, boolean [R].
            steps: denoising step to record at each position, [R, B].
            by_head: whether the head chose the token, [R, B] or one value for all.
        """
        positions = self.positions
        old = self.tokens.gather(1, positions)
        new = torch.where(rows[:, None], block, old)
        self.tokens.scatter_(1, positions, new)
        changed = new != old
        for record, value in ((self.revealed_by_head, by_head), (self.reveal_steps, steps)):
            record.scatter_(1, positions, torch.where(changed, value, record.gather(1, positions)))

    def write_scores(self, scores: torch.Tensor, where: torch.Tensor) -> None:
        """Store the scores at which tokens were revealed.

        Args:
            scores: scores of the current block, [R, B, V].
            where: positions that were revealed from them, boolean [R, B].
        """
        if self.scores is None:
            self.scores = scores.new_zeros(*self.tokens.shape, scores.shape[-1])
        row, column = where.nonzero(as_tuple=True)
        self.scores[row, self.starts[row] + column] = scores[row, column]

    def note_faults(
        self,
        where: torch.Tensor,
        confidence: torch.Tensor,
        score: torch.Tensor | None = None,
        by_head: bool = False,
    ) -> None:
        """Note where scores that are read allow no choice. The row stays at its block; `fault` tells what was noted.

        Nothing is copied to the host here: the next `synchronise` fetches whether there is a fault.

        Args:
            where: positions of the current block whose scores are read, boolean [R, ..., B].
            confidence: probability, or another number from 0 on computed from the scores, at each position,
                [R, ..., B].
            score: score of the token chosen there, minus infinity where no token is left, [R, ..., B].
            by_head: whether the scores are the head's (otherwise the backbone's).
        """
        bad = ~(confidence < torch.inf)  # NaN too
        if score is not None:
            bad = bad | ~(score > -torch.inf)
        bad = where & bad
        self.faulty = self.faulty | bad.flatten(1).any(1)
        self._noted.append((bad, score, by_head))

    @property
    def fault(self) -> Fault | None:
        """The fault at the lowest position of all that `synchronise` has seen, or None."""
        if not self.faulty_rows:
            return None
        codes = []  # least of each row, the kind of fault included, [R] each
        for bad, score, by_head in self._noted:
            code = self._expand(self.positions * 4 + 2 * by_head, bad)  # a row with a fault is still at its block
            if score is not None:
                code = code + (score == -torch.inf)
            codes.append(torch.where(bad, code, NO_FAULT).flatten(1).amin(1))
        least = torch.stack(codes).amin(0)
        position, kind = divmod(int(least.min()), 4)
        return Fault(int(least.argmin()), position, bool(kind & 2), bool(kind & 1))

    def settled(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return whether a block needs no further step: nothing that will be returned is masked any more.

        Tokens after the first end of text and tokens after the row's limit are not returned, so they may stay masked.

        Args:
            blocks: one or more states of each row's current block, [R, ..., B].

        Returns:
            Boolean [R, ...].
        """
        return self._settled(blocks, self._eos(blocks))

    def outlook(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether a block is settled (see `settled`), and whether its row continues with the next block then.

        Args:
            blocks: one or more states of each row's current block, [R, ..., B].

        Returns:
            Two booleans, [R, ...] each.
        """
        eos = self._eos(blocks)
        settled = self._settled(blocks, eos)
        has_more = self.starts + self.block_size < self.limits
        return settled, settled & ~eos.any(-1) & has_more.view(-1, *[1] * (settled.dim() - 1))

    def _settled(self, blocks, eos):
        after_eos = eos.cumsum(-1) > eos
        returned = ~after_eos & self._expand(self.positions < self.limits[:, None], blocks)
        return ~((blocks == self.mask_token_id) & returned).any(-1)

    def _eos(self, blocks):
        """Return which tokens are ends of text that were generated, [R, ..., B]."""
        generated = self._expand(self.positions >= self.prompt_lengths[:, None], blocks)
        return (blocks[..., None] == self.eos_token_ids).any(-1) & generated

    def _expand(self, flags, blocks):
        """View flags [R, B] so that they broadcast against blocks [R, ..., B]."""
        return flags.view(len(flags), *[1] * (blocks.dim() - 2), self.block_size)

    def advance(self) -> None:
        """Move the rows whose block is settled to their next block, or end them.

        A completed block becomes pending: its keys and values are computed in the next forward, beside the next block.
        """
        settled, continues = self.outlook(self.block)
        done = settled & self.running & ~self.faulty
        moved = done & continues
        self.running = self.running & (moved | ~done)
        shift = moved * self.block_size
        self.starts = self.starts + shift
        self.positions = self.positions + shift[:, None]
        self.pending = self.pending + moved
        self.steps = torch.where(moved, 0, self.steps)
        self.opening = self.opening | moved

    def open_next(self, rows: torch.Tensor, after: torch.Tensor, hidden: torch.Tensor) -> None:
        """Take the first step of the next block in rows that `advance` has just moved there.

        Args:
            rows: the rows, boolean [R]; their completed block is in the cache.
            after: the new block after the backbone's step, [R, B].
            hidden: the backbone's hidden states before it, [R, B, H].
        """
        self.pending = self.pending * ~rows
        self.opening = self.opening & ~rows
        self.write(after, rows, torch.zeros_like(after))
        self.steps = torch.where(rows, 1, self.steps)
        self.hidden = torch.where(rows[:, None, None], hidden, self.hidden)

    def pending_clean_blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the clean blocks of each row that are not in the cache yet, see `_clean_blocks`."""
        return self._clean_blocks(self.starts, self.pending * self.running, self.max_pending)

    def unread_clean_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the clean blocks of the given rows, boolean [R], that the head has not read, see `_clean_blocks`."""
        return self._clean_blocks(self.starts - self.pending * self.block_size, self.unread * rows, self.max_unread)

    def _clean_blocks(self, ends, number, count: int):
        """Return the last blocks before a position, the earliest first.

        Args:
            ends: the position, [R].
            number: how many blocks of each row, [R].
            count: how many blocks to return per row; rows with fewer are filled with blocks that are not real.

        Returns:
            Token ids, positions, and which of them are real, each [R, count, B].
        """
        group = torch.arange(count, device=self.starts.device)[None, :, None]
        first = ends - number * self.block_size
        offset = torch.arange(count * self.block_size, device=self.starts.device)
        positions = (first[:, None] + offset).clamp(max=self.width - 1)
        ids = self.tokens.gather(1, positions)
        shape = (len(self.tokens), count, self.block_size)
        real = group < number[:, None, None]
        return ids.view(shape), positions.view(shape), real.expand(shape)

    def finished_tokens(self, pad_token_id: int) -> torch.Tensor:
        """Return all tokens before each row's current block, left-padded, [R, longest]."""
        width = self.longest_start
        column = torch.arange(width, device=self.starts.device) - (width - self.starts[:, None])
        return torch.where(column >= 0, self.tokens.gather(1, column.clamp(min=0)), pad_token_id)

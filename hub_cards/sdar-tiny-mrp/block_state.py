"""Where every row of a batch stands: its tokens, its current block, and what decoding has cost it so far."""

import copy

import torch

CONSTANT = ("prompt_lengths", "limits")
RESULTS = ("tokens", "starts", "running", "forwards", "revealed_by_head", "reveal_steps", "proposed", "accepted")
IN_PROGRESS = ("positions", "pending", "steps", "opening", "hidden", "scores")


class BlockState:
    """Rows are left-aligned without padding, so column i of `tokens` is position i; they progress independently.

    Args:
        prompts: token ids [R, P], left-aligned.
        prompt_lengths: real tokens of each prompt [R].
        max_new_tokens: at most so many new tokens per row.
        block_size, mask_token_id: of the model.
        eos_token_ids: ids that end a row, [E] (may be empty).
        depth: length of the per-depth statistics.
    """

    def __init__(self, prompts, prompt_lengths, max_new_tokens, block_size, mask_token_id, eos_token_ids, depth):
        rows, device = len(prompts), prompts.device
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.eos_token_ids = eos_token_ids
        self.prompt_lengths = prompt_lengths
        self.limits = prompt_lengths + max_new_tokens
        self.width = -(-int(self.limits.max()) // block_size) * block_size
        self.tokens = torch.full((rows, self.width), mask_token_id, device=device)
        column = torch.arange(self.width, device=device)
        shown = prompts[:, : self.width]
        self.tokens[:, : shown.shape[1]] = shown
        self.tokens[column >= prompt_lengths[:, None]] = mask_token_id

        self.starts = prompt_lengths // block_size * block_size  # of the current block
        self.positions = self.starts[:, None] + torch.arange(block_size, device=device)  # of its tokens, [R, B]
        self.pending = prompt_lengths // block_size  # clean blocks before it that are not in the cache yet
        self.steps = torch.zeros_like(prompt_lengths)  # denoising steps done in the current block
        self.opening = torch.ones(rows, dtype=torch.bool, device=device)  # no forward has seen the current block yet
        self.running = torch.ones(rows, dtype=torch.bool, device=device)
        self.hidden = None  # [R, B, H], h_A of the state before the last step
        self.scores = None  # [R, width, V], the logits row at which each token was revealed, when asked for

        self.forwards = torch.zeros(rows, 3, dtype=torch.long, device=device)  # backbone, head, prefill
        self.revealed_by_head = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.reveal_steps = torch.full_like(self.tokens, -1)  # denoising step, within the block, of each reveal
        self.proposed = torch.zeros(rows, depth, dtype=torch.long, device=device)
        self.accepted = torch.zeros(rows, depth, dtype=torch.long, device=device)
        self.synchronise()

    def take(self, rows: torch.Tensor) -> "BlockState":
        """A state of some rows [n] only, which goes on by itself until `put` writes it back."""
        part = copy.copy(self)
        for name in (*CONSTANT, *RESULTS, *IN_PROGRESS):
            value = getattr(self, name)
            setattr(part, name, None if value is None else value[rows])
        part.synchronise()
        return part

    def put(self, rows: torch.Tensor, part: "BlockState"):
        """Take over where `part`, of the rows [n], stands and what it has cost; all but the logits rows."""
        if part is not self:
            for name in RESULTS:
                getattr(self, name)[rows] = getattr(part, name)

    def synchronise(self):
        """Read what shapes the next forward to the host: the one synchronisation of a round."""
        running = self.running.long()
        longest = (self.starts - self.pending * self.block_size + self.pending * running * self.block_size).max()
        numbers = torch.stack(
            [running.sum(), (self.pending * running).max(), longest, (self.opening & self.running).sum()]
        )
        self.running_rows, self.max_pending, self.next_longest, self.opening_rows = numbers.tolist()

    @property
    def block(self) -> torch.Tensor:
        """The current block's tokens, [R, B]."""
        return self.tokens.gather(1, self.positions)

    @property
    def revocable(self) -> torch.Tensor:
        """Where the current block holds a token that was generated, [R, B]."""
        return (self.block != self.mask_token_id) & (self.positions >= self.prompt_lengths[:, None])

    def write(
        self, block: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor, by_head: torch.Tensor | bool = False
    ):
        """Put [R, B] into the current block of the given rows [R].

        `steps` [R, B] are the denoising steps, and `by_head` marks whose reveals, of what is new.
        """
        positions = self.positions
        old = self.tokens.gather(1, positions)
        new = torch.where(rows[:, None], block, old)
        self.tokens.scatter_(1, positions, new)
        for record, value in ((self.revealed_by_head, by_head), (self.reveal_steps, steps)):
            record.scatter_(1, positions, torch.where(new != old, value, record.gather(1, positions)))

    def write_scores(self, scores: torch.Tensor, where: torch.Tensor):
        """Keep the logits rows [R, B, V] of the positions [R, B] that were revealed from them."""
        if self.scores is None:
            self.scores = scores.new_zeros(*self.tokens.shape, scores.shape[-1])
        row, column = where.nonzero(as_tuple=True)
        self.scores[row, self.starts[row] + column] = scores[row, column]

    def settled(self, blocks: torch.Tensor) -> torch.Tensor:
        """Whether nothing that will be returned is masked any more, [R, ...] for states [R, ..., B].

        What lies behind the first end of text or behind the row's limit is not needed.
        """
        return ~((blocks == self.mask_token_id) & self._needed(blocks)).any(-1)

    def _needed(self, blocks):
        eos = self._eos(blocks).long()
        not_behind_eos = eos.cumsum(-1) - eos == 0
        return not_behind_eos & self._spread(self.positions < self.limits[:, None], blocks)

    def _eos(self, blocks):
        generated = self._spread(self.positions >= self.prompt_lengths[:, None], blocks)
        return torch.isin(blocks, self.eos_token_ids) & generated

    def _spread(self, flags, blocks):
        return flags.view(len(flags), *[1] * (blocks.dim() - 2), self.block_size)

    def advance(self):
        """Rows whose block is settled end, or go on to the next block; its keys and values are then pending."""
        block = self.block
        settled = self.settled(block) & self.running
        ended = settled & (self._eos(block).any(-1) | (self.starts + self.block_size >= self.limits))
        moved = settled & ~ended
        self.running = self.running & ~ended
        self.starts = self.starts + moved * self.block_size
        self.positions = self.positions + moved[:, None] * self.block_size
        self.pending = self.pending + moved.long()
        self.steps = torch.where(moved, 0, self.steps)
        self.opening = self.opening | moved

    def clean_blocks(self, count: int):
        """The first `count` pending blocks of each row: ids, positions and which are real, all [R, count, B]."""
        group = torch.arange(count, device=self.starts.device)[None, :, None]
        first = self.starts - self.pending * self.block_size
        offset = torch.arange(count * self.block_size, device=self.starts.device)
        positions = (first[:, None] + offset).clamp(max=self.width - 1)
        ids = self.tokens.gather(1, positions)
        shape = (len(self.tokens), count, self.block_size)
        real = (group < self.pending[:, None, None]) & self.running[:, None, None]
        return ids.view(shape), positions.view(shape), real.expand(shape)

    def finished_tokens(self, pad_token_id: int) -> torch.Tensor:
        """All tokens before each row's current block, left-padded, [R, longest]."""
        width = int(self.starts.max())
        column = torch.arange(width, device=self.starts.device) - (width - self.starts[:, None])
        return torch.where(column >= 0, self.tokens.gather(1, column.clamp(min=0)), pad_token_id)

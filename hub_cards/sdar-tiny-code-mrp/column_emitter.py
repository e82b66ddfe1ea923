"""Handing finished columns of new tokens to streamers and stopping criteria, in order."""

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .block_state import BlockState


class ColumnEmitter:
    """Passes columns of new tokens to the streamer and the stopping criteria, each once all running rows have it.

    Rows progress unevenly, but streamers and criteria see the columns in order, as in token-by-token generation. A row
    that has ended does not delay the others, and keeps its tokens until their columns are emitted.

    Where there is no streamer, and the only criteria are the limit and the ends of text of the call, which the rows'
    state knows too, nothing is emitted during decoding: `finish` emits all columns at once.

    Args:
        input_ids: the prompts as they were given, [R, P].
        left_padded: the same prompts with all padding on the left, [R, P]. Criteria see these, so that a stop string
            may begin in the prompt whichever side the padding is on.
        max_new_tokens: the most new tokens per row.
        pad_token_id: id that follows a row's end.
        stopping_criteria: transformers' list of criteria; asked once per column.
        streamer: a streamer of transformers, or None. If it has `put_draft`, it also sees the blocks in progress.
        with_scores: whether to collect scores.
        eos_token_ids: ids at which the rows' state ends a row, [E].
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        left_padded: torch.Tensor,
        max_new_tokens: int,
        pad_token_id: int,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        with_scores: bool,
        eos_token_ids: torch.Tensor,
    ) -> None:
        self.prompts = input_ids
        self.seen_by_criteria = left_padded
        self.prompt_columns = input_ids.shape[1]
        self.max_new_tokens = max_new_tokens
        self.pad_token_id = pad_token_id
        self.stopping_criteria = stopping_criteria
        self.streamer = streamer
        self.scores = () if with_scores else None
        self.unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self.lengths = torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)  # new tokens per row
        self.draft_streamer = streamer if hasattr(streamer, "put_draft") else None
        self.waits = streamer is None and all(
            self._is_known(criterion, eos_token_ids.tolist()) for criterion in stopping_criteria
        )

    def _is_known(self, criterion: StoppingCriteria, ends: list[int]) -> bool:
        """Return whether a criterion stops no row earlier than the rows' state does."""
        if type(criterion) is MaxLengthCriteria:
            return criterion.max_length >= self.prompt_columns + self.max_new_tokens
        return type(criterion) is EosTokenCriteria and set(criterion.eos_token_id.tolist()) <= set(ends)

    @property
    def sequences(self) -> torch.Tensor:
        """The prompts as they were given and all columns emitted so far, [R, P + new]."""
        return torch.cat([self.prompts, self.seen_by_criteria[:, self.prompt_columns :]], dim=1)

    def __call__(self, state: BlockState) -> None:
        """Emit the columns that have become ready, and stop the rows that have finished."""
        if self.waits:
            return
        done = self.seen_by_criteria.shape[1] - self.prompt_columns
        while done < self._ready(state):
            self._emit(state, done)
            done += 1
        state.running = state.running & self.unfinished
        if self.draft_streamer is not None and state.running.any():
            self._show_draft(state, done)

    def finish(self, state: BlockState) -> None:
        """Emit what has not been emitted, after decoding has ended."""
        if self.streamer is not None:
            self.streamer.end()
        if not self.waits:
            return
        column = torch.arange(self.max_new_tokens, device=state.tokens.device)
        at = state.prompt_lengths[:, None] + column  # [R, new]
        tokens = state.tokens.gather(1, at)
        ends = torch.isin(tokens, state.eos_token_ids).long()
        returned = ends.cumsum(1) - ends == 0  # up to the first end of text
        self.lengths = returned.sum(1)
        width = int(self.lengths.max())
        tokens = torch.where(returned, tokens, self.pad_token_id)[:, :width]
        self.seen_by_criteria = torch.cat([self.seen_by_criteria, tokens], dim=1)
        if self.scores is not None:
            row = torch.arange(len(at), device=at.device)
            self.scores = tuple(state.scores[row, at[:, number]] for number in range(width))

    def _ready(self, state: BlockState) -> int:
        """Return how many columns can be emitted: those before the current block of every row that still decodes.

        Each column may stop rows that the next one would have waited for, so this is asked after every column. Once
        the last running row has been stopped, the columns of rows that ended earlier are still to come.
        """
        waiting = state.running & self.unfinished
        ready = torch.where(waiting, state.starts - state.prompt_lengths, self.max_new_tokens).min()
        return int(torch.where(self.unfinished.any(), ready, 0))

    def _emit(self, state: BlockState, column: int):
        at = (state.prompt_lengths + column).clamp(max=state.width - 1)[:, None]
        tokens = torch.where(self.unfinished, state.tokens.gather(1, at)[:, 0], self.pad_token_id)
        self.seen_by_criteria = torch.cat([self.seen_by_criteria, tokens[:, None]], dim=1)
        self.lengths += self.unfinished
        if self.scores is not None:
            self.scores += (state.scores[torch.arange(len(at), device=at.device), at[:, 0]],)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        self.unfinished = self.unfinished & ~self.stopping_criteria(self.seen_by_criteria, self.scores)

    def _show_draft(self, state: BlockState, done: int):
        """Show the streamer all tokens after the emitted ones up to the current blocks' ends, masks included."""
        ends = (state.starts + state.block_size).clamp(max=int(state.limits.max()))
        width = int((ends - state.prompt_lengths).max())
        index = (state.prompt_lengths[:, None] + torch.arange(done, width, device=ends.device)).clamp(
            max=state.width - 1
        )
        drafts = torch.where(self.unfinished[:, None], state.tokens.gather(1, index), self.pad_token_id)
        self.draft_streamer.put_draft(drafts.cpu())

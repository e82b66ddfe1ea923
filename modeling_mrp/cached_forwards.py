"""Forwards of the backbone and of the head during decoding, on the cache of clean blocks.

One forward of the backbone reads, for every row, its pending clean blocks and the candidate states of its current
block. Row 0 below opens its current block: it has two pending blocks and one candidate, all masked. Row 1 is in the
middle of a block and verifies three candidates. Each cell is a block of B tokens; dead cells are padding:

                 group 0     group 1     group 2
        row 0  [ clean 0   | clean 1   | candidate 0 ]
        row 1  [ cand. 0   | cand. 1   | candidate 2 ]
        row 2  [ cand. 0   | (dead)    | (dead)      ]

What row 0 sees, after c cached blocks (rows are queries, columns keys, x: visible). Its clean blocks are block causal,
and the candidate sees all of them because they are earlier blocks of the clean stream:

                       cache 0..c-1   clean 0   clean 1   candidate 0
        clean 0              x           x         .           .
        clean 1              x           x         x           .
        candidate 0          x           x         x           x

What row 1 sees. Candidates of one block are streams of their own, so none of them sees another:

                       cache 0..c-1   cand. 0   cand. 1   candidate 2
        candidate 0          x           x         .           .
        candidate 1          x           .         x           .
        candidate 2          x           .         .           x

Dead cells and missing groups cost nothing where they are many: the forward is then packed (see packing.py), and only
its real tokens go through the linear layers. Slots and mask are those of the whole rows all the same.

After the forward the clean blocks are committed to the cache. They stand first in the forward's scratch slots, so
committing them only raises the row's length, and no forward is spent on storing them.
"""

from typing import NamedTuple

import torch

from .block_cache import BlockCache, Slots
from .block_state import BlockState
from .masks import CLEAN, PADDING, AttentionMask, TokenLayout
from .options import DecodingOptions
from .packing import Packing

# share of padding from which a forward is packed. Packing copies each layer's queries, so it has to save something. On
# the words checkpoint at 4 to 100 rows, 0 and 0.1 were equally fast; with a higher bound the gain dwindles
WORTH_PACKING = 0.1

BACKBONE, HEAD, PREFILL = 0, 1, 2  # columns of BlockState.forwards


class Candidates(NamedTuple):
    """States of the current block that one forward of the backbone reads.

    Attributes:
        blocks: tokens of the states, [R, C, B].
        live: which of them are real, [R, C]; the others are padding.
        stream: number of each state's stream in the attention rule (see masks.py), [R, C].
        depth: number of denoising steps from the current block to the state, 0 for opening states, [R, C].
        deepest: the greatest depth, or a bound on it.
        most_beside_clean: the most live states of a row that has pending clean blocks.
        total_live: how many states of all rows are live; None where the host does not know.
        total_masked: how many positions of the live states of all rows are masked; None where the host does not know.
        opens: which of them are the opening state of the next block, after a draft that completes the current one,
            [R, C]; None if there is none.
    """

    blocks: torch.Tensor
    live: torch.Tensor
    stream: torch.Tensor
    depth: torch.Tensor
    deepest: int = 0
    most_beside_clean: int = 1
    total_live: int | None = None
    total_masked: int | None = None
    opens: torch.Tensor | None = None

    def positions(self, state: BlockState) -> torch.Tensor:
        """Return the positions of the candidates' tokens, [R, C, B]."""
        positions = state.positions[:, None].expand_as(self.blocks)
        return positions if self.opens is None else positions + self.opens[..., None] * state.block_size


class Arrangement:
    """Clean blocks and states of every row side by side, as in the picture above.

    Group g of a row is its clean block g if g is less than the number of its clean blocks, and otherwise a state.

    Args:
        number: number of clean blocks of each row, [R].
        most_clean: the most clean blocks of a row.
        states: number of states per row C.
        most_beside_clean: the most live states of a row that has clean blocks.
    """

    def __init__(self, number: torch.Tensor, most_clean: int, states: int, most_beside_clean: int) -> None:
        self.most_clean, self.states = most_clean, states
        self.groups = max(most_clean + most_beside_clean, states)  # G
        group = torch.arange(self.groups, device=number.device)
        state = group - number[:, None]
        self.state = state.clamp(0, states - 1)  # [R, G]
        self.is_state = (state >= 0) & (state < states)
        first = number[:, None] + torch.arange(states, device=number.device)
        self.place = first.clamp(max=self.groups - 1)  # of the states, [R, C]

    def join(self, clean: torch.Tensor, states: torch.Tensor, is_clean: torch.Tensor) -> torch.Tensor:
        """Return a field of all groups, [R, G, B, ...], given that of clean blocks and of states.

        Args:
            clean: field of the clean blocks, [R, most_clean, B, ...].
            states: field of the states, [R, C, B, ...].
            is_clean: which of the clean blocks are real, boolean [R, most_clean, B].
        """
        joined = take_groups(states, self.state)
        padding = (0, 0) * (states.dim() - 3) + (0, 0, 0, self.groups - self.most_clean)
        is_clean = is_clean.view(*is_clean.shape, *[1] * (states.dim() - 3))
        is_clean, clean = torch.nn.functional.pad(is_clean, padding), torch.nn.functional.pad(clean, padding)
        return torch.where(is_clean, clean, joined)

    def join_real(self, is_clean: torch.Tensor, is_live: torch.Tensor) -> torch.Tensor:
        """Return which tokens of all groups are real, boolean [R, G, B], given those of clean blocks and states."""
        is_clean = torch.nn.functional.pad(is_clean, (0, 0, 0, self.groups - self.most_clean))
        return is_clean | (take_groups(is_live, self.state) & self.is_state[..., None])

    def states_of(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the states [R, C, B, ...] among all groups [R, G, B, ...]."""
        return take_groups(groups, self.place)


def take_groups(field: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the groups [R, n, ...] of a field [R, G, ...] with the given indices [R, n]."""
    if field.shape[1] == index.shape[1] == 1:
        return field
    return field.gather(1, index.view(*index.shape, *[1] * (field.dim() - 2)).expand(-1, -1, *field.shape[2:]))


class Placement(NamedTuple):
    """What a forward needs to know of its tokens beside their ids.

    Attributes:
        positions: positions of the tokens, [R, Q].
        mask: attention mask, in the form that the attention implementation expects.
        slots: cache slots that they are written to.
    """

    positions: torch.Tensor
    mask: AttentionMask
    slots: Slots


class CachedForwards:
    """Runs backbone and head on states of the rows' current blocks, and counts the forwards.

    Args:
        model: an `MRPForDiffusionLM`.
        cache: keys and values of the clean blocks.
        options: decoding options of this call.
    """

    def __init__(self, model: torch.nn.Module, cache: BlockCache, options: DecodingOptions) -> None:
        self.model = model
        self.cache = cache
        self.head_reads_clean_blocks = options.uses_head
        self.has_shadows = options.revokes
        # tokens that went through the layers in the last forward of the backbone, padding included where it was read
        self.backbone_tokens = 0
        # the backbone's hidden states on clean blocks, until the head reads them, [R, width + 1, H]
        self._clean_hidden: torch.Tensor | None = None
        self._placed: dict[tuple[int, int], Placement] = {}  # results of `_place_states`

    def backbone(self, state: BlockState, candidates: Candidates) -> torch.Tensor:
        """Run the backbone on pending clean blocks and candidates, and commit the clean blocks.

        A state and its shadow count as one forward, over twice the block's positions.

        Returns:
            Hidden states of the candidates, [R, C, B, H].
        """
        blocks, live = candidates.blocks, candidates.live
        positions = candidates.positions(state)
        stream = candidates.stream[..., None].expand_as(blocks)
        real = live[..., None].expand_as(blocks)
        if not state.max_pending:
            state.forwards[:, BACKBONE] += state.running
            one = live.shape[1] == 1  # a state by itself: most forwards without drafts
            placement = self._place_states(state, 1) if one else self._place(positions, stream, real)
            return self._run_backbone(placement, real, candidates.total_live, blocks)

        clean_ids, clean_positions, is_clean = state.pending_clean_blocks()
        pending = state.pending * state.running
        arrangement = Arrangement(pending, state.max_pending, live.shape[1], candidates.most_beside_clean)
        ids = arrangement.join(clean_ids, blocks, is_clean)
        positions = arrangement.join(clean_positions, positions, is_clean)
        stream = arrangement.join(torch.full_like(clean_ids, CLEAN), stream, is_clean)
        real = arrangement.join_real(is_clean, real)
        total = None if candidates.total_live is None else candidates.total_live + state.pending_blocks
        hidden = self._run_backbone(self._place(positions, stream, real), real, total, ids)  # [R, G, B, H]

        state.forwards[:, BACKBONE] += state.running
        state.forwards[:, PREFILL] += state.running & (state.forwards[:, BACKBONE] == 1) & (state.pending > 0)
        self._commit(state, clean_positions, is_clean, hidden[:, : state.max_pending])
        return arrangement.states_of(hidden)

    def _commit(self, state, positions, real, hidden):
        """Commit the pending clean blocks [R, max_pending, B] of the last forward."""
        self._keep_for_head(state, positions, real, hidden)
        self._placed.clear()
        committed = state.pending * state.running
        self.cache.commit(committed * self.cache.block_size, state.next_longest)
        state.pending = state.pending - committed
        if self.head_reads_clean_blocks:
            state.unread = state.unread + committed
            state.max_unread += state.max_pending
            state.unread_blocks += state.pending_blocks

    def commit_candidates(self, state: BlockState, rows: torch.Tensor, at: torch.Tensor, hidden: torch.Tensor) -> None:
        """Commit complete candidates of the last forward as clean blocks.

        Args:
            state: the rows, still on the block that the candidates complete.
            rows: which rows, boolean [R]; they have no pending blocks.
            at: index of the candidate of each row, [R].
            hidden: the backbone's hidden states on it, [R, B, H].
        """
        self.cache.move_to_front(at * self.cache.block_size)
        real = rows[:, None, None].expand(-1, 1, state.block_size)
        self._keep_for_head(state, state.positions[:, None], real, hidden[:, None])
        self._placed.clear()
        self.cache.commit(rows * self.cache.block_size, self.cache.longest + self.cache.block_size)
        if self.head_reads_clean_blocks:
            state.unread = state.unread + rows

    def _keep_for_head(self, state, positions, real, hidden):
        """Keep the backbone's hidden states on clean blocks [R, n, B, H], which the head reads when it next drafts."""
        if not self.head_reads_clean_blocks:
            return
        width = state.tokens.shape[1]
        if self._clean_hidden is None:  # one more slot than positions: padding goes there
            self._clean_hidden = hidden.new_zeros(len(hidden), width + 1, hidden.shape[-1])
        at = torch.where(real, positions, width).flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
        self._clean_hidden.scatter_(1, at, hidden.flatten(1, 2))

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but those with the given indices [n]."""
        self.cache.keep_rows(rows)
        self._placed.clear()
        if self._clean_hidden is not None:
            self._clean_hidden = self._clean_hidden[rows]

    def head(
        self,
        state: BlockState,
        blocks: torch.Tensor,
        hidden: torch.Tensor,
        live: torch.Tensor,
        total_live: int | None = None,
    ) -> torch.Tensor:
        """Run one head step on states of the current block that do not see one another.

        Args:
            state: the rows.
            blocks: tokens of the states, after the reveal, [R, G, B].
            hidden: hidden states before the reveal, [R, G, B, H].
            live: which states are real, [R, G].
            total_live: how many states of all rows are real; None where the host does not know.

        Returns:
            Corrected hidden states, [R, G, B, H]. They mean nothing for states that are not real.
        """
        rows, real = live.any(1), live[..., None].expand_as(blocks)
        state.forwards[:, HEAD] += rows
        forward = self.model.corrected_hidden_states
        if not state.max_unread:
            placement = self._place_states(state, live.shape[1])
            return self._run(forward, placement, real, total_live, blocks, hidden)

        clean_ids, clean_positions, is_clean = state.unread_clean_blocks(rows)
        unread = state.unread * rows
        at = clean_positions.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
        clean_hidden = self._clean_hidden.gather(1, at).unflatten(1, is_clean.shape[1:])
        arrangement = Arrangement(unread, state.max_unread, live.shape[1], live.shape[1])
        stream = torch.arange(1, live.shape[1] + 1, device=live.device)[None, :, None].expand_as(blocks)
        positions = state.positions[:, None].expand_as(blocks)
        positions = arrangement.join(clean_positions, positions, is_clean)
        stream = arrangement.join(torch.full_like(clean_ids, CLEAN), stream, is_clean)
        real = arrangement.join_real(is_clean, real)
        placement = self._place(positions, stream, real, behind=unread * state.block_size, after=live.shape[1])
        ids, hidden = arrangement.join(clean_ids, blocks, is_clean), arrangement.join(clean_hidden, hidden, is_clean)
        total = None if total_live is None else total_live + state.unread_blocks
        corrected = self._run(forward, placement, real, total, ids, hidden)
        state.unread = state.unread - unread
        # rows that draft further in this round have drafted now; `synchronise` counts what the other rows have left
        state.max_unread = state.unread_blocks = 0
        return arrangement.states_of(corrected)

    def _run(self, forward, placement: Placement, real, total_real: int | None, *inputs) -> torch.Tensor:
        """Run the backbone or the head on groups of tokens, and only on those that are real where that pays.

        Args:
            forward: `backbone_hidden_states` or `corrected_hidden_states` of the model.
            placement: positions, mask and cache slots of all tokens.
            real: which groups are real, [R, G, B].
            total_real: how many groups of all rows are real; None where the host does not know.
            inputs: what the forward reads first, [R, G, B] or [R, G, B, H] each.

        Returns:
            Hidden states, [R, G, B, H].
        """
        inputs = [tensor.flatten(1, 2) for tensor in inputs]
        self.cache.slots = placement.slots
        groups = real.shape[0] * real.shape[1]
        if self._groups_read(real, total_real) == groups:
            hidden = forward(*inputs, placement.positions, placement.mask, self.cache)
        else:
            packing = Packing.of(real.flatten(1), total_real * real.shape[2], self.cache)
            inputs = [packing.pack(tensor) for tensor in (*inputs, placement.positions)]
            hidden = packing.unpack(forward(*inputs, placement.mask, packing=packing))
        return hidden.unflatten(1, real.shape[1:])

    def _run_backbone(self, placement: Placement, real, total_real: int | None, ids) -> torch.Tensor:
        """Run the backbone, see `_run`, and note how many tokens it has read."""
        self.backbone_tokens = self._groups_read(real, total_real) * ids.shape[2]
        return self._run(self.model.backbone_hidden_states, placement, real, total_real, ids)

    @staticmethod
    def _groups_read(real, total_real: int | None) -> int:
        """Return how many groups go through the layers: the real ones where packing pays, or else all of them."""
        groups = real.shape[0] * real.shape[1]
        return groups if total_real is None or total_real > (1 - WORTH_PACKING) * groups else total_real

    def _place_states(self, state: BlockState, number: int) -> Placement:
        """Place states of the current block that do not see one another.

        The placement stays the same until clean blocks are committed. Rows that have moved on since then are opening
        their block, which is done by the forward that commits; until then no state of theirs is read.
        Padding needs no label: whether a state is real makes no difference to the other states.
        """
        key = len(state.positions), number
        if key not in self._placed:
            positions = state.positions[:, None].expand(-1, number, -1)
            stream = torch.arange(1, number + 1, device=positions.device)[None, :, None].expand_as(positions)
            self._placed[key] = self._place(positions, stream, torch.ones_like(stream, dtype=torch.bool))
        return self._placed[key]

    def _place(self, positions, stream, real, behind=None, after: int | None = None) -> Placement:
        """Assign cache slots to groups of tokens [R, G, B] and build their mask; the clean stream is their context.

        `behind` [R] and `after` are as in `BlockCache.assign_slots`, but `after` counts groups.
        """
        layout = TokenLayout(
            segment=torch.where(real, 0, PADDING),
            block=positions // self.cache.block_size,
            stream=stream,
            context=torch.full_like(stream, CLEAN),
            position=positions if self.has_shadows else None,
        ).map(lambda field: field.flatten(1))
        after = None if after is None else after * self.cache.block_size
        mask = self.model.attention_mask(layout, self.cache.assign_slots(layout, behind, after))
        return Placement(positions.flatten(1), mask, self.cache.slots)

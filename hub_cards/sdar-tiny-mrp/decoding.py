"""The decoding loop: one loop for all modes, one function per mode for what a round does.

A *round* is one forward of the backbone over candidate states of the current block of every row, and what follows from
it. The parts of a round, and where they are:

    reader.py             tokens and confidences from hidden states, at masked positions only
    drafting.py           drafted states after the current block, from estimated logits
    draft_graph.py        which of them the forward reads: the likeliest, at most as many as it has places
    cached_forwards.py    the packed forward [clean blocks | candidates], and head steps, on the cache
    verification.py       which candidates the backbone confirms, and its own step on the last of them
    remasking.py          which tokens are masked again after that step
    decoding.py           the order of these parts in each mode, and the loop over rounds
    block_state.py        where every row is, and moving on when its block is complete

A round of `spec` with K = 3, on one block of 4 tokens (`_` is the mask token):

    known           the current block  a _ _ _  and the backbone's hidden states before its last step
    draft           a _ c _   then   a b c _           head steps guess what the backbone will reveal next
    packed forward  [ a _ _ _ | a _ c _ | a b c _ ]    the backbone reads all three states at once
    verify          its step on a _ _ _ reveals c: equals the first draft, confirmed
                    its step on a _ c _ reveals d: not the second draft; its own step is taken: a _ c d
    next round      starts from a _ c d and the hidden states on a _ c _

The other modes read the current block alone. `direct` and `remask` let the head change the block after the step; with
`remask_criterion="backbone"` a shadow of masks (see masks.py) beside the current block serves to take back tokens.

Host synchronisations. The host waits for the device where a shape, or whether a forward runs, depends on the tokens:

    every round      `BlockState.synchronise`: one transfer of twelve numbers; one of them tells whether any scores
                     that were read allow no choice (`BlockState.note_faults`), which ends the call with an error
                     where a streamer or a stopping criterion has to see the columns of new tokens in order
                     (`ColumnEmitter`): whether another column can be emitted, once and again after each column
    spec             whether any row still drafts, before each head step but the first; then how many candidates
                     there are
                     where an opening state was read (see drafting.py): whether any row crosses the block border
    direct           whether any row is still unsettled, once per head step
    remask           how many reveals the head has to judge, once per round
    output_scores    `BlockState.write_scores` looks for the positions that were revealed, once per candidate
    rows dropped     when many rows have ended, their indices and the numbers of the smaller state

These remain because the alternative is to run a forward that no row needs. Logits processors, stopping criteria and
streamers may add waits of their own.
"""

import time
from collections.abc import Callable

import torch

from .block_cache import BlockCache
from .block_state import BlockState, Fault, fetch
from .cached_forwards import CachedForwards, Candidates, take_groups
from .draft_plan import RoundCost, planner_for
from .drafting import Drafter, current_states, with_shadow
from .options import DecodingOptions
from .reader import Reader
from .remasking import HeadRemasker, revoke_doubted_tokens
from .sampling import Sampler
from .verification import BackboneStep, Verifier

WORTH_DROPPING = 0.25  # share of ended rows at which state and cache are copied without them


class Decoder:
    """Decodes the rows of one `BlockState`.

    Args:
        model: an `MRPForDiffusionLM`.
        state: the rows.
        options: decoding options of this call.
        sampler: chooses tokens from logits.
        pad_token_id: fills shorter rows in what logits processors see.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        state: BlockState,
        options: DecodingOptions,
        sampler: Sampler,
        pad_token_id: int = 0,
    ) -> None:
        self.model = model
        self.state = state
        self.options = options
        self.sampler = sampler
        self.pad_token_id = pad_token_id
        self.cache = BlockCache(len(state.tokens), self._capacity(), state.block_size, state.tokens.device)
        self.forwards = CachedForwards(model, self.cache, options)
        self.planner = planner_for(model, options)
        self.crossed_rows = 0  # in the current round
        self.reader = Reader(model, sampler)
        self.drafter = Drafter(self.forwards, self.reader, options)
        self.verifier = Verifier(self.reader, options)
        self.remasker = None if options.revokes else HeadRemasker(self.forwards, self.reader, options)
        # what a round does, chosen once: a function that takes the logits processors' context
        self.decode_round: Callable[[torch.Tensor | None], None] = {
            None: self.backbone_round,
            "spec": self.spec_round,
            "direct": self.direct_round,
            "remask": self.revoking_round if options.revokes else self.remask_round,
        }[options.mrp_mode]

    def _capacity(self) -> int:
        """Cache slots per row: all tokens of the row, and the scratch slots of the widest forward."""
        state, options = self.state, self.options
        # all blocks but the last may be committed; beside them a forward reads up to K candidates, or a clean block or
        # a shadow and the current state
        capacity = state.width + max(options.candidates, 2) * state.block_size
        if options.mrp_mode == "remask" and not options.revokes:
            capacity += state.block_size**2  # leave-one-out: a state per position of the block
        return capacity

    def run(self, on_progress: Callable[[BlockState], None]) -> None:
        """Decode until no row is running.

        Args:
            on_progress: is called with the state of all rows after every round, and may stop rows.

        Raises:
            ValueError: when the scores at a position allow no choice, because they are not finite or processors have
                left no token.
        """
        everything, rows = self.state, torch.arange(len(self.state.tokens), device=self.state.tokens.device)
        while self.state.running_rows:
            # the tokens that logits processors see stay the same during a round
            context = self.state.finished_tokens(self.pad_token_id) if self.sampler.processes else None
            accepted, self.crossed_rows = self.state.accepted_drafts, 0
            self.decode_round(context)
            self.state.advance()
            everything.put(rows, self.state)
            on_progress(everything)
            self.state.running = everything.running[rows]
            self.state.synchronise()
            self.planner.end(time.perf_counter(), self.state.accepted_drafts - accepted + self.crossed_rows)
            if self.state.fault is not None:
                raise ValueError(self.fault_message(self.state.fault, rows))
            rows = rows[self.drop_ended_rows()]
            self.cache.longest = self.state.longest_cached

    def fault_message(self, fault: Fault, rows: torch.Tensor) -> str:
        """Return the error message for a fault; `rows` [n] are the batch's indices of the state's rows."""
        place = f"row {int(rows[fault.row])}, position {fault.position} (without padding)"
        at = f"{place}, mrp_mode={self.options.mrp_mode!r}"
        processors = [*self.sampler.shaping, *self.sampler.truncation]
        names = ", ".join(getattr(processor, "__name__", type(processor).__name__) for processor in processors)
        if fault.no_token:
            return f"no token is left to choose at {at}: the logits processors ({names}) forbid every token; allow one"
        source = "head" if fault.by_head else "backbone"
        after = f" after the logits processors ({names})" if names else ""
        return (
            f"the {source}'s scores{after} are NaN or infinite at {at}: check the weights"
            f"{' and the processors' if names else ''} for such numbers, or use a dtype of wider range"
        )

    def drop_ended_rows(self) -> torch.Tensor | slice:
        """Once many rows have ended, continue without them; return the indices [n] of the rows that remain."""
        state, rows = self.state, len(self.state.tokens)
        few_ended = state.running_rows > (1 - WORTH_DROPPING) * rows
        if few_ended or not state.running_rows or self.sampler.with_scores:  # scores are too wide to copy
            return slice(None)
        running = state.running.nonzero()[:, 0]
        self.state = state.take(running)
        self.forwards.keep_rows(running)
        self.sampler.keep_rows(running)
        return running

    # -- one round, by mode

    def backbone_round(self, context: torch.Tensor | None) -> None:
        """`mrp_mode=None`: one step of the backbone."""
        step = self.backbone_step(current_states(self.state), context)
        self.take(step, step.after, step.reveal_steps)

    def spec_round(self, context: torch.Tensor | None) -> None:
        """`spec`: draft, verify, reveal what was confirmed, and take the backbone's step from there."""
        state, started = self.state, time.perf_counter()
        rows, is_prefill = state.running_rows, state.max_pending > 1
        candidates, depths, head_steps = self.drafter.draft(state, context, self.planner.plan(rows))
        drafted = time.perf_counter()
        hidden = self.forwards.backbone(self.state, candidates)
        if not is_prefill:
            tokens = self.forwards.backbone_tokens
            self.planner.begin(RoundCost(rows, tokens, depths, head_steps, drafted - started, drafted))
        step = self.step_on_last_confirmed(candidates, hidden, context)
        if candidates.live.shape[1] > 1:
            self.state.write(step.before, self.state.running, step.reveal_steps, by_head=self.drafter.uses_head)
        self.take(step, step.after, step.reveal_steps)
        if step.opened is not None:
            self.cross_border(step, hidden)

    def direct_round(self, context: torch.Tensor | None) -> None:
        """`direct`: one step of the backbone, then up to K steps on corrected logits without verification."""
        self.backbone_round(context)
        self.step_from_corrected_logits(context)

    def remask_round(self, context: torch.Tensor | None) -> None:
        """`remask` by the head: one step of the backbone, less the reveals that the head doubts."""
        step = self.backbone_step(current_states(self.state), context)
        after = self.remasker.remask(self.state, step, context)
        self.take(step, after, step.reveal_steps)

    def revoking_round(self, context: torch.Tensor | None) -> None:
        """`remask` by the backbone: one step, less tokens of earlier steps that the backbone itself doubts now.

        A shadow of masks rides beside the current block and asks for its tokens again, in the same forward.
        """
        candidates = current_states(self.state)
        both = self.forwards.backbone(self.state, with_shadow(self.state, candidates))
        hidden, shadow_hidden = both.split(1, dim=1)  # [R, 1, B, H] each
        step = self.step_on_last_confirmed(candidates, hidden, context)
        shadow = self.reader.select(shadow_hidden[:, 0], self.state.revocable)
        again = self.reader.confidence_of(shadow, step.before, context)
        self.state.note_faults(self.state.revocable & self.state.running[:, None], again)
        after = revoke_doubted_tokens(self.state, step, again, self.options.keep_threshold)
        steps = step.reveal_steps.masked_fill(after == self.state.mask_token_id, -1)
        self.take(step, after, steps)

    # -- the parts of a round

    def backbone_step(self, candidates: Candidates, context: torch.Tensor | None) -> BackboneStep:
        """Run the backbone on the candidates, and find its step on the last one of each row that it confirms."""
        return self.step_on_last_confirmed(candidates, self.forwards.backbone(self.state, candidates), context)

    def step_on_last_confirmed(
        self, candidates: Candidates, hidden: torch.Tensor, context: torch.Tensor | None
    ) -> BackboneStep:
        """Find the backbone's step, given its hidden states [R, C, B, H], and keep those of the state before it."""
        step = self.verifier.verify(self.state, candidates, hidden, context)
        if hidden.shape[1] > 1:
            hidden = take_groups(hidden, step.last[:, None])
        self.state.hidden = hidden[:, 0]  # the next round drafts from these
        return step

    def take(self, step: BackboneStep, after: torch.Tensor, steps: torch.Tensor) -> None:
        """Write the block after the backbone's step, and count the steps that the round has done.

        Args:
            step: the backbone's step.
            after: the block after the step and the mode's changes to it, [R, B].
            steps: denoising step to record for each token that changes, [R, B].
        """
        state = self.state
        state.write(after, state.running, steps)
        state.steps = state.steps + torch.where(state.running, step.depth + 1, 0)
        state.opening = torch.zeros_like(state.opening)

    def cross_border(self, step: BackboneStep, hidden: torch.Tensor) -> None:
        """Move rows whose opening state was read to the next block, and take the backbone's first step there.

        Args:
            step: the backbone's step; in these rows its last confirmed candidate is the complete block.
            hidden: the backbone's hidden states on all candidates, [R, C, B, H].
        """
        opened, row = step.opened, torch.arange(len(hidden), device=hidden.device)
        self.crossed_rows = int(opened.rows.sum())  # waits for the device: moving keys in all layers would cost more
        if not self.crossed_rows:
            return
        self.forwards.commit_candidates(self.state, opened.rows, step.last, hidden[row, step.last])
        self.state.advance()
        read = opened.rows[:, None].expand_as(opened.after)  # every position of the opening state is masked
        self.state.note_faults(read, opened.choice.confidence, opened.choice.score)
        if opened.choice.scores is not None:
            self.state.write_scores(opened.choice.scores, read & (opened.after != self.state.mask_token_id))
        self.state.open_next(opened.rows, opened.after, hidden[row, opened.at])

    def step_from_corrected_logits(self, context: torch.Tensor | None) -> None:
        """Take up to K steps by the same rule on logits that the head has corrected."""
        state, hidden = self.state, self.state.hidden
        for _ in range(self.options.look_ahead):
            block = state.block
            stepping = state.running & ~state.settled(block)
            masked = (block == state.mask_token_id) & stepping[:, None]
            total, total_masked = fetch(torch.stack([stepping.sum(), masked.sum()]))  # waits for the device, see above
            if not total:
                return
            states = block[:, None], hidden[:, None], stepping[:, None]
            hidden = self.forwards.head(state, *states, total)[:, 0]
            selection = self.reader.select(hidden, masked, total_masked)
            choice = self.reader.read(selection, state.positions, state.steps, context)
            state.note_faults(masked, choice.confidence, choice.score, by_head=True)
            reveal = self.options.step_rule(choice.confidence, choice.entropy, masked)
            if choice.scores is not None:
                state.write_scores(choice.scores, reveal & stepping[:, None])
            after = torch.where(reveal, choice.token, block)
            state.write(after, stepping, state.steps[:, None].expand_as(block), by_head=True)
            state.steps = state.steps + stepping.long()

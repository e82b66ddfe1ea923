"""Measure a draft profile: what each plan of `mrp_steps="auto"` gains with a checkpoint, on decoded samples."""

from collections.abc import Callable, Sequence

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.draft_plan import Gain, observe_rounds

from .decoding import Totals, decode_prompts
from .modes import BACKBONE_ONLY

CANDIDATES = (2, 3, 4, 6, 8, 12, 16)


def plans(draft: str) -> list[tuple[int, int]]:
    """Return the plans to measure, as numbers of candidates and of depths per head step; the first does not draft."""
    if draft == "self":
        return [(1, 1)] + [(candidates, candidates - 1) for candidates in CANDIDATES]
    # with C candidates, a head step per C - 1 depths is one per round
    shared = {candidates: sorted({1, min(2, candidates - 1), candidates - 1}) for candidates in CANDIDATES}
    return [(1, 1)] + [(candidates, each) for candidates, choices in shared.items() for each in choices]


def measure_profile(
    model: MRPForDiffusionLM,
    prompts: Sequence[list[int]],
    draft: str,
    max_new_tokens: int,
    on_gain: Callable[[Gain], None] = lambda gain: None,
) -> list[Gain]:
    """Decode the prompts one by one with every plan, and return what each plan does per round.

    Args:
        model: the model.
        prompts: token ids of each prompt.
        draft: what drafts, "head" or "self".
        max_new_tokens: limit per prompt.
        on_gain: called with the figures of each plan.
    """

    def decode(options: dict) -> Totals:
        return Totals.of(decode_prompts(model, prompts, options, max_new_tokens, batch_size=1))

    steps = decode(BACKBONE_ONLY).forwards  # without drafts, a forward is a step
    gains = []
    for candidates, drafts_per_head_step in plans(draft):
        options = {"mrp_mode": "spec", "mrp_candidates": candidates, "mrp_draft": draft}
        with observe_rounds(model) as rounds:
            totals = decode(options | {"mrp_drafts_per_head_step": drafts_per_head_step})
        count = len(rounds)
        gain = Gain(
            candidates=candidates,
            drafts_per_head_step=drafts_per_head_step,
            steps=round(steps / totals.forwards, 3),
            tokens=round(sum(cost.tokens for cost in rounds) / count / model.config.block_size, 3),
            depths=round(sum(cost.depths for cost in rounds) / count, 3),
            head_steps=round(sum(cost.head_steps for cost in rounds) / count, 3),
        )
        on_gain(gain)
        gains.append(gain)
    return gains

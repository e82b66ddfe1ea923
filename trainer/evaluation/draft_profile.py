"""Measure a draft profile: what each plan of `mrp_steps="auto"` gains with a checkpoint, on decoded samples."""

from collections.abc import Callable, Sequence

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.draft_plan import Gain, observe_rounds

from .decoding import Totals, decode_prompts
from .modes import BACKBONE_ONLY

CHAINS = (2, 3, 4, 5)  # a chain costs less than a graph of as many candidates, and with few of them it gains as much
GRAPHS = (4, 6, 8, 12, 16)


def plans(draft: str) -> list[tuple[int, int, bool]]:
    """Return the plans to measure: numbers of candidates and of depths per head step, and whether it is a chain.

    The first does not draft.
    """
    found = [(1, 1, True)]
    for sizes, chain in ((CHAINS, True), (GRAPHS, False)):
        for size in sizes:
            # with C candidates, a head step per C - 1 depths is one per round
            shared = {size - 1} if draft == "self" else {1, min(2, size - 1), size - 1}
            found += [(size, each, chain) for each in sorted(shared)]
    return found


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
    for candidates, drafts_per_head_step, chain in plans(draft):
        options = {"mrp_mode": "spec", "mrp_draft": draft, "mrp_steps" if chain else "mrp_candidates": candidates}
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
            chain=chain,
        )
        on_gain(gain)
        gains.append(gain)
    return gains

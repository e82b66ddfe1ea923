"""Where a decoded text differs from the expected one, and whether rounding can be the reason.

A text that differs is replayed in its own order, without a cache: at each state that it went through, the backbone is
asked for its own choice. If every token is within rounding of that choice, the text is as good as the expected one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.generation_mrp import MRPGenerateOutput
from modeling_mrp.keyed_noise import keyed_gumbel, row_keys
from modeling_mrp.options import OPTION_NAMES, DecodingOptions
from modeling_mrp.sampling import Sampler
from modeling_mrp.step_rules import StepRule

from .decoding import end_of_text_ids

PROMPT_SHOWN = 60  # characters of a prompt in the report
ROUNDING_STEPS = 8  # a margin counts as rounding up to this many units in the last place of the largest value


@dataclass(frozen=True)
class Difference:
    """The first place where a text differs from the expected one, and whether rounding can be the reason.

    Attributes:
        prompt: number of the prompt, from 0.
        prompt_text: end of its text.
        position: position of the token, counted from the start of the prompt.
        step: denoising steps done in its block when it was revealed.
        expected, found: the two tokens, as text.
        confidences: the confidences of the two, at that state.
        token_margin: by how much the backbone would have preferred another token (sampling noise included); the
            largest of the text.
        order_margin: by how much confidences (or nats of entropy) would have had to change for the step rule to reveal
            the positions that were revealed, see `order_excess`; the largest of the text. None: no change would do.
        within_rounding: whether both margins are within rounding of the dtype at every step of the text.
    """

    prompt: int
    prompt_text: str
    position: int
    step: int
    expected: str
    found: str
    confidences: tuple[float, float]
    token_margin: float
    order_margin: float | None
    within_rounding: bool


def first_difference(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Tensor],
    expected: Tensor,
    found: Tensor,
    output: MRPGenerateOutput,
    options: Mapping,
    seed: int,
) -> Difference | None:
    """Return the first difference beyond rounding, else the first one; None if the texts are equal.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        inputs: `input_ids` and `attention_mask` [R, P].
        expected, found: new tokens [R, N], padded.
        output: the output of `generate` that `found` is from.
        options: options of `generate` that both were decoded with.
        seed: seed that both were decoded with.
    """
    first = None
    for row in (expected != found).any(1).nonzero()[:, 0].tolist():
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        steps = output.reveal_steps[row, inputs["input_ids"].shape[1] :]
        difference = explain_difference(model, tokenizer, row, prompt, expected[row], found[row], steps, options, seed)
        if not difference.within_rounding:
            return difference
        first = first or difference
    return first


@torch.no_grad()
def explain_difference(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    prompt: Tensor,
    expected: Tensor,
    found: Tensor,
    reveal_steps: Tensor,
    options: Mapping,
    seed: int,
) -> Difference:
    """Replay a text that differs from the expected one, from the block of the first difference on.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        number: number of the prompt.
        prompt: its token ids [P].
        expected, found: new tokens [N], padded.
        reveal_steps: denoising steps that revealed `found`, at most [N], -1 where nothing was revealed.
        options: options of `generate` that both were decoded with.
        seed: seed that both were decoded with.
    """
    replay = _Replay(model, prompt, found, reveal_steps, options, seed)
    at = int((expected != found).nonzero()[0])  # among the new tokens
    pair = torch.stack([expected[at], found[at]])
    # after the end of text nothing was revealed that could have been another token
    within_rounding = at < replay.length
    first = len(prompt) + at
    step, confidences = 0, (0.0, 0.0)  # of a difference in a block after the end of text
    token_margin = order_margin = 0.0
    eps = torch.finfo(model.dtype).eps * ROUNDING_STEPS
    for state in replay.states(first // replay.size * replay.size):
        token_margin, order_margin = max(token_margin, state.token_margin), max(order_margin, state.order_margin)
        within_rounding &= state.token_margin <= eps * state.largest_logit and state.order_margin <= eps
        if state.start <= first < state.start + replay.size and state.step == max(int(replay.steps[first]), 0):
            step, confidences = state.step, replay.confidences_of(state, first - state.start, pair)
    return Difference(
        prompt=number,
        prompt_text=tokenizer.decode(prompt, skip_special_tokens=True)[-PROMPT_SHOWN:],
        position=first,
        step=step,
        expected=tokenizer.decode(pair[0]),
        found=tokenizer.decode(pair[1]),
        confidences=confidences,
        token_margin=token_margin,
        order_margin=order_margin if order_margin < torch.inf else None,
        within_rounding=within_rounding,
    )


@dataclass(frozen=True)
class _State:
    """A step of a replay: its block, the backbone's logits [1, B, V], and how far the text is from its choice."""

    start: int
    step: int
    logits: Tensor
    token_margin: float
    order_margin: float

    @property
    def largest_logit(self) -> float:
        return self.logits.abs().max().item()


class _Replay:
    """Goes through the states of one text, block by block and step by step, with a forward of its own for each."""

    def __init__(self, model, prompt: Tensor, found: Tensor, reveal_steps: Tensor, options: Mapping, seed: int):
        self.model, self.size, self.mask_id = model, model.config.block_size, model.config.mask_token_id
        known = {name: value for name, value in options.items() if name in OPTION_NAMES}
        self.rule = DecodingOptions.resolve(known, model.config).step_rule
        self.sampler = _sampler(model, prompt, options, self.rule, seed)
        self.prompt_length, self.found, self.recorded = len(prompt), found, len(reveal_steps)
        ends = torch.isin(found, torch.tensor(end_of_text_ids(model, options), device=found.device))
        self.length = int(ends.nonzero()[0]) + 1 if ends.any() else len(found)  # the rest was cut off
        row = torch.cat([prompt, torch.full_like(found, self.mask_id)])
        self.row = torch.nn.functional.pad(row, (0, -len(row) % self.size), value=self.mask_id)  # [L], whole blocks
        self.steps = torch.full_like(self.row, -1)
        self.steps[len(prompt) : len(prompt) + len(reveal_steps)] = reveal_steps

    def states(self, start: int) -> Iterator[_State]:
        """The states from the block at `start` on, up to the last block with a revealed token."""
        self.row[self.prompt_length : start] = self.found[: max(0, start - self.prompt_length)]
        while start < len(self.row) and (self.steps[start : start + self.size] >= 0).any():
            for step in range(int(self.steps[start : start + self.size].max()) + 1):
                yield self._advance(start, step)
            start += self.size

    def _advance(self, start: int, step: int) -> _State:
        """Ask the backbone for its choice, reveal what the text revealed instead, and compare the two."""
        block = slice(start, start + self.size)
        positions = torch.arange(start, start + self.size, device=self.row.device)
        at_step = torch.tensor([step], device=self.row.device)
        logits = self.model(self.row[None, : start + self.size]).logits[:, start:]  # [1, B, V]
        read = self.sampler.read(logits, positions[None], at_step, self.row[None])
        scores = read.scores[0]  # [B, V]
        if self.sampler.samples:
            scores = scores + keyed_gumbel(self.sampler.noise_keys(positions[None], at_step)[0], scores.shape[-1])
        masked = self.row[block] == self.mask_id
        entropy = None if read.entropy is None else read.entropy[0]
        hidden = masked & (positions >= self.prompt_length + self.recorded)
        revealed, order_margin = most_likely_step(
            self.rule, read.confidence[0], entropy, masked, self.steps[block] == step, hidden
        )
        tokens = read.token[0].clone()
        given = revealed & (positions < self.prompt_length + self.length)  # after the end the text does not say
        tokens[given] = self.found[positions[given] - self.prompt_length]
        gaps = (scores.gather(-1, read.token[0][:, None]) - scores.gather(-1, tokens[:, None]))[:, 0]
        self.row[block] = torch.where(revealed, tokens, self.row[block])
        return _State(
            start=start,
            step=step,
            logits=logits,
            token_margin=torch.where(revealed, gaps, 0.0).max().item(),
            order_margin=order_margin,
        )

    def confidences_of(self, state: _State, place: int, tokens: Tensor) -> tuple[float, ...]:
        """The confidences of tokens [N] at one place of the block."""
        logits = state.logits[:, place].expand(len(tokens), -1)  # [N, V]
        return tuple(self.sampler.confidence_of(logits, tokens, self.row.expand(len(tokens), -1)).tolist())


def _sampler(model, prompt: Tensor, options: Mapping, rule: StepRule, seed: int) -> Sampler:
    """The sampler that `generate` makes for the prompt alone."""
    torch.manual_seed(seed)
    sampling, temperature = options.get("do_sample", False), options.get("temperature", 1.0)
    return Sampler(
        model.config.mask_token_id,
        shaping=[lambda _, scores: scores / temperature] if sampling else [],
        truncation=[],
        keys=row_keys(prompt[None], torch.ones_like(prompt[None], dtype=torch.bool)) if sampling else None,
        seed=torch.randint(2**62, ()).item() if sampling else 0,
        with_entropy=rule.needs_entropy,
        with_scores=True,
    )


def order_excess(
    rule: StepRule, confidence: Tensor, entropy: Tensor | None, masked: Tensor, revealed: Tensor
) -> float:
    """Return by how much confidences, or nats of entropy, would have to move for the rule to reveal these positions.

    It is 0 when the rule does reveal them, and infinity when no such change would make it.

    Args:
        rule: the step rule.
        confidence, entropy, masked, revealed: of one block, [B] each; entropy is None if the rule does not need it.
    """
    own = rule(confidence, entropy, masked)
    if torch.equal(own, revealed):
        return 0.0
    left, count = masked & ~revealed, int(revealed.sum())
    if rule.strategy == "sequential" or count == 0:
        return float("inf")
    if rule.strategy == "low_confidence_static":
        if count != own.sum():
            return float("inf")
        return (confidence[left].max() - confidence[revealed].min()).item()
    if rule.strategy == "low_confidence_dynamic":
        least, most = confidence[revealed].min().item(), confidence[left].max().item() if left.any() else 0.0
        below, above = rule.confidence_threshold - least, most - rule.confidence_threshold
        if count == 1:  # the most confident position is revealed wherever the threshold lies
            below = min(below, most - least)
        return max(below, above, 0.0)
    total = entropy[revealed].sum().item()
    excess = [total - rule.entropy_bound] if count > 1 else []
    if left.any():
        nearest = entropy[left].min().item()
        excess += [entropy[revealed].max().item() - nearest, rule.entropy_bound - total - nearest]
    return max(excess, default=0.0)


def most_likely_step(
    rule: StepRule, confidence: Tensor, entropy: Tensor | None, masked: Tensor, recorded: Tensor, hidden: Tensor
) -> tuple[Tensor, float]:
    """Return the positions that a step revealed, [B], and their `order_excess`.

    The text ends before its last block does, and nothing records what was revealed after its end. A step revealed its
    recorded positions and the first few of the hidden ones in the rule's order: as many as make the smallest excess.

    Args:
        rule: the step rule.
        confidence, entropy, masked: as in `order_excess`.
        recorded: positions that are known to have been revealed, bool [B].
        hidden: masked positions that are not recorded, bool [B].
    """
    if rule.strategy == "sequential":
        order = torch.arange(len(masked), device=masked.device)
    else:
        order = confidence.argsort(descending=True) if entropy is None else entropy.argsort()
    order = order[hidden[order]]
    steps = [recorded.index_fill(0, order[:count], True) for count in range(len(order) + 1)]
    return min(
        ((revealed, order_excess(rule, confidence, entropy, masked, revealed)) for revealed in steps),
        key=lambda step: step[1],
    )

"""`mrp verify`: is speculative decoding really lossless here, on the user's own prompts?"""

from dataclasses import dataclass

import torch

from modeling_mrp.options import DecodingOptions
from modeling_mrp.sampling import Sampler, row_keys

from ..checkpoints.weight_files import backbone_hash
from .acceptance import accepted_per_verification

RULES = {
    "static": {"remasking_strategy": "low_confidence_static"},
    "dynamic": {"remasking_strategy": "low_confidence_dynamic"},
    "sequential": {"remasking_strategy": "sequential"},
    "entropy": {"remasking_strategy": "entropy_bounded"},
}
GREEDY = {"do_sample": False}  # whatever the checkpoint's generation config says
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": None}
CHOICES = {"greedy": GREEDY, "sampling": SAMPLING}
PROMPT_SHOWN = 60  # characters of a prompt in the report
ROUNDING_STEPS = 8  # a margin of so many units in the last place of the largest value counts as rounding


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from the expected one, and whether rounding can be why, replayed without a cache.

    Attributes:
        prompt: number of the prompt, from 0; prompt_text: its end.
        position: of the token, counted from the start of the prompt; step: denoising steps done in its block when it
            was revealed.
        expected, found: the two candidates, as text; confidences: of the two, at that state.
        token_margin: by how much the backbone would have preferred another token (noise included when sampling),
            the most in the text.
        order_margin: how much confidences (or nats of entropy) would have had to change for the rule to reveal the
            positions that were revealed, the most in the text, see `order_excess`; None: no change would do.
        within_rounding: whether both are within rounding of the dtype: every token of the text is then, at the state
            in which it was revealed, as good as the backbone's own choice.
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


@dataclass(frozen=True)
class Check:
    """One line of the report: what was compared, on how many prompts or rows, and what differed.

    `difference` is the first one beyond rounding, or else the first.
    """

    name: str
    compared: int
    same: int
    tokens_per_forward: float | None = None
    accepted_by_depth: list[float] | None = None
    difference: Difference | None = None


@dataclass(frozen=True)
class Acceptance:
    """Drafts of the head that a verification accepts, against what training saw.

    Attributes:
        mrp_steps: K that they were drafted with.
        mean: over the prompts; None where none had a draft.
        low, high: range over the held-out prompts of the training; None when the checkpoint does not record it.
    """

    mrp_steps: int
    mean: float | None
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        if None in (self.mean, self.low):
            return "unknown"
        return "BELOW" if self.mean < self.low else "above" if self.mean > self.high else "in range"


def verify(model, tokenizer, inputs, max_new_tokens: int = 64, seed: int = 0, **spec_options) -> list[Check]:
    """Compare spec with backbone-only for every step rule, greedy and sampling, and a batch with its rows.

    Args:
        inputs: `input_ids` and `attention_mask` [R, P], left-padded.
        spec_options: options of `generate` for the speculative side (mrp_steps, mrp_draft, ...).
    """
    checks = []
    for rule, rule_options in RULES.items():
        for choice, choice_options in CHOICES.items():
            options = rule_options | choice_options | {"max_new_tokens": max_new_tokens}
            plain, _ = _decode(model, inputs, seed, mrp_mode=None, **options)
            spec, output = _decode(model, inputs, seed, **{"mrp_mode": "spec"} | spec_options, **options)
            proposed, accepted = output.stats.drafts_proposed.sum(0)[1:], output.stats.drafts_accepted.sum(0)[1:]
            checks.append(
                Check(
                    name=f"spec equals backbone-only, {rule}, {choice}",
                    compared=len(plain),
                    same=int((plain == spec).all(1).sum()),
                    tokens_per_forward=output.tokens_per_forward.mean().item(),
                    accepted_by_depth=(accepted / proposed.clamp(min=1)).tolist(),
                    difference=first_difference(model, tokenizer, inputs, plain, spec, output, options, seed),
                )
            )
    return checks + _law_checks(model, tokenizer, inputs, max_new_tokens, seed, spec_options)


def check_base(model) -> list[Check]:
    """Whether the backbone is the one that the checkpoint records; no check where it records none."""
    recorded = vars(model.config).get("base_hash")
    if recorded is None:
        return []
    return [Check(f"the backbone is {model.config.base_model}", 1, int(backbone_hash(model) == recorded))]


def check_acceptance(model, inputs, max_new_tokens: int = 64, drafts: int = 4) -> Acceptance:
    """Acceptance on these prompts (as `verify` takes them), with the K of training or, if not recorded, `drafts`."""
    recorded = model.config.trained_acceptance or {"mrp_steps": drafts}
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    rates = accepted_per_verification(model, prompts, recorded["mrp_steps"], max_new_tokens)
    return Acceptance(mean=sum(rates) / len(rates) if rates else None, **recorded)


def _law_checks(model, tokenizer, inputs, max_new_tokens, seed, spec_options):
    checks = []
    options = GREEDY | {"max_new_tokens": max_new_tokens}
    for name, mode in {"backbone-only": {"mrp_mode": None}, "spec": {"mrp_mode": "spec"} | spec_options}.items():
        together, output = _decode(model, inputs, seed, **mode, **options)
        alone = []
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            row = {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
            alone.append(_decode(model, row, seed, **mode, **options)[0])
        alone = torch.cat(alone)
        checks.append(
            Check(
                name=f"a batch equals its rows, {name}",
                compared=len(alone),
                same=int((alone == together).all(1).sum()),
                difference=first_difference(model, tokenizer, inputs, alone, together, output, options, seed),
            )
        )
        clean = (together != model.config.mask_token_id).all(1)
        checks.append(Check(f"no mask token is returned, {name}", len(together), int(clean.sum())))
    return checks


def _decode(model, inputs, seed, max_new_tokens, **options):
    """New tokens [R, max_new_tokens], padded, and the output."""
    torch.manual_seed(seed)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **options)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    pad = model.generation_config.pad_token_id
    return torch.nn.functional.pad(new, (0, max_new_tokens - new.shape[1]), value=0 if pad is None else pad), output


def first_difference(model, tokenizer, inputs, expected, found, output, options, seed) -> Difference | None:
    """The first difference beyond rounding, or else the first, of new tokens [R, N]; `output` is that of `found`."""
    first = None
    for row in (expected != found).any(1).nonzero()[:, 0].tolist():
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        steps = output.reveal_steps[row, inputs["input_ids"].shape[1] :]
        difference = judge(model, tokenizer, row, prompt, expected[row], found[row], steps, options, seed)
        if not difference.within_rounding:
            return difference
        first = first or difference
    return first


# --- a difference


@torch.no_grad()
def judge(model, tokenizer, number, prompt, expected, found, reveal_steps, options, seed) -> Difference:
    """Replay a text that differs from the expected one, in its own order and without a cache.

    At every state on its way, from the block of the first difference on, the backbone is asked for its choice.

    Args:
        number: of the prompt; prompt: its ids, [P].
        expected, found: new tokens, [N], padded; reveal_steps: of `found`, at most [N], -1 where nothing was revealed.
        options, seed: that it was decoded with.
    """
    size, mask_id = model.config.block_size, model.config.mask_token_id
    known = {name: value for name, value in options.items() if name in DecodingOptions.__dataclass_fields__}
    rule = DecodingOptions.resolve(known, model.config).step_rule
    sampler = _sampler(model, prompt, options, rule, seed)
    eps = torch.finfo(model.dtype).eps * ROUNDING_STEPS
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    ends = torch.isin(found, torch.tensor(eos, device=found.device))
    length = int(ends.nonzero()[0]) + 1 if ends.any() else len(found)  # what follows was cut off

    row = torch.cat([prompt, torch.full_like(found, mask_id)])
    row = torch.nn.functional.pad(row, (0, -len(row) % size), value=mask_id)
    steps = torch.full_like(row, -1)
    steps[len(prompt) : len(prompt) + len(reveal_steps)] = reveal_steps
    first = len(prompt) + int((expected != found).nonzero()[0])
    start = first // size * size
    row[len(prompt) : start] = found[: max(0, start - len(prompt))]
    where, token_margin, order_margin = None, 0.0, 0.0
    rounding = first < len(prompt) + length  # behind the end nothing was revealed that could have been another token
    while start < len(row) and (steps[start : start + size] >= 0).any():
        block = slice(start, start + size)
        positions = torch.arange(start, start + size, device=row.device)
        for step in range(int(steps[block].max()) + 1):
            logits = model(row[None, : start + size]).logits[:, start:]
            read = sampler.read(logits, positions[None], torch.tensor([step], device=row.device), row[None])
            scores = sampler.with_noise(read.scores, positions[None], torch.tensor([step], device=row.device))[0]
            masked = row[block] == mask_id
            entropy = None if read.entropy is None else read.entropy[0]
            own = rule(read.confidence[0], entropy, masked)
            revealed = _with_hidden(
                steps[block] == step, own & (positions >= len(prompt) + len(reveal_steps)), own, rule
            )
            tokens = read.token[0].clone()
            given = revealed & (positions < len(prompt) + length)  # behind the end the text does not say
            tokens[given] = found[positions[given] - len(prompt)]
            gaps = (scores.gather(-1, read.token[0][:, None]) - scores.gather(-1, tokens[:, None]))[:, 0]
            gap = torch.where(revealed, gaps, 0.0).max().item()
            excess = order_excess(rule, read.confidence[0], entropy, masked, revealed)
            if block.start <= first < block.stop and step == max(int(steps[first]), 0):
                pair = torch.stack([expected[first - len(prompt)], found[first - len(prompt)]])
                both = logits[:, first - start].expand(2, -1)[None]
                where = step, pair, sampler.confidence_of(both, pair[None], row[None])[0].tolist()
            token_margin, order_margin = max(token_margin, gap), max(order_margin, excess)
            rounding &= gap <= eps * logits.abs().max().item() and excess <= eps
            row[block] = torch.where(revealed, tokens, row[block])
        start += size
    text = tokenizer.decode(prompt, skip_special_tokens=True)[-PROMPT_SHOWN:]
    if where is None:  # in a block behind the end
        where = 0, torch.stack([expected[first - len(prompt)], found[first - len(prompt)]]), (0.0, 0.0)
    step, pair, confidences = where
    return Difference(
        prompt=number,
        prompt_text=text,
        position=first,
        step=step,
        expected=tokenizer.decode(pair[0]),
        found=tokenizer.decode(pair[1]),
        confidences=tuple(confidences),
        token_margin=token_margin,
        order_margin=order_margin if order_margin < torch.inf else None,
        within_rounding=rounding,
    )


def _with_hidden(shown, hidden, own, rule) -> torch.Tensor:
    """What a step revealed, [B]: what is on record, and of what lies behind the last token the backbone's choice."""
    if rule.strategy in ("low_confidence_static", "sequential"):  # so many in all
        hidden = hidden & (hidden.cumsum(0) <= own.sum() - shown.sum())
    return shown | hidden


def _sampler(model, prompt, options, rule, seed) -> Sampler:
    """As `generate` makes it for the prompt alone."""
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


def order_excess(rule, confidence, entropy, masked, revealed) -> float:
    """By how much confidences, or nats of entropy, would have to move for the rule to reveal these positions.

    0 when it does reveal them, infinity when no such change would make it.

    Args:
        rule: a `StepRule`; confidence, entropy (or None), masked, revealed: of one block, [B].
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
        if count == 1:  # the surest is revealed wherever the threshold lies
            below = min(below, most - least)
        return max(below, above, 0.0)
    total = entropy[revealed].sum().item()
    excess = [total - rule.entropy_bound] if count > 1 else []
    if left.any():
        nearest = entropy[left].min().item()
        excess += [entropy[revealed].max().item() - nearest, rule.entropy_bound - total - nearest]
    return max(excess, default=0.0)


def passed(check: Check, strict: bool) -> bool:
    """Whether a check holds; outside `strict` (float32) a first difference within rounding is let pass."""
    return check.same == check.compared or (
        not strict and check.difference is not None and check.difference.within_rounding
    )

"""`mrp verify`: check on the user's own prompts that speculative decoding is lossless."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.generation_mrp import GenerationStats

from ..checkpoints.weight_files import backbone_hash
from .acceptance import accepted_per_verification
from .decoding import left_padded, pad_token_id, without_padding
from .differences import Difference, first_difference

RULES = {
    "static": {"remasking_strategy": "low_confidence_static"},
    "dynamic": {"remasking_strategy": "low_confidence_dynamic"},
    "sequential": {"remasking_strategy": "sequential"},
    "entropy": {"remasking_strategy": "entropy_bounded"},
}
GREEDY = {"do_sample": False}  # whatever the checkpoint's generation config says
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": None}
CHOICES = {"greedy": GREEDY, "sampling": SAMPLING}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what is checked.
        compared: number of prompts or rows compared.
        same: number of those that are equal.
        tokens_per_forward: of the speculative side, where there is one.
        accepted_by_depth: of the speculative side, as deep as any draft was proposed.
        difference: the first difference beyond rounding, else the first one, if any.
    """

    name: str
    compared: int
    same: int
    tokens_per_forward: float | None = None
    accepted_by_depth: list[float] | None = None
    difference: Difference | None = None


@dataclass(frozen=True)
class Acceptance:
    """How many of the head's drafts a verification accepts, compared with what training saw.

    Attributes:
        mrp_steps: look-ahead K that they were drafted with.
        mean: mean over the prompts; None if no prompt had a draft.
        low, high: range over the held-out prompts of the training; None if the checkpoint does not record it.
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


def verify(
    model: MRPForDiffusionLM,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, torch.Tensor],
    max_new_tokens: int = 64,
    seed: int = 0,
    **spec_options: Any,
) -> list[Check]:
    """Compare spec with backbone-only for every step rule, greedy and sampling, and a batch with its rows.

    Args:
        model: the model, in eval mode on its device.
        tokenizer: its tokenizer.
        inputs: `input_ids` and `attention_mask` [R, P], padded on the left.
        max_new_tokens: limit per prompt.
        seed: seed of the sampling noise.
        **spec_options: options of `generate` for the speculative side (mrp_steps, mrp_draft, ...).
    """
    checks = []
    for rule, rule_options in RULES.items():
        for choice, choice_options in CHOICES.items():
            options = rule_options | choice_options | {"max_new_tokens": max_new_tokens}
            plain, _ = _decode(model, inputs, seed, mrp_mode=None, **options)
            spec, output = _decode(model, inputs, seed, **{"mrp_mode": "spec"} | spec_options, **options)
            checks.append(
                Check(
                    name=f"spec equals backbone-only, {rule}, {choice}",
                    compared=len(plain),
                    same=int((plain == spec).all(1).sum()),
                    tokens_per_forward=output.tokens_per_forward.mean().item(),
                    accepted_by_depth=_accepted_by_depth(output.stats),
                    difference=first_difference(model, tokenizer, inputs, plain, spec, output, options, seed),
                )
            )
    return checks + _row_checks(model, tokenizer, inputs, max_new_tokens, seed, spec_options)


def _accepted_by_depth(stats: GenerationStats) -> list[float]:
    """Share of the drafts at depth 1, 2, ... that were accepted, as deep as any were proposed."""
    pairs = zip(stats.drafts_accepted.sum(0).tolist(), stats.drafts_proposed.sum(0).tolist(), strict=True)
    return [accepted / proposed for accepted, proposed in list(pairs)[1:] if proposed]


def check_base(model: MRPForDiffusionLM) -> list[Check]:
    """Check that the backbone is the one that the checkpoint records; no check if it records none."""
    recorded = getattr(model.config, "base_hash", None)  # only converted checkpoints have it
    if recorded is None:
        return []
    return [Check(f"the backbone is {model.config.base_model}", 1, int(backbone_hash(model) == recorded))]


def check_acceptance(
    model: MRPForDiffusionLM, inputs: Mapping[str, torch.Tensor], max_new_tokens: int = 64, drafts: int = 4
) -> Acceptance:
    """Measure the acceptance on these prompts, and compare it with the range that training recorded.

    Args:
        model: the model, with a head.
        inputs: as in `verify`.
        max_new_tokens: limit per prompt.
        drafts: look-ahead K, if training did not record its own.
    """
    recorded = model.config.trained_acceptance or {"mrp_steps": drafts}
    rates = accepted_per_verification(model, without_padding(inputs), recorded["mrp_steps"], max_new_tokens)
    return Acceptance(mean=sum(rates) / len(rates) if rates else None, **recorded)


def _row_checks(model, tokenizer, inputs, max_new_tokens, seed, spec_options) -> list[Check]:
    """Check that a batch equals its rows decoded alone, and that no mask token is returned."""
    checks = []
    options = GREEDY | {"max_new_tokens": max_new_tokens}
    for name, mode in {"backbone-only": {"mrp_mode": None}, "spec": {"mrp_mode": "spec"} | spec_options}.items():
        together, output = _decode(model, inputs, seed, **mode, **options)
        rows = [left_padded([prompt], device=model.device) for prompt in without_padding(inputs)]
        alone = torch.cat([_decode(model, row, seed, **mode, **options)[0] for row in rows])
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


def _decode(model, inputs, seed, max_new_tokens, **options: Any):
    """New tokens [R, max_new_tokens] as `generate` returns them, padded to one width, and its output."""
    torch.manual_seed(seed)
    pad = pad_token_id(model)
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, return_dict_in_generate=True, **options
    )
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    return torch.nn.functional.pad(new, (0, max_new_tokens - new.shape[1]), value=pad), output


def passed(check: Check, strict: bool) -> bool:
    """Whether a check holds; outside `strict` (float32) a first difference within rounding is let pass."""
    return check.same == check.compared or (
        not strict and check.difference is not None and check.difference.within_rounding
    )

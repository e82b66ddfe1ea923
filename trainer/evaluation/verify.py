"""`mrp verify`: check on the user's own prompts that speculative decoding is lossless."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp import MRPForDiffusionLM

from ..checkpoints.weight_files import backbone_hash
from ..commands.cli import command_parser
from .acceptance import accepted_per_verification
from .decoding import left_padded, without_padding
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
        tokens_per_forward, accepted_by_depth: of the speculative side, where there is one.
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
    **spec_options,
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
    return checks + _row_checks(model, tokenizer, inputs, max_new_tokens, seed, spec_options)


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


def _decode(model, inputs, seed, max_new_tokens, **options):
    """New tokens [R, max_new_tokens] as `generate` returns them, padded to one width, and its output."""
    torch.manual_seed(seed)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **options)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    pad = model.generation_config.pad_token_id
    return torch.nn.functional.pad(new, (0, max_new_tokens - new.shape[1]), value=0 if pad is None else pad), output


def passed(check: Check, strict: bool) -> bool:
    """Whether a check holds; outside `strict` (float32) a first difference within rounding is let pass."""
    return check.same == check.compared or (
        not strict and check.difference is not None and check.difference.within_rounding
    )


def describe(check: Check, strict: bool) -> str:
    """The line, or lines, of the report for one check."""
    verdict = "same" if check.same == check.compared else "rounding" if passed(check, strict) else "DIFFERENT"
    line = f"{verdict:10}{check.same}/{check.compared}  {check.name}"
    if check.tokens_per_forward is not None:
        depths = " ".join(f"{share:.2f}" for share in check.accepted_by_depth)
        line += f"; {check.tokens_per_forward:.2f} tokens a forward, accepted by depth: {depths or '-'}"
    if check.difference is not None:
        d = check.difference
        line += (
            f"\n          prompt {d.prompt} (...{d.prompt_text!r}), position {d.position}, step {d.step} of its block:"
            f" {d.found!r} ({d.confidences[1]:.4f}) instead of {d.expected!r} ({d.confidences[0]:.4f}); margins: score"
            f" {d.token_margin:.3g}, order {'none' if d.order_margin is None else f'{d.order_margin:.3g}'}, "
            + ("within rounding" if d.within_rounding else "beyond rounding")
        )
    return line


def describe_acceptance(acceptance: Acceptance) -> str:
    """The line of the report."""
    mean = "no drafts" if acceptance.mean is None else f"{acceptance.mean:.2f}"
    seen = "not recorded" if acceptance.low is None else f"{acceptance.low:.2f} to {acceptance.high:.2f}"
    return (
        f"{acceptance.verdict:10}drafts of the head accepted per verification: {mean} at K = {acceptance.mrp_steps}; "
        f"range seen in training: {seen}"
    )


def main(argv: list[str]) -> int:
    """Print the report; exit status 1 when something differs by more than rounding (at all, in float32)."""
    from ..checkpoints.loading import load
    from ..commands.prompts import built_in_prompts, read_prompts
    from .decoding import encode

    parser = command_parser(
        "verify",
        "Check that speculative decoding returns the tokens of backbone-only decoding, for every step rule, greedy\n"
        "and sampling; that a batch equals its rows; that no mask token is returned; that as many drafts of the head\n"
        "are accepted as training saw, where the checkpoint records it. In float32 every difference fails; in bf16\n"
        "one that hangs on rounding is reported and let pass. Exit status 1 when a check fails.",
        "mrp verify sdar-1.7b-mrp --prompt-file prompts.txt --dtype float32",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times (default: built-in)")
    parser.add_argument("--prompt-file", help="one prompt per line, - for standard input")
    parser.add_argument("--head", help="folder or Hub id of a head; refused when it belongs to another backbone")
    parser.add_argument("--revision", help="revision of MODEL on the Hub")
    parser.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--steps", type=int, default=4, help="look-ahead K (default: 4)")
    parser.add_argument("--draft", choices=("head", "self"), help="drafter (default: the head when there is one)")
    parser.add_argument("--acceptance", choices=("exact", "token"), default="exact", help="token is not lossless")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--device", help="default: cuda when there is one")
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's own; float32 demands equality")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    arguments = parser.parse_args(argv)
    prompts = read_prompts(arguments, required=False)
    model, tokenizer = load(arguments)
    prompts = prompts or list(built_in_prompts(tokenizer))
    inputs = encode(tokenizer, prompts, raw=arguments.raw).to(model.device)
    options = {"mrp_steps": arguments.steps, "mrp_draft": arguments.draft, "mrp_acceptance": arguments.acceptance}
    checks = check_base(model) + verify(model, tokenizer, inputs, arguments.max_new_tokens, arguments.seed, **options)
    strict = model.dtype == torch.float32
    acceptance = None
    if model.mrp_head is not None and arguments.draft != "self" and arguments.steps > 1:
        acceptance = check_acceptance(model, inputs, arguments.max_new_tokens, arguments.steps)
    ok = all(passed(check, strict) for check in checks) and (acceptance is None or acceptance.verdict != "BELOW")
    if arguments.json:
        report = {"ok": ok, "dtype": str(model.dtype), "checks": [asdict(check) for check in checks]}
        print(json.dumps(report | {"acceptance": acceptance and asdict(acceptance) | {"verdict": acceptance.verdict}}))
    else:
        print(f"{arguments.model}, {model.dtype}, {len(prompts)} prompts, K = {arguments.steps}")
        print("\n".join(describe(check, strict) for check in checks))
        if acceptance is not None:
            print(describe_acceptance(acceptance))
        print("every check holds" if ok else "a check FAILED")
    return 0 if ok else 1

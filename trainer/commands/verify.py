"""`mrp verify`: check that speculative decoding is lossless, on the user's own prompts."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .options import (
    AsJson,
    Checkpoint,
    Device,
    Dtype,
    Head,
    MaxNewTokens,
    Model,
    PromptFile,
    Prompts,
    Raw,
    Revision,
    Seed,
)
from .prompts import built_in_prompts, read_prompts

if TYPE_CHECKING:
    from ..evaluation.verify import Acceptance, Check


def verify(
    model: Model,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    head: Head = None,
    revision: Revision = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 64,
    steps: Annotated[int, typer.Option(metavar="K", help="Look-ahead.")] = 4,
    candidates: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="States per verification of a draft graph.", show_default="a chain of K"
        ),
    ] = None,
    draft: Annotated[
        Literal["head", "self"] | None,
        typer.Option(metavar="head|self", help="What drafts.", show_default="the head when there is one"),
    ] = None,
    acceptance: Annotated[Literal["exact", "token"], typer.Option(help="Acceptance rule; token is not lossless.")] = (
        "exact"
    ),
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> int:
    """Check that speculative decoding is lossless.

    Checks, on your own prompts, that it returns the tokens of backbone-only decoding, for every step rule, greedy and
    sampling; that a batch equals its rows; that no mask token is returned; and that as many drafts of the head are
    accepted as in training, where the checkpoint records it. Without prompts, built-in ones are used. In float32 every
    difference fails; in bfloat16 one that is within rounding is reported and passes. The exit status is 1 when a check
    fails.
    """
    import torch

    from ..checkpoints.loading import load
    from ..data.wording import counted
    from ..evaluation.decoding import encode
    from ..evaluation.verify import check_acceptance, check_base, passed
    from ..evaluation.verify import verify as verify_decoding

    prompts = read_prompts(prompt, prompt_file, required=False)
    loaded, tokenizer = load(Checkpoint(model, revision, head, device, dtype))
    prompts = prompts or list(built_in_prompts(tokenizer))
    inputs = encode(tokenizer, prompts, raw=raw).to(loaded.device)
    options = {
        "mrp_steps": steps,
        "mrp_candidates": candidates,
        "mrp_draft": draft,
        "mrp_acceptance": acceptance,
    }
    checks = check_base(loaded) + verify_decoding(loaded, tokenizer, inputs, max_new_tokens, seed, **options)
    strict, dtype_name = loaded.dtype == torch.float32, str(loaded.dtype).removeprefix("torch.")
    accepted = None
    if loaded.mrp_head is not None and draft != "self" and steps > 1:
        accepted = check_acceptance(loaded, inputs, max_new_tokens, steps)
    ok = all(passed(check, strict) for check in checks) and (accepted is None or accepted.verdict != "BELOW")
    if as_json:
        report = {"ok": ok, "dtype": dtype_name, "checks": [asdict(check) for check in checks]}
        print(json.dumps(report | {"acceptance": accepted and asdict(accepted) | {"verdict": accepted.verdict}}))
    else:
        print(f"{model}, {dtype_name}, {counted(len(prompts), 'prompt')}, K = {steps}")
        print("\n".join(describe_check(check, strict) for check in checks))
        if accepted is not None:
            print(describe_acceptance(accepted))
        print("every check holds" if ok else "a check FAILED")
    return 0 if ok else 1


def describe_check(check: "Check", strict: bool) -> str:
    """The line, or lines, of the report for one check.

    Args:
        check: the check.
        strict: whether a difference within rounding counts as a failure (float32).
    """
    from ..evaluation.verify import passed

    verdict = "same" if check.same == check.compared else "rounding" if passed(check, strict) else "DIFFERENT"
    line = f"{verdict:10}{check.same}/{check.compared}  {check.name}"
    if check.tokens_per_forward is not None:
        depths = " ".join(f"{share:.2f}" for share in check.accepted_by_depth)
        line += f"; {check.tokens_per_forward:.2f} tokens per forward, accepted by depth: {depths or '-'}"
    if check.difference is not None:
        d = check.difference
        line += (
            f"\n          prompt {d.prompt} (...{d.prompt_text!r}), position {d.position}, step {d.step} of its block:"
            f" {d.found!r} ({d.confidences[1]:.4f}) instead of {d.expected!r} ({d.confidences[0]:.4f}); margins: score"
            f" {d.token_margin:.3g}, order {'none' if d.order_margin is None else f'{d.order_margin:.3g}'}, "
            + ("within rounding" if d.within_rounding else "beyond rounding")
        )
    return line


def describe_acceptance(acceptance: "Acceptance") -> str:
    """The line of the report for the drafts that are accepted."""
    mean = "no drafts" if acceptance.mean is None else f"{acceptance.mean:.2f}"
    seen = "not recorded" if acceptance.low is None else f"{acceptance.low:.2f} to {acceptance.high:.2f}"
    return (
        f"{acceptance.verdict:10}drafts of the head accepted per verification: {mean} at K = {acceptance.mrp_steps}; "
        f"range seen in training: {seen}"
    )

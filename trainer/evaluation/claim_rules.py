"""The paper's claims: the sentence, the published figure, and the rule that decides whether it holds for our figures.

The figures of a claim are plain numbers (claims.py measures them); verdict and reason follow from these alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .formatting import significant

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold here"
NOT_MEASURED = "not measured: "
NO_HEAD = NOT_MEASURED + "MODEL has no head: use one that has, or give --head FOLDER"
NO_FULL_HEAD = NOT_MEASURED + "give --full-head FOLDER, a head trained with mrp_residual: false"
ONE_TOKEN = NOT_MEASURED + "blocks of one token have no second step: use a model with larger blocks"
SIMILAR, RELATED = 0.1, 0.5  # shares of the KL between unrelated positions
MOSTLY = 0.5  # share of a backbone's next choices
PUBLISHED_CRITERIA = ("confidence", "residual")
SMALL = 1e9  # parameters; the published backbones have 1.7 to 8 billion


@dataclass(frozen=True)
class Scale:
    """What the figures were measured on.

    Attributes:
        parameters: number of parameters of the backbone.
        block_size: its block size.
        device, dtype: where and how it ran.
        batch_size: prompts decoded together.
    """

    parameters: int
    block_size: int
    device: str
    dtype: str
    batch_size: int


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        sentence: what is claimed.
        published: the paper's figure.
        rule: how the verdict follows from the figures.
        show: function that writes the figures as text.
        judge: function of figures and scale that returns verdict and reason; the reason may be empty.
    """

    sentence: str
    published: str
    rule: str
    show: Callable[[dict], str]
    judge: Callable[[dict, Scale], tuple[str, str]]

    def verdict(self, figures: dict, scale: Scale) -> tuple[str, str]:
        """Return verdict and reason; the reason names a small backbone wherever the claim does not simply hold."""
        verdict, reason = self.judge(figures, scale)
        if verdict in (IN_PART, FAILS) and scale.parameters < SMALL:
            size = f"a backbone of {scale.parameters / 1e6:.1f} million parameters, blocks of {scale.block_size}"
            reason = "; ".join(part for part in (reason, f"{size} (published: 1.7 to 8 billion, 16)") if part)
        return verdict, reason


def clear(lead: dict) -> bool:
    """Return whether a mean paired difference, {"mean", "error"}, is positive and above twice its standard error."""
    return lead["mean"] > 0 and lead["mean"] > 2 * lead["error"]


def _numbers(values: Sequence[float], form: str = ".3f") -> str:
    return " ".join(format(value, form) for value in values)


def _nats(values: Sequence[float]) -> str:
    return " ".join(significant(value) for value in values)


def _stand_in(figures: dict) -> str:
    return (
        "" if figures["score"] == "accuracy" else "no scorer: the share of static's own answers stands in for accuracy"
    )


# -- similarity


def _show_similarity(f):
    kl, unrelated = _nats(f["kl_by_distance"]), significant(f["kl_unrelated"])
    return f"KL {kl} nats at step distance 1, 2, ...; {unrelated} between unrelated positions"


def _judge_similarity(f, scale):
    kl, unrelated = f["kl_by_distance"], f["kl_unrelated"]
    if not kl or unrelated <= 0:
        return ONE_TOKEN, ""
    rising = all(near <= far for near, far in zip(kl, kl[1:], strict=False))
    share = kl[0] / unrelated
    verdict = HOLDS if share <= SIMILAR and rising else IN_PART if share <= RELATED else FAILS
    reason = f"one step moves the logits {share:.0%} as far as two unrelated positions are apart"
    reason += "" if rising else ", and KL does not rise with every step of distance"
    return verdict, "" if verdict == HOLDS else reason


# -- residual against full prediction


def _show_residual(f):
    lines = [f"KL by depth before {_nats(f['before'])}", f"residual head {_nats(f['residual'])}"]
    if f["full"]:
        times = [full / residual if residual else float("inf") for full, residual in _pairs(f)]
        lines.append(f"full head {_nats(f['full'])} ({_numbers(times, '.1f')} times the residual head's)")
    return ", ".join(lines)


def _pairs(f):
    return list(zip(f["full"], f["residual"], strict=True))


def _judge_residual(f, scale):
    if not f["before"]:
        return ONE_TOKEN, ""
    if not f["full"]:
        return NO_FULL_HEAD, ""
    worse = [str(k) for k, (full, residual) in enumerate(_pairs(f), 1) if residual >= full]
    no_help = [str(k) for k, (a, b) in enumerate(zip(f["before"], f["residual"], strict=True), 1) if b >= a]
    reasons = [f"the full head is at least as good at depth {', '.join(worse)}"] if worse else []
    reasons += [f"the residual head removes no KL at depth {', '.join(no_help)}"] if no_help else []
    verdict = HOLDS if not reasons else FAILS if len(worse) == len(f["before"]) else IN_PART
    return verdict, "; ".join(reasons)


# -- unverified steps


def _show_unverified(f):
    text = f"{f['score']}: static {f['static']:.3f}, direct with K = 1, 2, ... residual {_numbers(f['residual'])}"
    return text + (f", full {_numbers(f['full'])}" if f["full"] else "")


def _judge_unverified(f, scale):
    if not f["full"]:
        return NO_FULL_HEAD, ""
    if not clear(f["lead"]):
        verdict, reason = (
            FAILS,
            "at the largest K the residual head is not ahead by more than twice the standard error",
        )
    elif f["full"][-1] > f["static"] / 2:
        verdict, reason = IN_PART, "the full head keeps more than half of static's score"
    else:
        verdict, reason = HOLDS, ""
    return verdict, "; ".join(part for part in (reason, _stand_in(f)) if part)


# -- losslessness


def _show_lossless(f):
    return (
        f"{f['prompts']:.1%} of the answers and {f['tokens']:.2%} of the tokens are static's ({', '.join(f['modes'])})"
    )


def _judge_lossless(f, scale):
    if f["prompts"] == f["tokens"] == 1:
        return HOLDS, ""
    if scale.dtype != "float32" and f["tokens"] >= 0.95:
        return IN_PART, f"choices that depend on rounding in {scale.dtype}: `mrp verify` shows their margins"
    return FAILS, "`mrp verify` shows the first difference"


# -- gain


def _show_gain(f):
    accepted = "; ".join(f"K = {k}: {_numbers(rates, '.2f')}" for k, rates in _by_steps(f, "acceptance"))
    return (
        f"K = {', '.join(map(str, f['steps']))}: {_numbers(f['saved'], '.0%')} of {f['static_forwards']} forwards "
        f"saved, {_numbers(f['time_ratio'], '.2f')} times as fast; accepted by depth: {accepted}"
    )


def _by_steps(f, name):
    return zip(f["steps"], f[name], strict=True)


def _judge_gain(f, scale):
    if max(f["saved"]) <= 0:
        return FAILS, "no draft saves a forward: the head's acceptance is too low"
    if max(f["time_ratio"]) > 1:
        return HOLDS, ""
    return IN_PART, (
        f"fewer forwards but no less time: on {scale.device} in batches of {scale.batch_size} a forward over K states "
        "and the head's own steps cost what they save (try --batch-size 1)"
    )


# -- who drafts


def _show_drafter(f):
    parts = [
        f"K = {k}: {f['saved_head'][i]:.0%} of the forwards saved by the head, {f['saved_self'][i]:.0%} without, "
        f"accepted at depth 1 {_first(f['acceptance_head'][i])} and {_first(f['acceptance_self'][i])}"
        for i, k in enumerate(f["steps"])
    ]
    return "; ".join(parts)


def _first(rates):
    return f"{rates[0]:.2f}" if rates else "-"


def _judge_drafter(f, scale):
    ahead = [clear(lead) for lead in f["lead"]]
    if all(ahead):
        return HOLDS, ""
    equal = ", ".join(str(k) for k, wins in zip(f["steps"], ahead, strict=True) if not wins)
    reason = f"at K = {equal} the backbone's own last logits draft about as well or better, at no cost"
    alone = [rates[0] for rates in f["acceptance_self"] if rates]
    if alone and min(alone) > MOSTLY:
        reason += f": {min(alone):.0%} of its next choices do not depend on the token just revealed"
    return IN_PART if any(ahead) else FAILS, reason


# -- remask


def _show_remask(f):
    speed = f["tokens_per_forward"]
    parts = [f"{f['score']} (tokens per forward): static {f['static']:.3f} ({speed['static']:.2f})"]
    parts.append(f"dynamic {f['dynamic']:.3f} ({speed['dynamic']:.2f})")
    for name, score in f["remask"].items():
        parts.append(f"{name} {score:.3f} ({speed[name]:.2f}), {100 * f['lead'][name]['mean']:+.1f} points")
    return ", ".join(parts)


def _judge_remask(f, scale):
    if f["dynamic"] >= f["static"]:
        return NOT_MEASURED + "the low threshold loses nothing on these prompts: use harder ones", ""
    ahead = [name for name, lead in f["lead"].items() if clear(lead)]
    published = [name for name in ahead if name in PUBLISHED_CRITERIA]
    if published:
        verdict, reason = HOLDS, f"by criterion {', '.join(ahead)}"
    elif ahead:
        verdict = IN_PART
        reason = f"only by {', '.join(ahead)}, which asks the head about masked tokens, the only ones it is trained on"
    else:
        verdict, reason = FAILS, "no criterion is ahead of the dynamic rule by more than twice the standard error"
    return verdict, "; ".join(part for part in (reason, _stand_in(f)) if part)


CLAIMS = {
    "similarity": Claim(
        "From one denoising step to the next the logits of a masked position change little.",
        "the premise of the method, no figure",
        f"holds: KL at distance 1 at most {SIMILAR:.0%} of that between unrelated positions, rising with distance; "
        f"in part: at most {RELATED:.0%}",
        _show_similarity,
        _judge_similarity,
    ),
    "residual": Claim(
        "Predicting the change of the logits comes closer to the next logits than predicting them in full.",
        "no KL by depth; see unverified",
        "holds: the residual head's KL is below that without a head and below the full head's at every depth; "
        "in part: below the full head's at some",
        _show_residual,
        _judge_residual,
    ),
    "unverified": Claim(
        "Taken unverified, steps of the full prediction ruin the text within four, those of the residual do not.",
        "full: 84.8% falls to single digits by step 4 (GSM8K, SDAR-4B)",
        "holds: at the largest K the residual head is ahead by more than twice the standard error and the full head "
        "has at most half of static's score; in part: ahead only",
        _show_unverified,
        _judge_unverified,
    ),
    "lossless": Claim(
        "Speculative decoding returns exactly what the backbone alone does.",
        "the same output",
        "holds: all answers, to the token; in part: at least 95% of the tokens below float32",
        _show_lossless,
        _judge_lossless,
    ),
    "gain": Claim(
        "Speculative decoding with the head is faster.",
        "up to 1.42 (v1) or 1.4 (v2) times in SGLang; up to 1.56 times averaged over SDAR-1.7B, 4B, 8B (K = 3)",
        "holds: forwards are saved and some K is faster by the clock; in part: forwards only",
        _show_gain,
        _judge_gain,
    ),
    "drafter": Claim(
        "The head drafts better than the backbone's own last logits.",
        "not compared",
        "holds: fewer forwards than by self-drafting, by more than twice the standard error, at every K; "
        "in part: at some",
        _show_drafter,
        _judge_drafter,
    ),
    "remask": Claim(
        "Masking doubtful tokens again wins back what a low threshold loses.",
        "at threshold 0.5 up to +22.6 points (HumanEval), +17.7 (GSM8K), +16 averaged over four benchmarks",
        "holds: a published criterion is ahead of the dynamic rule by more than twice the standard error; "
        "in part: only our criterion leave_one_out is",
        _show_remask,
        _judge_remask,
    ),
}

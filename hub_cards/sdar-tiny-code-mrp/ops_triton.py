"""The read of ops.py as two Triton kernels.

    read_kernel      a program reads some of the columns of one row, once: running peak, sum of exponentials and sum
                     for the entropy, rescaled at every higher peak, and the best score plus noise. A row may be alone,
                     so its columns are split over several programs, or most of a GPU would wait.
    combine_kernel   a program combines the parts of one row

Everything is loaded and then cast to float32: in Triton's interpreter, arithmetic in bf16 is silently wrong.
"""

import os

import torch

from .keyed_noise import combine_keys

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# Triton reads this variable when a kernel is decorated, which happens when this file is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

BLOCK = 2048  # columns that a program holds at a time
PROGRAMS = 512  # at least as many programs as a large GPU runs at once, if there are columns enough
PARTS = 5  # numbers per part: see read_kernel


def read_logits_triton(
    logits: torch.Tensor,
    excluded: torch.Tensor | None,
    temperature: float,
    keys: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute the fields of `Reading`; the arguments are those of `read_logits`, the logits stay as they are."""
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = -(-columns // BLOCK)
    splits = min(blocks, -(-PROGRAMS // max(rows, 1)))
    per_split = -(-blocks // splits)
    splits = -(-blocks // per_split)
    parts = torch.empty(rows, splits, PARTS, device=logits.device)
    best = torch.empty(rows, splits, dtype=torch.int64, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_prob, score, entropy = (torch.empty(rows, device=logits.device) for _ in range(3))
    if not rows:
        return token, log_prob, entropy if with_entropy else None, score
    # the part of the noise's key that is the same in a whole row
    keys = None if keys is None else combine_keys(keys)
    with torch.cuda.device_of(logits):  # triton launches on the current device, which may not be the tensor's
        read_kernel[(rows, splits)](
            logits, excluded, keys, token_ids, parts, best, logits.stride(0), columns, per_split, float(temperature),
            BLOCK=BLOCK, EXCLUDES=excluded is not None, NOISY=keys is not None, HAS_IDS=token_ids is not None,
        )  # fmt: skip
        combine_kernel[(rows,)](
            parts, best, token_ids, token, log_prob, score, entropy, splits,
            BLOCK=triton.next_power_of_2(splits), HAS_IDS=token_ids is not None,
        )  # fmt: skip
    return token, log_prob, entropy if with_entropy else None, score


if HAS_TRITON:

    @triton.jit
    def _mix(x):
        """The finalizer of splitmix64 on uint64, as in keyed_noise.py."""
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return x ^ (x >> 31)

    @triton.jit
    def _gumbel(key, tokens):
        """Gumbel noise of token ids (int64), as `keyed_gumbel` returns it; `key` has been mixed once."""
        mixed = (key ^ tokens).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
        uniform = ((_mix(mixed) >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2 ** -53
        return (-tl.log(-tl.log(uniform))).to(tl.float32)

    @triton.jit
    def read_kernel(  # noqa: ANN201  (Triton compiles it: no annotations)
        logits_ptr,
        excluded_ptr,
        keys_ptr,
        ids_ptr,
        parts_ptr,
        best_ptr,
        stride,
        columns,
        per_split,
        temperature,
        BLOCK: tl.constexpr,
        EXCLUDES: tl.constexpr,
        NOISY: tl.constexpr,
        HAS_IDS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        split = tl.program_id(1)
        logits_ptr += row * stride
        NEG_INF: tl.constexpr = float("-inf")
        excluded = -1
        if EXCLUDES:
            excluded = tl.load(excluded_ptr)
        peak = tl.full((), NEG_INF, tl.float32)  # highest score
        total = tl.full((), 0.0, tl.float32)  # sum of e = exp(score - peak)
        spread = tl.full((), 0.0, tl.float32)  # sum of e * (score - peak)
        best_noisy = tl.full((), NEG_INF, tl.float32)
        best_score = tl.full((), NEG_INF, tl.float32)
        best = tl.full((), 0, tl.int64) + split * per_split * BLOCK
        for number in range(per_split):
            column = (split * per_split + number).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = (column < columns) & (column != excluded)
            x = tl.load(logits_ptr + column, mask=inside, other=NEG_INF).to(tl.float32) / temperature
            bad = tl.sum((x != x).to(tl.int32), axis=0) > 0
            higher = tl.maximum(peak, tl.max(x, axis=0))
            base = tl.where(higher == NEG_INF, 0.0, higher)
            e = tl.exp(x - base)
            here = tl.sum(tl.where(e > 0, e * (x - base), 0.0), axis=0)
            # with a peak that is d lower than before, every e shrinks by exp(-d) and every score - peak by d
            lower = tl.where(peak == NEG_INF, 0.0, base - peak)
            shrink = tl.where(peak == NEG_INF, 0.0, tl.exp(-lower))
            spread = here + shrink * (spread - lower * total)
            total = tl.sum(e, axis=0) + shrink * total
            peak = higher
            noisy = x
            if NOISY:
                tokens = column
                if HAS_IDS:
                    tokens = tl.load(ids_ptr + column, mask=column < columns, other=0)
                noisy = x + _gumbel(tl.load(keys_ptr + row), tokens)
            top = tl.max(noisy, axis=0)
            at = tl.min(tl.where(noisy == top, column, 0x7FFFFFFFFFFFFFFF), axis=0)
            better = top > best_noisy
            best = tl.where(better, at, best)
            best_score = tl.where(better, tl.sum(tl.where(column == at, x, 0.0), axis=0), best_score)
            best_noisy = tl.where(better, top, best_noisy)
            total = tl.where(bad, float("nan"), total)
        part = parts_ptr + (row * tl.num_programs(1) + split) * 5
        tl.store(part, peak)
        tl.store(part + 1, total)
        tl.store(part + 2, spread)
        tl.store(part + 3, best_noisy)
        tl.store(part + 4, best_score)
        tl.store(best_ptr + row * tl.num_programs(1) + split, best)

    @triton.jit
    def combine_kernel(  # noqa: ANN201
        parts_ptr,
        best_ptr,
        ids_ptr,
        token_ptr,
        log_prob_ptr,
        score_ptr,
        entropy_ptr,
        splits,
        BLOCK: tl.constexpr,
        HAS_IDS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        split = tl.arange(0, BLOCK)
        inside = split < splits
        part = parts_ptr + (row * splits + split) * 5
        NEG_INF: tl.constexpr = float("-inf")
        peaks = tl.load(part, mask=inside, other=NEG_INF)
        totals = tl.load(part + 1, mask=inside, other=0.0)
        spreads = tl.load(part + 2, mask=inside, other=0.0)
        noisy = tl.load(part + 3, mask=inside, other=NEG_INF)
        scores = tl.load(part + 4, mask=inside, other=NEG_INF)
        columns = tl.load(best_ptr + row * splits + split, mask=inside, other=0x7FFFFFFFFFFFFFFF)
        peak = tl.max(peaks, axis=0)
        lower = tl.where(peaks == NEG_INF, 0.0, peak - peaks)
        shrink = tl.where(peaks == NEG_INF, 0.0, tl.exp(-lower))
        total = tl.sum(tl.where(totals == totals, shrink * totals, totals), axis=0)
        spread = tl.sum(shrink * (spreads - lower * totals), axis=0)
        top = tl.max(noisy, axis=0)
        column = tl.min(tl.where(noisy == top, columns, 0x7FFFFFFFFFFFFFFF), axis=0)
        score = tl.sum(tl.where(columns == column, scores, 0.0), axis=0)
        score = tl.where(total != total, float("nan"), score)
        token = column
        if HAS_IDS:
            token = tl.load(ids_ptr + column)
        log_total = tl.log(total)
        tl.store(token_ptr + row, token)
        tl.store(score_ptr + row, score)
        tl.store(log_prob_ptr + row, tl.where(peak == NEG_INF, float("nan"), score - peak - log_total))
        tl.store(entropy_ptr + row, log_total - spread / total)

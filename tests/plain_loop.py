"""Block-diffusion decoding as plainly as possible: one row, no cache, everything recomputed at every step.

The sampling noise is written down here once more, in Python integers and with constants of its own, so that a change
of the package's noise (which would change every saved sample) is noticed.
"""

import math

import torch

BITS_64 = (1 << 64) - 1


def hash_key(*parts: int) -> int:
    """One splitmix64 step per part, as unsigned 64-bit integers."""
    key = 0
    for part in parts:
        key = ((key ^ (part & BITS_64)) + 0x9E3779B97F4A7C15) & BITS_64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & BITS_64
        key ^= key >> 31
    return key


def row_key(prompt: list[int], copy: int = 0) -> int:
    """Key of a row from its prompt and the number of equal prompts before it."""
    return hash_key(sum(hash_key(token, index) for index, token in enumerate(prompt)), copy)


def gumbel(key: int, token: int) -> float:
    """Gumbel noise of a token id, from the upper 53 bits of its hash."""
    uniform = ((hash_key(key, token) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(uniform))


def gumbel_noise(seed: int, row: int, positions: range, step: int, vocab_size: int) -> torch.Tensor:
    """Noise of every token id at each position of a state, float32 [B, V]."""
    state_keys = [hash_key(hash_key(seed, row), position, step) for position in positions]
    return torch.tensor([[gumbel(key, token) for token in range(vocab_size)] for key in state_keys])


def plain_decode(model, prompt, max_new_tokens, *, rule="low_confidence_static", tokens_per_step=1, threshold=0.9,
                 bound=0.1, eos=(), temperature=None, truncate=lambda scores: scores, seed=0, copy=0,
                 shape=lambda before, scores: scores, stale_steps=0):  # fmt: skip
    """New tokens of one prompt (a list of ids), cut after the first end of text; `copy` numbers equal prompts.

    `shape` maps the tokens before the block and the scores [B, V] to other scores. Each forward gives the logits of
    one step and of up to `stale_steps` more.
    """
    size, mask = model.config.block_size, model.config.mask_token_id
    row, end = list(prompt), len(prompt) + max_new_tokens
    while len(row) < end and not any(token in eos for token in row[len(prompt) :]):
        start = len(row) // size * size
        row += [mask] * (start + size - len(row))
        step = 0
        while mask in row[start:]:
            if step % (1 + stale_steps) == 0:
                logits = model(torch.tensor([row])).logits[0, start:].float()
                logits[:, mask] = -torch.inf
            scores = shape(row[:start], logits) / (temperature or 1.0)
            probabilities = scores.softmax(-1)
            scores = truncate(scores)
            if temperature:
                positions = range(start, start + size)
                scores = scores + gumbel_noise(seed, row_key(prompt, copy), positions, step, scores.shape[1])
            tokens = scores.argmax(-1).tolist()
            confidence = [probabilities[i, t].item() for i, t in enumerate(tokens)]
            entropy = torch.special.entr(probabilities).sum(-1).tolist()
            masked = [i for i in range(size) if row[start + i] == mask]
            for i in _reveal(rule, masked, confidence, entropy, tokens_per_step, threshold, bound):
                row[start + i] = tokens[i]
            step += 1
    new = row[len(prompt) : end]
    stops = [i for i, token in enumerate(new) if token in eos]
    return new[: stops[0] + 1] if stops else new


def _reveal(rule, masked, confidence, entropy, tokens_per_step, threshold, bound):
    """Positions that a step reveals, out of the masked ones."""
    surest = sorted(masked, key=lambda i: -confidence[i])
    if rule == "sequential":
        return masked[:tokens_per_step]
    if rule == "low_confidence_static":
        return surest[:tokens_per_step]
    if rule == "low_confidence_dynamic":
        return [i for i in masked if confidence[i] > threshold] or surest[:1]
    chosen, total = [], 0.0
    for i in sorted(masked, key=lambda i: entropy[i]):
        total += entropy[i]
        if chosen and total > bound:
            break
        chosen.append(i)
    return chosen

"""Block-diffusion decoding as plainly as possible: one row, no cache, everything recomputed at every step."""

import torch

from modeling_mrp.sampling import combine_keys, keyed_gumbel, row_keys


def plain_decode(model, prompt, max_new_tokens, *, rule="low_confidence_static", tokens_per_step=1, threshold=0.9,
                 bound=0.1, eos=(), temperature=None, truncate=lambda scores: scores, seed=0, copy=0):  # fmt: skip
    """New tokens of one prompt (a list of ids), cut behind the first end of text; `copy` numbers equal prompts."""
    size, mask = model.config.block_size, model.config.mask_token_id
    rows = torch.tensor([prompt]).repeat(copy + 1, 1)
    key = combine_keys(torch.tensor(seed), row_keys(rows, torch.ones_like(rows, dtype=torch.bool))[-1])
    row, end = list(prompt), len(prompt) + max_new_tokens
    while len(row) < end and not any(token in eos for token in row[len(prompt) :]):
        start = len(row) // size * size
        row += [mask] * (start + size - len(row))
        step = 0
        while mask in row[start:]:
            logits = model(torch.tensor([row])).logits[0, start:].float()
            logits[:, mask] = -torch.inf
            scores = logits / (temperature or 1.0)
            probabilities = scores.softmax(-1)
            scores = truncate(scores)
            if temperature:
                positions = torch.arange(start, start + size)
                scores = scores + keyed_gumbel(combine_keys(key, positions, torch.tensor(step)), scores.shape[1])
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

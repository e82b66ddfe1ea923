"""Batches of prompts of awkward lengths, and `generate` calls on them, for the tests of decoding."""

import torch

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02}

PROMPT_LENGTHS = (1, 7, 8, 9, 26)  # 1, B - 1, B, B + 1, 3 B + 2


def random_prompts():
    """A prompt of random tokens for each length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 61, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def batch(prompts, side="left"):
    """Padded ids and mask, [R, P]."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        gap = [0] * (width - len(prompt))
        ids.append(gap + prompt if side == "left" else prompt + gap)
        mask.append([0] * len(gap) + [1] * len(prompt) if side == "left" else [1] * len(prompt) + [0] * len(gap))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model, inputs, seed=5, **options):
    """New tokens [R, new] and the whole output."""
    torch.manual_seed(seed)
    options = {"max_new_tokens": 13, "eos_token_id": [1, 7], "mrp_mode": None} | options
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    return output.sequences[:, inputs["input_ids"].shape[1] :], output


def rows_without_padding(new, eos=(1, 7), pad=0):
    """Each row as a list up to its end of text; what follows must be padding."""
    rows = []
    for row in new.tolist():
        end = next((at + 1 for at, token in enumerate(row) if token in eos), len(row))
        assert set(row[end:]) <= {pad}
        rows.append(row[:end])
    return rows


def sharp_head(model, scale=0.05):
    """A head whose residuals are small against the logits: drafts are then sometimes right and sometimes wrong."""
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=scale, generator=torch.Generator().manual_seed(3))
    return model

"""The keyed noise of sampling.

A sample is the argmax of the processed scores plus Gumbel noise, which is a draw from their softmax. The noise is a
pure function of five integers:

    seed of the call -> key of the row -> absolute position -> denoising steps done in the block -> token id

There is no generator state. A draft and its verification therefore see the same noise at the same state, and the
sample of a row depends neither on its neighbours nor on how many states were read before.
"""

import torch

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 to the right and fill with zeros (torch's own shift repeats the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014) to int64, which wraps around on overflow."""
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def combine_keys(*parts: torch.Tensor) -> torch.Tensor:
    """Hash several integer tensors, which broadcast, into one int64 key; their order matters."""
    key = torch.zeros((), dtype=torch.long, device=parts[0].device)
    for part in parts:
        key = _mix((key ^ part) + GOLDEN)
    return key


def row_keys(prompts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return one key per row that depends on its prompt and on the number of equal prompts in earlier rows, [R].

    A row therefore draws the same sample alone and in a batch, and the copies that `num_return_sequences` makes of a
    prompt draw different samples.

    Args:
        prompts: left-aligned token ids, [R, P].
        valid: True for tokens and False for padding, [R, P].
    """
    index = torch.arange(prompts.shape[1], device=prompts.device)
    fingerprint = torch.where(valid, combine_keys(prompts, index), 0).sum(1)
    same = fingerprint[:, None] == fingerprint[None, :]
    return combine_keys(fingerprint, same.tril(-1).sum(1))


def keyed_gumbel(keys: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise, float32 [..., V].

    Args:
        keys: int64 keys, [...].
        tokens: the token ids [V] to return noise for, or their number if they are 0 to V - 1.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, device=keys.device)
    bits = _shift(combine_keys(keys[..., None], tokens), 11)  # 53 random bits, as many as a double holds
    uniform = (bits.double() + 0.5) * 2.0**-53  # never 0 or 1, so that both logarithms are finite
    return -torch.log(-torch.log(uniform)).float()

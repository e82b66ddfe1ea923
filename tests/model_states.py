"""States of random rows for the model's `forward`, and the comparison of two of its outputs."""

import torch

SAME = {"atol": 1e-4, "rtol": 1e-5}  # the same sums in another order, on logits of about 10


def noisy_states(model, rows=2, length=13, steps=2, seed=0):
    """Clean ids [R, L], x_t [R, L], and x_1..x_K [R, K, L], each with fewer masks than the one before."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator)
    levels = torch.rand(rows, length, generator=generator)
    masked = [levels < bound for bound in torch.linspace(0.8, 0.2, steps + 1).tolist()]
    states = [torch.where(where, model.config.mask_token_id, clean) for where in masked]
    return clean, states[0], torch.stack(states[1:], dim=1)


def fields(output):
    return {name: value for name, value in output.items() if value is not None}


def assert_same_output(actual, expected, **tolerance):
    assert fields(actual).keys() == fields(expected).keys()
    for name, value in fields(expected).items():
        torch.testing.assert_close(actual[name], value, **(tolerance or SAME), msg=lambda text, n=name: f"{n}: {text}")

"""How often a round makes the host wait for the device: as the list at the top of decoding.py says, and no more.

On a CPU nothing waits, but every value that Python takes out of a tensor passes through the dispatcher all the same.
Lists are the exception: `fetch` fetches them all, and is counted by its calls.
"""

import pytest
import torch
from decoding_calls import random_prompts
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_mrp import block_state, decoding, drafting
from modeling_mrp.block_state import BlockState
from modeling_mrp.decoding import Decoder
from modeling_mrp.inputs import left_align
from modeling_mrp.options import DecodingOptions
from modeling_mrp.sampling import Sampler

FETCHES = ("aten::_local_scalar_dense", "aten::nonzero")
INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::index_put_")
STEPS = 4


class FetchCounter(TorchDispatchMode):
    """Counts operations that hand a value of a tensor to Python, or whose result has a size that depends on values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def add(self):
        """Count a list."""
        self.count += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_boolean = func.name() in INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        self.count += func.name() in FETCHES or by_boolean
        return func(*args, **(kwargs or {}))


def decode_and_count(model, prompts, monkeypatch, **options):
    """Most fetches in a round, and how often `synchronise` ran per round, over one decoding without dropped rows."""
    options = DecodingOptions.resolve(options, model.config)
    width = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    valid = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts]).bool()
    aligned, lengths = left_align(ids, valid)
    no_eos = torch.empty(0, dtype=torch.long)
    state = BlockState(aligned, lengths, 21, options.block_size, model.config.mask_token_id, no_eos, options.depths)
    decoder = Decoder(model, state, options, Sampler(model.config.mask_token_id, [], []))
    monkeypatch.setattr("modeling_mrp.decoding.WORTH_DROPPING", 1.0)
    rounds, calls, synchronise, fetch = [0], [], BlockState.synchronise, block_state.fetch
    monkeypatch.setattr(BlockState, "synchronise", lambda self: (calls.append(1), synchronise(self))[1])
    with torch.no_grad(), FetchCounter() as counter:
        for module in (block_state, decoding, drafting):
            monkeypatch.setattr(module, "fetch", lambda numbers: (counter.add(), fetch(numbers))[1])
        decoder.run(lambda state: rounds.append(counter.count - len(calls)))
    most = max(after - before for before, after in zip(rounds, rounds[1:], strict=False))
    return most, len(calls) / (len(rounds) - 1)


@pytest.mark.parametrize(
    ("options", "fetches"),
    [
        ({"mrp_mode": None}, 0),
        ({"mrp_mode": None, "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.05}, 0),
        # one for each draft, and one where the opening state of the next block was read
        ({"mrp_mode": "spec", "mrp_steps": STEPS}, STEPS),
        ({"mrp_mode": "spec", "mrp_steps": STEPS, "mrp_draft": "self"}, STEPS),
        ({"mrp_mode": "spec", "mrp_steps": STEPS, "mrp_candidates": 2 * STEPS}, STEPS),
        ({"mrp_mode": "direct", "mrp_steps": STEPS}, STEPS),
        ({"mrp_mode": "remask", "confidence_threshold": 0.05}, 1),
        ({"mrp_mode": "remask", "confidence_threshold": 0.05, "remask_criterion": "backbone"}, 0),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_round_waits_for_the_device_as_often_as_its_mode_needs(tiny_model, monkeypatch, options, fetches):
    model = tiny_model(block_size=8, initializer_range=0.15)
    most, synchronisations = decode_and_count(model, random_prompts(), monkeypatch, **options)
    assert most == fetches
    assert synchronisations == 1

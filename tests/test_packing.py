"""Packed rows: the same numbers as unpacked ones, and no padding in a linear layer."""

import copy

import pytest
import torch
from decoding_calls import batch, generate, random_prompts, sharp_head

from modeling_mrp import MRPForDiffusionLM, cached_forwards
from modeling_mrp.block_cache import BlockCache
from modeling_mrp.cached_forwards import CachedForwards
from modeling_mrp.masks import PADDING, TokenLayout
from modeling_mrp.packing import Packing

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # the same sums in another order, in float32
SIZE = 4
MODES = [None, "spec", "direct", "remask"]


def set_packing(monkeypatch, always):
    """Pack every forward whose real tokens the host knows the number of, or none."""
    monkeypatch.setattr(cached_forwards, "WORTH_PACKING", 0.0 if always else 2.0)


def random_forward(model, generator, real):
    """A cache with rows of different lengths, and the ids, positions, mask and layout of tokens [R, Q] after them."""
    rows, width = real.shape
    lengths = torch.randint(0, 4, (rows,), generator=generator) * SIZE
    cache = BlockCache(rows, 12 + width, SIZE, torch.device("cpu"))
    clean = torch.randint(4, 61, (rows, 12), generator=generator)
    at = torch.arange(12).expand(rows, -1)
    zeros = torch.zeros_like(at)
    layout = TokenLayout(zeros, at // SIZE, zeros, zeros)
    model.backbone_hidden_states(clean, at, model.attention_mask(layout, cache.assign_slots(layout)), cache)
    cache.commit(lengths, 12)
    ids = torch.randint(4, 61, real.shape, generator=generator)
    positions = lengths[:, None] + torch.arange(width) % SIZE
    stream = (torch.arange(width) // SIZE + 1).expand(rows, -1)
    layout = TokenLayout(torch.where(real, 0, PADDING), positions // SIZE, stream, torch.zeros_like(stream))
    return cache, ids, positions, model.attention_mask(layout, cache.assign_slots(layout))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", range(8))
def test_packed_tokens_get_the_hidden_states_keys_and_values_of_unpacked_ones(tiny_model, implementation, seed):
    """For any pattern of real tokens, not only whole groups or prefixes; for the backbone and a head step after it."""
    model = tiny_model(num_mrp_layers=2)
    model.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(seed)
    rows, width = 1 + seed % 4, SIZE * (1 + seed % 3)
    real = torch.rand(rows, width, generator=generator) < 0.6
    with torch.no_grad():
        cache, ids, positions, mask = random_forward(model, generator, real)
        packed_cache = copy.deepcopy(cache)
        packing = Packing.of(real, int(real.sum()), packed_cache)
        packed = packing.pack(ids), packing.pack(positions)
        hidden = model.backbone_hidden_states(ids, positions, mask, cache)
        ours = model.backbone_hidden_states(*packed, mask, packing=packing)
        corrected = model.corrected_hidden_states(ids, hidden, positions, mask, cache)
        step = model.corrected_hidden_states(packed[0], ours, packed[1], mask, packing=packing)
    assert ours.shape[:2] == (1, real.sum())
    torch.testing.assert_close(ours[0], hidden[real], **CLOSE)
    torch.testing.assert_close(step[0], corrected[real], **CLOSE)
    assert packing.unpack(ours)[~real].eq(0).all()
    slots = cache.slots.index[real.flatten()]
    assert len(cache._buffers) == 4  # two layers each
    for layer, buffers in cache._buffers.items():
        for plain, other in zip(buffers, packed_cache._buffers[layer], strict=True):
            torch.testing.assert_close(other.flatten(0, 1)[slots], plain.flatten(0, 1)[slots], **CLOSE)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_decoding_with_packed_rows_returns_the_same_tokens_and_statistics(
    tiny_model, monkeypatch, mode, implementation
):
    model = sharp_head(tiny_model(block_size=8))
    model.set_attn_implementation(implementation)
    outputs = []
    for always in (False, True):
        set_packing(monkeypatch, always)
        new, output = generate(model, batch(random_prompts()), mrp_mode=mode, mrp_steps=4, confidence_threshold=0.3)
        outputs.append((new, output))
    (plain, expected), (packed, output) = outputs
    assert packed.equal(plain)
    assert output.stats.backbone_forwards.equal(expected.stats.backbone_forwards)
    assert output.stats.head_forwards.equal(expected.stats.head_forwards)


class TokenCounter:
    """Real tokens of every forward, as its caller counts them, and those that reached linear layers since then."""

    def __init__(self, model, monkeypatch):
        self.real, self.seen = [], []
        run = CachedForwards._run

        def note(forwards, forward, placement, real, total, *inputs):
            self.real.append((int(real.sum()), real.numel()))
            self.seen.append(set())
            return run(forwards, forward, placement, real, total, *inputs)

        monkeypatch.setattr(CachedForwards, "_run", note)
        for layer in [*model.model.layers, *model.mrp_head.layers]:
            for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.register_forward_hook(lambda module, inputs, output: self._count(output))

    def _count(self, output):
        self.seen[-1].add(output.shape[:-1].numel())


@pytest.mark.parametrize("options", [
    {"mrp_mode": None},
    {"mrp_mode": "spec", "mrp_steps": 4},
    {"mrp_mode": "spec", "mrp_steps": 8, "mrp_drafts_per_head_step": 3},
    {"mrp_mode": "spec", "mrp_steps": 4, "mrp_draft": "self"},
    {"mrp_mode": "direct", "mrp_steps": 4},
], ids=str)  # fmt: skip
def test_padding_reaches_no_linear_layer(tiny_model, monkeypatch, options):
    """In ragged batches every forward of backbone and head, those that commit clean blocks included, is packed."""
    model = sharp_head(tiny_model(block_size=8))
    set_packing(monkeypatch, always=True)
    counter = TokenCounter(model, monkeypatch)
    generate(model, batch(random_prompts()), max_new_tokens=30, eos_token_id=7, **options)
    assert counter.seen == [{real} for real, _ in counter.real]
    assert sum(real < every for real, every in counter.real) > len(counter.real) / 4  # the batch was ragged


@pytest.mark.parametrize("mode", MODES)
def test_one_row_is_not_packed(tiny_model, monkeypatch, mode):
    model = tiny_model(block_size=8)
    calls, of = [], Packing.of
    monkeypatch.setattr(Packing, "of", lambda *args: calls.append(1) or of(*args))
    generate(model, batch(random_prompts()[-1:]), mrp_mode=mode, mrp_steps=4)
    assert not calls
    generate(model, batch(random_prompts()), mrp_mode=mode, mrp_steps=4)
    assert calls


def test_the_config_still_tells_and_sets_the_attention_implementation(tiny_model, tmp_path):
    model = tiny_model()
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    attention = model.model.layers[0].self_attn
    assert attention.config.implementation == "eager"
    assert attention.config.head_dim == model.config.head_dim
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    assert twin.model.layers[0].self_attn.config.implementation == "sdpa"
    assert attention.config.implementation == "eager"
    model.save_pretrained(tmp_path)
    assert "modeling_mrp" not in (tmp_path / "config.json").read_text().replace("modeling_mrp.MRP", "")
    loaded = MRPForDiffusionLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.mrp_head.layers[0].self_attn.config.implementation == "eager"

"""The estimate of a step's memory against what the profiler measures, and the advice that follows from it."""

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mrp_trainer.evaluation.head_metrics import measure_head
from mrp_trainer.losses.acceptance import linear_total_variation
from mrp_trainer.losses.kl_rows import TILE_ELEMENTS
from mrp_trainer.losses.linear_kl import CHUNK_ELEMENTS, linear_kl, linear_kl_and_choice
from mrp_trainer.memory import MemoryEstimate, advice, estimate_memory

GIB = 2**30


def peak_of(step) -> int:
    """Return the most bytes that tensors made by `step` held at one time, from the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # the name that all releases know
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("rows", "length", "steps"), [(4, 64, 1), (4, 64, 3), (8, 96, 2)])
def test_estimate_is_within_a_third_of_what_a_step_takes(tiny_model, rows, length, steps, checkpointing):
    model = tiny_model(hidden_size=128, intermediate_size=256, num_mrp_layers=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(5, 61, (rows, length))
    no_logits = torch.empty(0, dtype=torch.long)
    states = ids[:, None].expand(rows, steps, length)

    def step():
        out = model(ids, revealed_ids=states, clean_ids=ids, logits_to_keep=no_logits, teacher=True)
        out.corrected_hidden_states.sum().backward()

    estimate = estimate_memory(model, rows, length, steps, checkpointing)
    gradients = sum(p.numel() * p.element_size() for p in model.mrp_head.parameters())
    expected = estimate.activations + gradients
    measured = peak_of(step)
    assert measured / 1.33 < expected < 1.33 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "work",
    [
        lambda s, t, w, at: linear_total_variation(s, t, w).sum().backward(),
        lambda s, t, w, at: linear_kl_and_choice(s, t, w, 5)[1].log_prob.sum().backward(),
        lambda s, t, w, at: measure_head(t[None], s[None, None], t[None, None], w, torch.ones(1, 1, 64), at[None], 5),
        lambda s, t, w, at: linear_kl(s, t, w).sum().backward(),
    ],
)
def test_estimate_covers_every_objective_and_the_head_metrics(tiny_model, monkeypatch, work, dtype):
    """Work on logits runs in float32; for a weight in bfloat16 it takes half as many rows at a time."""
    vocabulary, chunk = 2000, 16
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", chunk * vocabulary)
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", chunk * vocabulary // 3)
    model = tiny_model(vocab_size=vocabulary, hidden_size=32).to(dtype)
    s, t = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    rows = torch.arange(64)
    # on CPUs with AMX oneDNN's bf16 products pack the weight into scratch memory, which does not belong to the loss
    with torch.backends.mkldnn.flags(enabled=dtype != torch.bfloat16):
        peak = peak_of(lambda: work(s, t, model.lm_head.weight.detach(), rows))
    assert peak <= 1.05 * estimate_memory(model, 1, 64, 1).loss


def estimate(**sizes) -> MemoryEstimate:
    return MemoryEstimate(**{"weights": GIB, "optimizer": GIB, "activations": GIB, "loss": GIB} | sizes)


def test_there_is_no_advice_if_the_step_fits():
    assert estimate().total == 4 * GIB
    assert advice(estimate(), 4 * GIB) is None


@pytest.mark.parametrize(
    ("sizes", "change"),
    [
        ({"weights": 20 * GIB}, "FSDP"),
        ({"activations": 9 * GIB}, "per_device_train_batch_size"),
        ({"loss": 9 * GIB}, "kl_chunk_rows"),
    ],
)
def test_advice_names_the_option_that_helps(sizes, change):
    text = advice(estimate(**sizes), 8 * GIB)
    assert change in text
    assert "only 8.00 GiB are free" in text


def test_text_of_an_estimate_names_all_its_parts():
    text = str(estimate(loss=GIB // 2))
    for part in dataclasses.fields(MemoryEstimate):
        assert part.name in text
    assert "about 3.50 GiB" in text


@pytest.mark.parametrize("tied", [False, True])
def test_shards_divide_weights_and_optimizer_except_for_what_is_gathered(tiny_model, tied):
    model = tiny_model(vocab_size=101, hidden_size=32, num_mrp_layers=2, tie_word_embeddings=tied)
    whole, sharded = (estimate_memory(model, 2, 16, 2, shards=shards) for shards in (1, 4))
    embeddings = 4 * 101 * 32 * (1 if tied else 2)
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    assert sharded.weights == whole.weights // 4 + embeddings + 2 * layer
    assert sharded.optimizer == whole.optimizer // 4
    assert (sharded.activations, sharded.loss) == (whole.activations, whole.loss)

import json
import math
import random

import pytest
import torch

from mrp_trainer.benchmarks import shapes as bench
from mrp_trainer.benchmarks.step_costs import (
    Costs,
    expected_block_cost,
    forwards_saved,
    interpolate,
    read_accepted,
    result_rows,
)
from mrp_trainer.commands.bench_shapes import report
from mrp_trainer.commands.cli import main as mrp

CPU = torch.device("cpu")
TINY = bench.Shape(4, 32, 64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=61)


@pytest.mark.parametrize(("name", "billions"), [("1.7b", 1.4), ("4b", 3.6), ("8b", 6.95)])
def test_shapes_have_the_published_number_of_parameters(name, billions):
    shape = bench.SHAPES[name]
    model = bench.random_model(shape, shape.num_hidden_layers, 1, 16, torch.bfloat16, torch.device("meta"))
    outside_embedding = sum(p.numel() for n, p in model.model.named_parameters() if not n.startswith("embed_tokens"))
    assert outside_embedding == pytest.approx(billions * 1e9, rel=0.02)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("candidates", [1, 2, 3, 8, 20])
def test_rounds_of_a_block_when_every_draft_holds_or_none(block_size, candidates):
    all_hold, none = [1.0] * 19, [0.0] * 19
    rounds = expected_block_cost(lambda c: 1, candidates, all_hold, block_size)
    assert rounds == pytest.approx(math.ceil((block_size - 1) / candidates))
    assert expected_block_cost(lambda c: 1, candidates, none, block_size) == pytest.approx(block_size - 1)


def test_expected_cost_is_the_mean_of_played_blocks():
    survives, block_size, candidates, generator = [0.8, 0.5, 0.3], 8, 4, random.Random(0)

    def cost(c):
        return 1 + 0.1 * c

    def play():
        total, masked = 0.0, block_size - 1  # the opening round has revealed one
        while masked:
            read = min(candidates, masked)
            total += cost(read)
            luck = generator.random()
            masked -= 1 + sum(luck < share for share in survives[: read - 1])
        return total

    mean = sum(play() for _ in range(20000)) / 20000
    assert expected_block_cost(cost, candidates, survives, block_size) == pytest.approx(mean, rel=0.01)


def test_a_rate_above_its_predecessor_counts_as_that():
    def rounds(accepted):
        return expected_block_cost(lambda c: 1, 4, accepted, 8)

    assert rounds([0.5, 0.7, 0.2]) == rounds([0.5, 0.5, 0.2])


def test_free_verification_and_drafts_save_as_much_time_as_forwards():
    flat = Costs("any", 1, backbone={1: 2.0, 2: 2.0, 4: 2.0}, logits={1: 1.0, 2: 1.0, 4: 1.0}, head=0.0)
    accepted = [0.8, 0.6, 0.4]
    # a draft still reads logits, 1.0 each
    assert flat.draft == 1.0
    assert flat.ratio(4) == 1
    free = Costs("any", 1, backbone={1: 2.0, 2: 2.0, 4: 2.0}, logits={1: 0.0, 2: 0.0, 4: 0.0}, head=0.0)
    for candidates in (1, 2, 3, 4):
        saved = forwards_saved(candidates, accepted, 8)
        assert free.speedup(candidates, accepted, 8) == pytest.approx(saved)
        assert flat.speedup(candidates, accepted, 8) <= saved
    assert free.speedup(1, accepted, 8) == 1


def test_the_speedup_of_a_small_block_equals_the_quotient_worked_out_by_hand():
    """A block of two: the opening, then one round of one candidate, whatever K is; only the head's keys differ."""
    costs = Costs("any", 1, backbone={1: 3.0, 2: 4.0}, logits={1: 1.0, 2: 2.0}, head=0.5)
    assert costs.block_seconds(1, [], 2) == 4 + 1 + 3 + 1
    assert costs.block_seconds(2, [0.9], 2) == 4 + 1 + 0.5 + 3 + 1
    # of three: two are masked after the opening, so K = 2 verifies two candidates and drafts one
    both = 4 + 2 + (0.5 + 1)
    assert costs.block_seconds(2, [0.9], 3) == pytest.approx(5.5 + both + 0.1 * (3 + 1))


def test_verification_stops_being_free_at_the_first_k_that_costs_more():
    costs = Costs("any", 1, backbone={1: 1.0, 2: 1.05, 4: 1.2, 8: 1.09}, logits=dict.fromkeys((1, 2, 4, 8), 0), head=0)
    assert [costs.free_up_to(tolerance) for tolerance in (0, 0.1, 0.2, 0.01)] == [1, 2, 8, 1]
    text = report(costs, result_rows(costs, [1, 2, 4], None, 16), 0.1)
    assert text.endswith("verification is free (within 10% of a step) up to K = 2 and no longer at K = 4")


def test_interpolation_is_linear_and_never_beyond_what_was_measured():
    points = {1: 1.0, 2: 3.0, 6: 5.0}
    assert [interpolate(points, at) for at in (1, 2, 3, 4, 6)] == [1, 3, 3.5, 4, 5]
    with pytest.raises(ValueError, match="candidates=7 lies outside the measured range, 1 to 6"):
        interpolate(points, 7)


def test_extrapolation_keeps_what_does_not_grow_with_depth():
    assert bench.extrapolate(bare=1.0, measured=1.0 + 3 * 2.0, layers=3, full_layers=10) == 1 + 10 * 2


def test_candidates_see_the_context_and_not_one_another():
    model = bench.random_model(TINY, 2, 1, 4, torch.float32, CPU, context=64)
    parts = bench.StepParts(model, batch_size=2, context=18, candidates=3)
    assert parts.start == 16
    packed, alone = parts.backbone(3), parts.backbone(1)
    assert packed.shape == (2, 3 * 4, 32)
    torch.testing.assert_close(packed[:, :4], alone)
    assert parts.head().shape == (2, 4, 32)
    assert parts.logits(3).token.shape == (2, 3, 4)


def test_depth_none_leaves_out_every_layer_and_puts_them_back():
    model = bench.random_model(TINY, 2, 1, 4, torch.float32, CPU)
    calls = []
    for layer in [*model.model.layers, *model.mrp_head.layers]:
        layer.register_forward_hook(lambda module, *_: calls.append(module))
    parts = bench.StepParts(model, 1, 8, 2)
    for depth, expected in (("bare", 0), ("full", 3)):
        bench.at_depth(model, depth, lambda: (parts.backbone(2), parts.head()))
        assert len(calls) == expected
    assert len(model.model.layers) == 2


def test_costs_are_extrapolated_from_what_was_timed(monkeypatch):
    """A clock that says 1 s + 2 s per layer of the backbone, 1 s + 3 s per layer of the head, 5 s for logits."""

    def fake(steps, repeats, device):
        seconds = {("bare", "head"): 1.0, ("full", "head"): 1.0 + 3.0 * 2}  # two of three head layers are measured
        seconds |= {("bare", c): 1.0 for c in (1, 2, 4)} | {("full", c): 1.0 + 2.0 * 2 for c in (1, 2, 4)}
        assert steps.keys() == seconds.keys() | {("logits", c) for c in (1, 2, 4)}
        return {key: [seconds.get(key, 5.0)] * repeats for key in steps}

    monkeypatch.setattr(bench, "interleaved", fake)
    (costs,) = bench.measure_costs("tiny", TINY, [3], [4], layers=2, block_size=4, context=8)
    assert (costs.shape, costs.batch_size) == ("tiny", 3)
    assert costs.backbone == {1: 9.0, 2: 9.0, 4: 9.0}  # four layers
    assert costs.logits == {1: 5.0, 2: 5.0, 4: 5.0}
    assert costs.head == 10.0  # three


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="layers=5 is more than tiny has"):
        bench.measure_costs("tiny", TINY, [1], [2], layers=5)
    with pytest.raises(ValueError, match="batch_sizes must be at least 1"):
        bench.measure_costs("tiny", TINY, [0], [2], layers=1)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[0.5]",
        '{"accepted": [1.2]}',
        '{"accepted": "high"}',
        "{}",
        '{"rows": []}',
        '{"rows": 3}',
        '{"rows": [1]}',
        '{"rows": [{"mode": "spec-4"}]}',
    ],
)
def test_a_wrong_acceptance_file_is_refused(tmp_path, text):
    path = tmp_path / "accepted.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="accepted.json"):
        read_accepted(str(path))


def test_rates_are_those_of_the_deepest_exact_spec_row_of_a_benchmark(tmp_path):
    rows = {"static": [], "spec-2": [0.9], "spec-4": [0.8, 0.6, 0.4], "spec-8-token": [0.9] * 7, "spec-4-self": [0.5]}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [{"mode": mode, "accepted": rates} for mode, rates in rows.items()]}))
    assert read_accepted(str(path)) == [0.8, 0.6, 0.4]


def test_command_predicts_as_far_as_the_rates_reach(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    path = tmp_path / "accepted.json"
    path.write_text('{"accepted": [0.5]}')
    options = ["--shapes", "tiny", "--batch-sizes", "1", "2", "--candidates", "1", "2", "3", "--repeats", "1"]
    options += ["--block-size", "4", "--context", "8", "--layers", "1", "--device", "cpu", "--dtype", "float32"]
    assert mrp(["bench", "shapes", *options, "--accepted", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["rows"]
    assert [(row["batch_size"], row["candidates"]) for row in rows] == [(b, k) for b in (1, 2) for k in (1, 2, 3)]
    assert [row["speedup"] is None for row in rows] == [False, False, True] * 2
    assert rows[0]["speedup"] == rows[0]["forwards_saved"] == rows[0]["verification_ratio"] == 1
    # three are masked after the opening, and two candidates are read while two are: 1 + (1 + N(2)/2 + N(1)/2) rounds
    assert rows[1]["forwards_saved"] == pytest.approx(4 / (1 + 1 + 0.5 * 1.5 + 0.5 * 1))
    assert [costs["layers_measured"] for costs in result["costs"]] == [1, 1]
    assert mrp(["bench", "shapes", *options, "--accepted", str(path)]) == 0
    text = capsys.readouterr().out
    assert "acceptance rates of 1 draft: predictions up to K = 2" in text
    assert "tiny: 1 of 4 layers measured" in text
    assert text.count("verification is free") == 2


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--context", "-5", "--context must be at least 0, got -5"),
        ("--layers", "0", "--layers must be at least 1, got 0"),
        ("--layers", "99", "--layers 99 is more than 1.7b has (28)"),
        ("--head-layers", "0", "--head-layers must be at least 1, got 0"),
        ("--block-size", "0", "--block-size must be at least 1, got 0"),
        ("--batch-sizes", "1,0", "--batch-sizes must be at least 1, got 0"),
        ("--candidates", "0", "--candidates must be at least 1, got 0"),
        ("--repeats", "0", "--repeats must be at least 1, got 0"),
        ("--shapes", "2b", "--shapes must be one of '1.7b', '4b', '8b', got '2b'"),
        ("--device", "xpu9", "--device xpu9 cannot be used here"),
    ],
)
def test_a_bad_option_is_named(capsys, option, value, message):
    assert mrp(["bench", "shapes", "--shapes", "1.7b", option, value]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.out == ""

"""Plans of drafting: fixed by the options, or chosen by what drafting gains and costs."""

import json

import pytest
import torch
from decoding_calls import batch, generate, random_prompts, sharp_head

from modeling_mrp.draft_plan import (
    DraftPlan,
    Gain,
    LinearCost,
    Planner,
    RoundCost,
    draft_profile,
    observe_rounds,
    planner_for,
)
from modeling_mrp.options import DecodingOptions
from mrp_trainer.commands.cli import main

PLAIN, SMALL, LARGE = Gain(1, 1, 1.0, 1.0, 0, 0), Gain(4, 3, 2.4, 3.5, 2.0, 1.0), Gain(8, 1, 3.2, 7.0, 4.0, 4.0)
PROFILE = {"head": [vars(gain) for gain in (PLAIN, SMALL, LARGE)]}


def planner_of(model, **options) -> Planner:
    model.config.draft_profile = PROFILE
    options = {"mrp_mode": "spec", "mrp_steps": "auto"} | options
    return planner_for(model, DecodingOptions.resolve(options, model.config))


def decode(planner: Planner, rows: int, rounds: int, per_token: float, per_head_step: float, ratio: float = 1.0):
    """Let rounds of the planner's plans cost what they cost on a device, and return the plans of the last ones.

    As in decoding, rounds differ: every third one drafts half as far.
    """
    plans = []
    for number in range(rounds):
        plans.append(planner.plan(rows))
        gain, share = planner.chosen, 0.5 if number % 3 == 0 else 1.25
        tokens = round(gain.tokens * share * rows * planner.block_size)
        depths, head_steps = round(gain.depths * share), round(gain.head_steps)
        drafting = per_head_step * head_steps + 1e-5 * depths
        planner.begin(RoundCost(rows, tokens, depths, head_steps, drafting, drafted=0.0))
        planner.end(1e-3 + per_token * tokens, gained=round((gain.steps - 1) * ratio * rows))
    return plans[rounds // 2 :]


@pytest.mark.parametrize(
    ("per_token", "per_head_step", "candidates"),
    [(1e-7, 1e-5, 8), (1e-7, 5e-4, 4), (1e-3, 1e-4, 1)],
    ids=["everything is cheap", "head steps are dear", "tokens are dear"],
)
def test_the_plan_follows_from_what_forwards_and_head_steps_cost(tiny_model, per_token, per_head_step, candidates):
    planner = planner_of(tiny_model())
    plans = decode(planner, rows=4, rounds=60, per_token=per_token, per_head_step=per_head_step)
    assert {plan.candidates for plan in plans} == {candidates}


def test_drafting_stops_where_this_text_accepts_no_drafts(tiny_model):
    planner = planner_of(tiny_model())
    plans = decode(planner, rows=1, rounds=120, per_token=1e-5, per_head_step=1e-4, ratio=0.0)
    assert {plan.candidates for plan in plans} == {1}


def test_costs_are_remembered_for_the_next_call_whatever_its_number_of_rows(tiny_model):
    """A token costs as much as a twentieth of a forward's fixed part: too much for 16 rows, little enough for one."""
    model = tiny_model()
    decode(planner_of(model), rows=16, rounds=40, per_token=5e-5, per_head_step=1e-5)
    assert planner_of(model).plan(16).candidates == 1
    assert planner_of(model).plan(1).candidates > 1


def test_no_more_candidates_than_asked_for(tiny_model):
    planner = planner_of(tiny_model(), mrp_candidates=4)
    plans = decode(planner, rows=1, rounds=20, per_token=0.0, per_head_step=0.0)
    assert max(plan.candidates for plan in plans) == 4


def test_linear_costs_are_those_of_the_measurements():
    cost = LinearCost()
    for x, y in ((1.0, 8.0), (1.0, 64.0), (1.0, 16.0)):
        cost.add(x, y, 3.0 * x + 0.5 * y)
    assert cost.coefficients(ratio=1.0) == pytest.approx((3.0, 0.5))


def test_costs_that_cannot_be_told_apart_keep_the_assumed_ratio():
    cost = LinearCost()
    assert cost.coefficients(ratio=10.0) is None
    for _ in range(3):
        cost.add(1.0, 8.0, 36.0)
    assert cost.coefficients(ratio=10.0) == pytest.approx((20.0, 2.0))


def test_a_checkpoint_without_a_profile_drafts_by_the_default_one(tiny_model):
    config = tiny_model().config
    for draft in ("head", "self"):
        gains = draft_profile(config, draft)
        assert gains[0].candidates == 1 and max(gain.steps for gain in gains) > 2
        assert all(gain.head_steps == 0 for gain in gains) == (draft == "self")


@pytest.mark.parametrize("draft", ["head", "self"])
def test_auto_returns_the_text_of_backbone_only_decoding(tiny_model, draft):
    model = sharp_head(tiny_model(block_size=8))
    inputs = batch(random_prompts())
    static, _ = generate(model, inputs, max_new_tokens=40)
    auto, output = generate(model, inputs, mrp_mode="spec", mrp_steps="auto", mrp_draft=draft, max_new_tokens=40)
    assert auto.equal(static)
    assert output.stats.drafts_proposed[:, 1:].sum() > 0


def test_a_fixed_number_is_not_a_bound_of_the_checkpoints_default(tiny_model):
    """The generation config says "auto"; `mrp_candidates=4` then means a graph of 4 states, not at most 4."""
    model = sharp_head(tiny_model(block_size=8))
    model.generation_config.mrp_steps = "auto"
    inputs = {"input_ids": torch.arange(4, 9)[None]}
    with observe_rounds(model) as rounds:
        generate(model, inputs, mrp_mode="spec", mrp_candidates=4, max_new_tokens=24)
    assert max(cost.depths for cost in rounds) == 3
    assert DraftPlan.graph(4, 4, 8).candidates == 4


def test_observed_rounds_say_what_was_read_and_drafted(tiny_model):
    model = sharp_head(tiny_model(block_size=4))
    inputs = {"input_ids": torch.arange(4, 9)[None]}
    with observe_rounds(model) as rounds:
        _, output = generate(model, inputs, mrp_mode="spec", mrp_steps=3, max_new_tokens=16)
    assert len(rounds) == int(output.stats.backbone_forwards)
    assert all(cost.rows == 1 and cost.tokens % 4 == 0 and cost.depths == cost.head_steps for cost in rounds)
    with observe_rounds(model) as rounds:
        pass
    generate(model, inputs, mrp_mode="spec", max_new_tokens=16)
    assert not rounds  # nothing is collected after the block


@pytest.fixture
def checkpoint(tiny_model, word_tokenizer, tmp_path):
    folder = tmp_path / "checkpoint"
    model = sharp_head(tiny_model(vocab_size=20, mask_token_id=3))
    model.save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    return folder


def test_calibrate_stores_a_profile_that_auto_uses(checkpoint, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("what is one plus two", "so the")))
    arguments = ["--data", str(data), "--max-new-tokens", "12", "--raw", "--limit", "2"]
    assert main(["calibrate", str(checkpoint), *arguments]) in (0, None)
    assert "stored draft_profile of 2 prompts in " in capsys.readouterr().out
    profile = json.loads((checkpoint / "config.json").read_text())["draft_profile"]
    gains = [Gain(**values) for values in profile["head"]]
    assert gains[0].candidates == 1 and gains[0].steps == 1 and gains[0].depths == 0
    assert all(gain.steps >= 1 for gain in gains)
    assert {gain.candidates for gain in gains if gain.chain} == {1, 2, 3, 4, 5}
    assert {gain.candidates for gain in gains if not gain.chain} == {4, 6, 8, 12, 16}
    assert main(["calibrate", str(checkpoint), *arguments, "--draft", "self", "--json"]) in (0, None)
    profile = json.loads((checkpoint / "config.json").read_text())["draft_profile"]
    assert set(profile) == {"head", "self"}


@pytest.mark.parametrize(
    "profile",
    [[], {"head": []}, {"tail": [vars(PLAIN)]}, {"head": [vars(SMALL)]}, {"head": [{"candidates": 1}]}],
)
def test_a_malformed_profile_is_refused(tiny_model, profile):
    with pytest.raises(ValueError, match="draft_profile must be .*mrp calibrate"):
        tiny_model(draft_profile=profile)


def test_other_modes_take_their_default_number_of_steps_where_the_checkpoint_says_auto(tiny_model):
    """The generation config of a checkpoint says "auto", which only spec knows."""
    model = sharp_head(tiny_model(block_size=8))
    inputs = batch(random_prompts())
    expected, _ = generate(model, inputs, mrp_mode="direct", mrp_steps=3)
    for mode in ("direct", "remask", None):
        auto, _ = generate(model, inputs, mrp_mode=mode, mrp_steps="auto")
        assert mode != "direct" or auto.equal(expected)

"""Names of decoding modes."""

import pytest

from modeling_mrp import MRPConfig
from modeling_mrp.options import DecodingOptions
from mrp_trainer.benchmarks.decode import DEFAULT_MODES, OUTSIDE
from mrp_trainer.evaluation.modes import DEMO_MODES, KINDS, family, grid, is_lossless, mode_options, needs_head


def resolved(name: str) -> DecodingOptions:
    return DecodingOptions.resolve(mode_options(name, 8), MRPConfig(block_size=8, mask_token_id=3, num_mrp_layers=1))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("static", {"mrp_mode": None, "denoising_steps": 8}),
        ("static-4", {"mrp_mode": None, "denoising_steps": 2}),
        ("dynamic-0.7", {"remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.7}),
        ("entropy-0.1", {"mrp_mode": None, "remasking_strategy": "entropy_bounded", "eb_threshold": 0.1}),
        ("entropy-2", {"eb_threshold": 2.0}),
        ("sequential", {"mrp_mode": None, "remasking_strategy": "sequential", "denoising_steps": 8}),
        ("sequential-4", {"remasking_strategy": "sequential", "denoising_steps": 2}),
        ("wide-narrow-0.5", {"remask_criterion": "backbone", "remask_threshold": 0.9, "confidence_threshold": 0.5}),
        ("spec-6", {"mrp_mode": "spec", "mrp_steps": 6, "mrp_draft": "head", "mrp_acceptance": "exact"}),
        ("spec-4-self", {"mrp_steps": 4, "mrp_draft": "self", "mrp_acceptance": "exact"}),
        ("spec-8-token", {"mrp_steps": 8, "mrp_draft": "head", "mrp_acceptance": "token"}),
        ("spec-4", {"mrp_steps": 4, "mrp_candidates": None}),
        ("graph-6", {"mrp_mode": "spec", "mrp_steps": 6, "mrp_candidates": 6, "mrp_draft": "head"}),
        ("graph-4-self", {"mrp_candidates": 4, "mrp_draft": "self"}),
        ("graph-8-token", {"mrp_candidates": 8, "mrp_acceptance": "token"}),
        ("auto", {"mrp_mode": "spec", "mrp_steps": "auto", "mrp_draft": "head", "mrp_candidates": None}),
        ("auto-self", {"mrp_steps": "auto", "mrp_draft": "self"}),
        ("direct-2", {"mrp_mode": "direct", "mrp_steps": 2}),
        ("remask-confidence", {"mrp_mode": "remask", "remask_criterion": "confidence", "confidence_threshold": 0.5}),
        ("remask-residual-1", {"mrp_mode": "remask", "remask_criterion": "residual", "confidence_threshold": 1.0}),
    ],
)
def test_a_name_stands_for_options(name, expected):
    options = vars(resolved(name))
    assert {key: options[key] for key in expected} == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "static-3",
        "static-0",
        "spec",
        "spec-0",
        "spec-2.5",
        "spec-4-both",
        "direct-2-self",
        "graph",
        "graph-0-self",
        "dynamic",
        "dynamic-1.5",
        "entropy",
        "entropy--1",
        "entropy-nan",
        "entropy-inf",
        "sequential-3",
        "sequential-2-2",
        "dynamic-0.9+",
        "+graph-8",
        "graph-8+dynamic-0.9",
        "dynamic-0.9+direct-2",
        "dynamic-0.9+static",
        "dynamic-0.9+graph-8+spec-4",
        "wide-narrow-0.5+graph-8",
    ]
    + ["dynamic-nan", "remask-0.5", "remask-all-0.5", "remask-confidence-", "wide-narrow", "static-4-token", "Static"],
)
def test_an_unknown_name_is_an_error_that_lists_the_modes(name):
    with pytest.raises(ValueError, match="unknown mode .*spec-K-self.* N a divisor of the block size .8."):
        mode_options(name, 8)


@pytest.mark.parametrize("rule", ["static", "static-2", "dynamic-0.7", "entropy-0.3", "sequential", "sequential-2"])
@pytest.mark.parametrize("speculation", ["spec-4", "graph-8-self", "graph-8-token", "auto"])
def test_a_joined_name_has_the_rule_of_one_part_and_the_speculation_of_the_other(rule, speculation):
    both, alone, drafts = (resolved(name) for name in (f"{rule}+{speculation}", rule, speculation))
    for name, value in vars(both).items():
        of_rule = name in ("remasking_strategy", "denoising_steps", "confidence_threshold", "eb_threshold")
        assert value == vars(alone if of_rule else drafts)[name]


def test_the_refusal_of_a_joined_name_says_what_can_be_joined():
    with pytest.raises(
        ValueError, match=r"expected a rule \(static.*entropy-E.*\), speculation \(spec-K.*joined by \+"
    ):
        mode_options("graph-8+dynamic-0.9", 8)


@pytest.mark.parametrize(
    "mode, reference, lossless",
    [
        ("spec-4", "static", True),
        ("static+auto-self", "static", True),
        ("spec-4-token", "static", False),
        ("direct-2", "static", False),
        ("sequential", "sequential", False),  # not speculation
        ("sequential+graph-8", "sequential", True),
        ("sequential+graph-8", "static", False),
        ("sequential-2+graph-8", "sequential", False),
        ("dynamic-0.9+graph-8", "dynamic-0.7", False),
        ("entropy-0.1+graph-8", "entropy-0.2", False),
    ],
)
def test_speculation_is_lossless_beside_its_own_rule_only(mode, reference, lossless):
    assert is_lossless(mode_options(mode, 8), mode_options(reference, 8)) == lossless


def test_only_modes_with_a_head_need_one():
    names = [*grid(KINDS, [0.5], [2], block_size=8)]
    headless = [name for name in names if not needs_head(mode_options(name, 8))]
    assert headless == [
        "static",
        "static-2",
        "static-4",
        "dynamic-0.5",
        "wide-narrow-0.5",
        "spec-2-self",
        "graph-2-self",
        "auto-self",
    ]


def test_the_default_modes_of_the_commands_exist():
    for name in [*DEMO_MODES, *(name for name in DEFAULT_MODES if name not in OUTSIDE)]:
        resolved(name)


def test_an_unknown_kind_of_mode_is_named():
    with pytest.raises(ValueError, match="got 'spec_self'. Did you mean 'spec-self'"):
        grid(["spec_self"], [0.5], [2], block_size=4)


def test_a_grid_takes_complete_names_beside_kinds():
    names = ["dynamic", "sequential", "entropy-0.1+spec-4", "sequential"]
    assert list(grid(names, [0.9], [2], block_size=8)) == ["static", "dynamic-0.9", "sequential", "entropy-0.1+spec-4"]


def test_a_family_is_the_name_without_its_numbers():
    names = [
        "static",
        "static-4",
        "dynamic-0.9",
        "spec-4-self",
        "remask-leave_one_out-0.5",
        "dynamic-0.9+graph-8-self",
    ]
    assert [family(name) for name in names] == [
        *("static", "static", "dynamic", "spec-self", "remask-leave_one_out", "dynamic+graph-self"),
    ]

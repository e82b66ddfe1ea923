"""Decoding options: their defaults, and the message for each value that is refused."""

import warnings

import pytest

from modeling_mrp import MRPConfig
from modeling_mrp.options import OPTION_NAMES, DecodingOptions, nearest


def config(**options):
    values = {"vocab_size": 61, "block_size": 8, "mask_token_id": 3, "num_mrp_layers": 1, "num_hidden_layers": 1}
    return MRPConfig(**values | options)


def resolve(num_mrp_layers=1, calibrated=None, **options):
    return DecodingOptions.resolve(
        options, config(num_mrp_layers=num_mrp_layers, calibrated_remask_threshold=calibrated)
    )


def test_the_documented_defaults():
    options = resolve()
    assert vars(options) == {
        "mrp_mode": None,
        "mrp_steps": 3,
        "mrp_candidates": None,
        "mrp_draft": "head",
        "mrp_drafts_per_head_step": 1,
        "mrp_acceptance": "exact",
        "mrp_acceptance_floor": 0.9,
        "mrp_draft_vocabulary": True,
        "mrp_draft_threshold": None,
        "remasking_strategy": "low_confidence_static",
        "denoising_steps": 8,
        "confidence_threshold": 0.9,
        "eb_threshold": 0.1,
        "remask_criterion": "leave_one_out",
        "remask_threshold": None,
        "block_size": 8,
    }
    assert tuple(vars(options)) == OPTION_NAMES


@pytest.mark.parametrize(
    ("given", "depths", "places"),
    [
        ({"mrp_steps": 4}, 4, 4),
        ({"mrp_candidates": 6}, 6, 6),
        ({"mrp_candidates": 6, "mrp_steps": 4}, 4, 6),
        ({"mrp_candidates": 4, "mrp_steps": 9}, 4, 4),
    ],
)
def test_a_graph_is_as_deep_as_it_has_places_unless_the_steps_are_given(given, depths, places):
    options = resolve(mrp_mode="spec", **given)
    assert (options.depths, options.candidates) == (depths, places)


def test_none_means_the_default():
    assert resolve(**dict.fromkeys(OPTION_NAMES)) == resolve()


def test_defaults_follow_from_the_other_options():
    assert resolve(num_mrp_layers=0).mrp_draft == "self"
    assert resolve(mrp_mode="remask").remasking_strategy == "low_confidence_dynamic"
    with pytest.warns(UserWarning, match="block_size=4 overrides 8"):
        assert resolve(block_size=4).denoising_steps == 4
    assert resolve(mrp_mode="remask", confidence_threshold=0.5).keep_threshold == 0.5
    assert resolve(mrp_mode="remask", remask_threshold=0.7).keep_threshold == 0.7
    residual = {"mrp_mode": "remask", "remask_criterion": "residual", "calibrated": 2.5}
    assert resolve(**residual).keep_threshold == 2.5
    assert resolve(**residual, remask_threshold=4.0).keep_threshold == 4.0
    assert resolve(mrp_mode="remask", calibrated=2.5).keep_threshold == 0.9  # |C| means nothing as a confidence


@pytest.mark.parametrize(("steps", "tokens"), [(8, 1), (4, 2), (3, 3), (5, 2), (1, 8), (20, 1)])
def test_denoising_steps_give_tokens_per_step(steps, tokens):
    assert resolve(denoising_steps=steps).step_rule.tokens_per_step == tokens


def test_the_number_of_candidates_and_whether_the_head_runs():
    assert [resolve(mrp_mode=mode, mrp_steps=5).candidates for mode in (None, "spec", "direct", "remask")] == [
        1,
        5,
        1,
        1,
    ]
    assert [resolve(mrp_mode=mode).uses_head for mode in (None, "spec", "direct", "remask")] == [
        False,
        True,
        True,
        True,
    ]
    assert not resolve(mrp_mode="spec", mrp_steps=1).uses_head
    assert not resolve(mrp_mode="spec", mrp_draft="self").uses_head


REFUSED = [
    ("mrp_mode", "specc", "one of None, 'direct', 'spec', 'remask', got 'specc'. Did you mean 'spec'?"),
    ("mrp_mode", "", "one of None, 'direct', 'spec', 'remask', got ''"),
    ("mrp_mode", True, "one of None, 'direct', 'spec', 'remask', got True"),
    ("mrp_draft", "heat", "one of 'head', 'self', got 'heat'. Did you mean 'head'?"),
    ("mrp_acceptance", "tokens", "one of 'exact', 'token', got 'tokens'. Did you mean 'token'?"),
    ("remasking_strategy", "low_confidence_dynamc", "Did you mean 'low_confidence_dynamic'?"),
    ("remasking_strategy", "static", "one of 'low_confidence_static'"),
    ("remask_criterion", "leave-one-out", "Did you mean 'leave_one_out'?"),
    ("mrp_steps", 0, 'an integer of at least 1 or "auto", got 0'),
    ("mrp_candidates", 0, "an integer of at least 1, got 0"),
    ("mrp_steps", -3, 'an integer of at least 1 or "auto", got -3'),
    ("mrp_steps", 2.0, 'an integer of at least 1 or "auto", got 2.0'),
    ("mrp_steps", "3", "an integer of at least 1 or \"auto\", got '3'"),
    ("mrp_steps", True, 'an integer of at least 1 or "auto", got True'),
    ("mrp_drafts_per_head_step", 0, "an integer of at least 1, got 0"),
    ("denoising_steps", 0, "an integer of at least 1, got 0"),
    ("block_size", 0, "an integer of at least 1, got 0"),
    ("block_size", "8", "an integer of at least 1, got '8'"),
    ("confidence_threshold", 1.5, "between 0 and 1, got 1.5"),
    ("confidence_threshold", -0.1, "a finite number of at least 0, got -0.1"),
    ("confidence_threshold", float("nan"), "a finite number of at least 0, got nan"),
    ("confidence_threshold", "0.9", "a finite number of at least 0, got '0.9'"),
    ("mrp_acceptance_floor", 1.01, "between 0 and 1, got 1.01"),
    ("mrp_draft_threshold", -1, "a finite number of at least 0, got -1"),
    ("mrp_draft_threshold", 2, "between 0 and 1, got 2"),
    ("remask_threshold", 2.0, "between 0 and 1, got 2.0"),
    ("eb_threshold", -0.5, "a finite number of at least 0, got -0.5"),
    ("eb_threshold", float("inf"), "a finite number of at least 0, got inf"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_a_value_out_of_range_is_refused_with_its_name(name, value, message):
    with pytest.raises(ValueError) as error:
        resolve(**{name: value})
    assert str(error.value).startswith(f"{name} must ") and message in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("confidence_threshold", 0), ("confidence_threshold", 1), ("eb_threshold", 12.5), ("mrp_draft_threshold", 0.0)],
)
def test_the_ends_of_a_range_are_allowed(name, value):
    assert vars(resolve(**{name: value}))[name] == value


def test_a_residual_threshold_may_exceed_one():
    assert resolve(mrp_mode="remask", remask_criterion="residual", remask_threshold=7.5).keep_threshold == 7.5


@pytest.mark.parametrize(
    "options", [{"mrp_mode": "direct"}, {"mrp_mode": "remask"}, {"mrp_mode": "spec", "mrp_draft": "head"}]
)
def test_a_mode_that_needs_a_head_is_refused_with_the_modes_that_do_not(options):
    with pytest.raises(ValueError, match=f"mrp_mode='{options['mrp_mode']}'.*has none.*mrp_draft='self'"):
        resolve(num_mrp_layers=0, **options)
    assert resolve(num_mrp_layers=0, mrp_mode="spec").mrp_draft == "self"


def test_remask_requires_the_dynamic_rule():
    with pytest.raises(ValueError, match="remasking_strategy='sequential' cannot be combined with mrp_mode='remask'"):
        resolve(mrp_mode="remask", remasking_strategy="sequential")


def test_the_models_own_block_size_does_not_warn():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resolve(block_size=8).block_size == 8
    assert not caught


def test_nearest_name():
    assert nearest("mrp_step", OPTION_NAMES) == " Did you mean 'mrp_steps'?"
    assert nearest("zzzz", OPTION_NAMES) == ""

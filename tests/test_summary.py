"""Figures of an evaluation: rows, Pareto front, area under the curves, and the table."""

import math
import random

import pytest

from mrp_trainer.evaluation.formatting import significant
from mrp_trainer.evaluation.frontier import area_under_parallelism, pareto_front
from mrp_trainer.evaluation.summary import rows_table, summarise, table


def test_the_area_under_parallelism_is_the_published_formula():
    weight = math.exp(-3 * (1 - 0.78 / 0.8))
    area = area_under_parallelism([(3.0, 0.5), (1.0, 0.8), (2.0, 0.78)])  # the last loses more than 5 points
    assert area == pytest.approx(100 * (0.8 + (0.8 + 0.78 * weight) / 2))
    assert area_under_parallelism([(1.0, 1.0)]) == 100
    assert area_under_parallelism([(1.0, 0.8), (2.0, 0.8)], best_accuracy=1.0) == pytest.approx(
        100 * (0.8 + 0.8 * math.exp(-0.6))
    )


def test_the_pareto_front_holds_the_points_that_no_other_dominates():
    rng = random.Random(0)
    points = [(rng.randint(1, 9) / 2, rng.randint(0, 9) / 9) for _ in range(60)]

    def dominated(p):
        return any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)

    assert pareto_front(points) == sorted({p for p in points if not dominated(p)})


def record(mode, index, score, tokens, forwards, proposed=(0,), accepted=(0,), seconds=1.0):
    return {
        "mode": mode,
        "index": index,
        "score": score,
        "token_ids": tokens,
        "forwards": forwards,
        "head_forwards": 0,
        "proposed": list(proposed),
        "accepted": list(accepted),
        "position_tokens": [len(tokens), 0],
        "position_forwards": [forwards, 0.0],
        "seconds": seconds,
    }


RECORDS = [
    record("static", 0, 1.0, [4, 5], 2, seconds=3.0),
    record("static", 1, 0.0, [6, 7], 2, seconds=3.0),
    record("spec-3", 0, 1.0, [4, 5], 1, (0, 3, 1), (0, 2, 0)),
    record("spec-3", 1, 1.0, [6, 8], 1, (0, 1, 1), (0, 1, 1)),
]


def test_figures_of_a_mode():
    summary = summarise(RECORDS, ["static", "spec-3"])
    static, spec = summary["rows"]
    assert (static["accuracy"], static["tokens_per_forward"], static["on_front"]) == (0.5, 1.0, False)
    assert static["standard_error"] == pytest.approx(0.5)  # sqrt(0.5 / 2), the sample variance over n
    assert (spec["accuracy"], spec["tokens_per_forward"], spec["on_front"]) == (1.0, 2.0, True)
    assert (spec["time_ratio"], spec["identical"]) == (3.0, 0.5)
    assert spec["acceptance"] == [0.75, 0.5]
    assert spec["tokens_per_forward_by_position"] == [2.0, None]
    assert summary["aup"] == 200  # the front is one point
    static_height = 0.5 * math.exp(-1.5)
    assert summary["aup_by_family"] == {"spec": pytest.approx(100 * (0.5 + (static_height + 1) / 2))}


def test_the_table_shows_every_mode():
    summary = summarise(RECORDS, ["static", "spec-3"]) | {"kl": {"before": [0.4, 0.8], "after": [0.1, 0.2]}}
    text = table(summary)
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:4]] == ["static", "spec-3"]
    assert "0.400 > 0.100, 0.800 > 0.200" in text
    assert "front: 200.0" in text


def test_small_divergences_keep_their_digits_in_the_table():
    summary = summarise(RECORDS, ["static", "spec-3"]) | {"kl": {"before": [0.00012345, 12.0], "after": [0.0, 3e-9]}}
    assert "0.000123 > 0, 12.0 > 3.00e-09" in table(summary)


@pytest.mark.parametrize(
    "value, expected",
    [(0.4, "0.400"), (0.0321, "0.0321"), (25.34, "25.3"), (1234.5, "1234"), (4.1e-7, "4.10e-07"), (-0.5, "-0.500")]
    + [(0.0, "0"), (math.inf, "inf")],
)
def test_numbers_are_written_with_three_significant_digits(value, expected):
    assert significant(value) == expected


def test_without_scores_there_are_no_accuracies_and_no_areas():
    unscored = [row | {"score": None} for row in RECORDS]
    summary = summarise(unscored, ["static", "spec-3"])
    assert list(summary) == ["rows"]
    assert summary["rows"][1]["accuracy"] is None and summary["rows"][1]["identical"] == 0.5
    text = table(summary)
    assert "accuracy" not in text and "AUP" not in text and "spec-3" in text


def test_columns_can_be_chosen():
    rows = summarise(RECORDS, ["static", "spec-3"])["rows"]
    lines = rows_table(rows, ("mode", "forwards")).splitlines()
    assert [line.split() for line in lines[2:]] == [["|", "static", "|", "4", "|"], ["|", "spec-3", "|", "2", "|"]]

"""Accuracy against parallelism: the Pareto front and the area under the curve."""

import math
from collections.abc import Iterable

Point = tuple[float, float]  # tokens per forward of the backbone, accuracy in 0..1
PENALTY = 3.0
TOLERATED_LOSS = 0.05


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other point dominates, by rising tokens per forward."""
    front: list[Point] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def area_under_parallelism(points: Iterable[Point], best_accuracy: float | None = None) -> float:
    """Return the accuracy under parallelism (AUP) of a curve, as published with d3LLM (arXiv 2601.07568).

    The points (rho_i, y_i) are ordered by tokens per forward rho, with the accuracy y in percent; those whose accuracy
    is more than 5 points below the first one's are left out. Then

        AUP = rho_1 y_1 + sum over i > 1 of (rho_i - rho_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2
        W(y) = min(exp(-3 (1 - y / y_best)), 1)

    A decoder that reveals one token per forward and is always right has an AUP of 100; speed that costs accuracy
    counts less. Of several points with the same speed, only the most accurate one is used.

    Args:
        points: at least one point, accuracy in 0..1.
        best_accuracy: y_best, the best accuracy of all curves that are compared (default: of this one).

    Raises:
        ValueError: if there is no point, a speed is not positive, or an accuracy is outside 0..1.
    """
    best_at: dict[float, float] = {}
    for speed, accuracy in points:
        if not (speed > 0 and 0 <= accuracy <= 1):
            raise ValueError(f"points must be (tokens per forward > 0, accuracy in 0..1), got {(speed, accuracy)}")
        best_at[speed] = max(accuracy, best_at.get(speed, 0.0))
    if not best_at:
        raise ValueError("points is empty: the area under a curve needs at least one")
    curve = sorted(best_at.items())
    best = max(best_at.values()) if best_accuracy is None else best_accuracy
    first = curve[0][1]
    kept = [(speed, accuracy) for speed, accuracy in curve if accuracy >= first - TOLERATED_LOSS - 1e-9]
    heights = [accuracy * accuracy_weight(accuracy, best) for _, accuracy in kept]
    area = kept[0][0] * first
    for i in range(1, len(kept)):
        area += (kept[i][0] - kept[i - 1][0]) * (heights[i] + heights[i - 1]) / 2
    return 100 * area


def accuracy_weight(accuracy: float, best: float) -> float:
    """Return the weight W(y) of `area_under_parallelism`, in 0..1."""
    return min(math.exp(-PENALTY * (1 - accuracy / best)), 1.0) if best > 0 else 1.0

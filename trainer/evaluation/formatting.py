"""Numbers as text."""

import math


def significant(value: float, digits: int = 3) -> str:
    """Write a number with so many significant digits: 0.400, 0.00321, 25.3, 4.10e-07.

    A KL divergence may be anything from 10 to 1e-6 nats, where a fixed number of decimals shows 0.000.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(decimals, 0)}f}" if decimals <= 2 * digits else f"{value:.{digits - 1}e}"

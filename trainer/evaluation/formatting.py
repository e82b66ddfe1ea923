"""Numbers as text."""

import math


def significant(value: float, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, such as 0.400, 0.00321, 25.3 or 4.10e-07.

    KL divergences lie between 10 and 1e-6 nats; with a fixed number of decimals, the small ones would show as 0.000.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(decimals, 0)}f}" if decimals <= 2 * digits else f"{value:.{digits - 1}e}"

"""Numbers with their nouns, for messages."""


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return a number and what it counts: `counted(1, "row")` is "1 row", `counted(2, "row")` is "2 rows".

    Args:
        number: how many there are.
        one: what follows the number 1: a noun, possibly with a verb.
        several: what follows other numbers; None adds an s.
    """
    return f"{number} {one if number == 1 else several or one + 's'}"

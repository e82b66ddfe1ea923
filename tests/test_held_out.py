import json

from hub_cards.tasks.held_out import main, right


def test_every_row_holds_what_its_scorer_needs(capsys):
    main(["words", "--split", "validation", "--samples", "5"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 5
    assert all(right(row["answer"], row) for row in rows)
    assert not any(right(other["answer"], row) for row, other in zip(rows, rows[1:], strict=False))


def test_a_function_is_right_when_it_parses():
    row = {"task": "code", "prompt": "def f(x):"}
    assert right("\n    return x", row) and not right("\n    return (x", row)

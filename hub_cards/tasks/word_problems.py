"""Grade-school word problems with worked steps: the task of the embedded words checkpoint.

    Tom has 23 apples, buys 14, doubles them. How many?
    first 14 + 23 = 37 then 37 * 2 = 74 so Tom has 74 apples.

Every problem has many right answers: connectives of one or two words and the order of the operands are drawn at
random. The tokens of a connective are therefore uncertain but depend on one another, and revealing them in parallel
can combine parts of different connectives.

A problem is a pure function of (split, seed, index). Its split is computed from its arithmetic alone (`split_of`), so
two splits never share a chain of operations, whatever the names, things and verbs.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

MAX_PROMPT_TOKENS = 32
MAX_ANSWER_TOKENS = 48  # end-of-text token included
MAX_VALUE = 99

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Zoe")
ITEMS = ("apples", "pens", "books", "coins", "shells", "cards", "stamps", "eggs", "nuts", "beads")
VERBS = {"+": ("buys", "finds", "wins", "gets"), "-": ("loses", "sells", "drops", "gives")}
MULTIPLES = {("*", 2): "doubles", ("*", 3): "triples", ("/", 2): "halves"}
CONTAINERS = ("bags", "boxes")

OPENINGS = {"first": 0.6, "at first": 0.4}
LINKS = {"then": 0.4, "next": 0.2, "and then": 0.2, "after that": 0.2}
CLOSINGS = {
    "so {name} has {value} {item}.": 0.5,
    "now {name} has {value} {item}.": 0.25,
    "that leaves {name} with {value} {item}.": 0.25,
}
SWAP_PROBABILITY = 0.4  # probability of writing "b + a" where the running total is a

STEP_COUNTS = {2: 0.2, 3: 0.25, 4: 0.25, 5: 0.2, 6: 0.1}
# Long solutions fit into an answer only if their numbers are small.
VALUE_LIMITS = {2: MAX_VALUE, 3: MAX_VALUE, 4: MAX_VALUE, 5: 40, 6: 18}

SPLITS = ("train", "validation", "test")
_BUCKETS = 16  # validation and test get one of them each

_TOKEN = re.compile(r"\d|[A-Za-z]+|[^\sA-Za-z\d]")
_STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@dataclass(frozen=True)
class Step:
    """One worked step `left operation right = result`."""

    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        """The result of the operation; division rounds down."""
        a, b = self.left, self.right
        return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[self.operation]


@dataclass(frozen=True)
class Problem:
    """A problem.

    Attributes:
        prompt: the question.
        answer: one of its right answers.
        name: the person the question is about.
        item: the kind of thing that is counted.
        steps: the steps of the solution, in order.
    """

    prompt: str
    answer: str
    name: str
    item: str
    steps: tuple[Step, ...]

    @property
    def value(self) -> int:
        """The number that the question asks for."""
        return self.steps[-1].result


@dataclass(frozen=True)
class Score:
    """Which parts of an answer are right.

    Attributes:
        number: whether the last number of the text is right.
        worked: whether every step, the name and the thing are right too.
    """

    number: bool
    worked: bool


def split_text(text: str) -> list[str]:
    """Split `text` into its tokens: words, single digits and signs."""
    return _TOKEN.findall(text)


def vocabulary() -> list[str]:
    """All tokens that problems and answers can contain, in a fixed order."""
    phrases = [*OPENINGS, *LINKS, *CLOSINGS, "has to of them How many?"]
    words = [w for phrase in phrases for w in split_text(re.sub(r"{\w+}", "", phrase))]
    verbs = [*VERBS["+"], *VERBS["-"], *MULTIPLES.values(), *CONTAINERS]
    return list(dict.fromkeys([*"0123456789", *"+-*/=,.?", *words, *verbs, *NAMES, *ITEMS]))


def split_of(start: int, steps: tuple[Step, ...]) -> str:
    """The split that a chain of operations belongs to."""
    chain = f"{start} " + " ".join(f"{s.left}{s.operation}{s.right}" for s in steps)
    return {0: "test", 1: "validation"}.get(zlib.crc32(chain.encode()) % _BUCKETS, "train")


def problem(split: str, index: int, seed: int = 0) -> Problem:
    """Draw one problem of a split.

    Args:
        split: one of `SPLITS`.
        index: number of the problem, at least 0.
        seed: seed of the sequence of problems.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    rng = random.Random(f"{split} {seed} {index}")
    n_steps = _draw(rng, STEP_COUNTS)
    while True:
        drawn = _draw_problem(rng, n_steps)
        if drawn is not None and drawn[0] == split:
            return drawn[1]


def statement(index: int, seed: int = 0) -> Problem:
    """Draw a problem without steps: "Tom has 23 apples. How many?" with the answer "so Tom has 23 apples.".

    An answer contains the name and the thing once. In full problems they contribute so little to the loss that a model
    trained from scratch does not learn to copy them (after 2000 steps every name was still equally likely). In a
    statement they make up nearly all of the loss.

    Args:
        index: number of the statement, at least 0.
        seed: seed of the sequence of statements.
    """
    rng = random.Random(f"statement {seed} {index}")
    name, item, value = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(2, MAX_VALUE)
    closing = rng.choice(list(CLOSINGS)).format(name=name, value=value, item=item)
    return Problem(f"{name} has {value} {item}. How many?", closing, name, item, ())


def problems(split: str, n: int | None = None, seed: int = 0) -> Iterator[Problem]:
    """Yield the first n problems of a split, or an endless sequence if n is None."""
    return (problem(split, i, seed) for i in (count() if n is None else range(n)))


def score(problem: Problem, text: str) -> Score:
    """Score the text that a model wrote for `problem`.

    `number` looks at the last number only. `worked` requires a complete answer in the form of the task: all steps in
    order (with the operands in either order if the operation commutes), a connective before each of them, and a
    closing sentence with the right name, number and thing.
    """
    numbers = re.findall(r"\d+", text)
    return Score(
        number=bool(numbers) and int(numbers[-1]) == problem.value,
        worked=_is_worked_answer(problem, " ".join(text.split())),
    )


def _is_worked_answer(problem: Problem, text: str) -> bool:
    written = list(_STEP.finditer(text))
    if len(written) != len(problem.steps):
        return False
    gaps = [text[a:b].strip() for a, b in _between([m.span() for m in written], len(text))]
    sides = {"name": problem.name, "item": problem.item, "value": problem.value}
    return (
        gaps[0] in OPENINGS
        and all(gap in LINKS for gap in gaps[1:-1])
        and gaps[-1] in [closing.format(**sides) for closing in CLOSINGS]
        and all(_same_step(m, step) for m, step in zip(written, problem.steps, strict=True))
    )


def _between(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    edges = [0, *(edge for span in spans for edge in span), length]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _same_step(match: re.Match, step: Step) -> bool:
    left, operation, right, result = match.groups()
    orders = [(step.left, step.right), (step.right, step.left)][: 2 if operation in "+*" else 1]
    numbers = [(str(a), str(b)) for a, b in orders]
    return (left, right) in numbers and operation == step.operation and result == str(step.result)


def _draw(rng: random.Random, weights: dict):
    return rng.choices(list(weights), list(weights.values()))[0]


def _draw_problem(rng: random.Random, n_steps: int) -> tuple[str, Problem] | None:
    """Try to draw a problem and its split; None if it exceeds the limits on values or lengths."""
    limit = VALUE_LIMITS[n_steps]
    start = value = rng.randint(2, limit)
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    clauses, steps = [f"{name} has {start} {item}"], []
    while len(steps) < n_steps:
        event = _draw_event(rng, value, limit, room=n_steps - len(steps), name=name)
        if event is None:
            return None
        clauses.append(event[0])
        steps += event[1]
        value = steps[-1].result
    prompt = ", ".join(clauses) + ". How many?"
    answer = _write_answer(rng, name, item, steps)
    if len(split_text(prompt)) > MAX_PROMPT_TOKENS or len(split_text(answer)) + 1 > MAX_ANSWER_TOKENS:
        return None
    return split_of(start, tuple(steps)), Problem(prompt, answer, name, item, tuple(steps))


def _draw_event(rng: random.Random, value: int, limit: int, room: int, name: str) -> tuple[str, list[Step]] | None:
    """Try to draw a clause of the prompt and its one or two steps; None if the drawn event is impossible."""
    kind = _draw(rng, {"+": 0.35, "-": 0.35, "multiple": 0.18, "containers": 0.12})
    if kind == "multiple":
        operation, factor = rng.choice(list(MULTIPLES))
        step = Step(value, operation, factor)
        exact = operation == "*" or value % factor == 0
        return (f"{MULTIPLES[operation, factor]} them", [step]) if exact and 0 < step.result <= limit else None
    if kind == "containers":
        n, size = rng.randint(2, 9), rng.randint(2, 9)
        if room < 2 or value + n * size > limit:
            return None
        clause = f"{rng.choice(VERBS['+'])} {n} {rng.choice(CONTAINERS)} of {size}"
        return clause, [Step(n, "*", size), Step(value, "+", n * size)]
    most = limit - value if kind == "+" else value - 1
    if most < 1:
        return None
    amount = rng.randint(1, min(most, rng.choice((9, 50))))
    verb = rng.choice(VERBS[kind])
    receiver = f" to {rng.choice([other for other in NAMES if other != name])}" if verb == "gives" else ""
    return f"{verb} {amount}{receiver}", [Step(value, kind, amount)]


def _write_answer(rng: random.Random, name: str, item: str, steps: list[Step]) -> str:
    parts = []
    for i, step in enumerate(steps):
        left, right = step.left, step.right
        if step.operation in "+*" and rng.random() < SWAP_PROBABILITY:
            left, right = right, left
        connective = _draw(rng, LINKS if i else OPENINGS)
        parts.append(f"{connective} {left} {step.operation} {right} = {step.result}")
    closing = _draw(rng, CLOSINGS).format(name=name, value=steps[-1].result, item=item)
    return " ".join([*parts, closing])

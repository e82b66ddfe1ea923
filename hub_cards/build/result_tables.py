"""Results as Markdown: one table for each measuring command, and where its figures come from."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mrp_trainer.evaluation.results import Result

Rows = Iterable[dict[str, Any]]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(_cell(cell) for cell in line) + "|" for line in lines)


def _cell(text: str) -> str:
    return text if text == "---" else f" {text} "


def demo_table(rows: Rows) -> str:
    """Every mode of `mrp demo`; the accuracy is left out where the task has none."""
    rows = list(rows)
    columns: dict[str, Callable[[dict], str]] = {
        "mode": lambda row: row["name"],
        "accuracy": lambda row: f"{row['accuracy']:.3f}",
        "tokens per forward": lambda row: f"{row['tokens_per_forward']:.2f}",
        "forwards": lambda row: f"{row['backbone_forwards']}",
        "time ratio": lambda row: f"{row['wall_clock_ratio']:.2f}",
        "same answer as static": lambda row: f"{row['identical']:.1%}",
    }
    if rows[0]["accuracy"] is None:
        del columns["accuracy"]
    return markdown(list(columns), [[show(row) for show in columns.values()] for row in rows])


def readme_table(demo: Result, decode: Result, modes: Sequence[str]) -> str:
    """The table of README: a few modes of `mrp demo`, with the speed of single rows from `mrp bench decode`."""
    by_mode = {row["name"]: row for row in demo.rows}
    alone = {row["mode"]: row["speedups"]["static"] for row in decode.rows if row["batch_size"] == 1}
    header = ["mode", "same answer as static", "accuracy", "backbone forwards"]
    header += ["speed, one row at a time", f"speed, {demo.settings['batch_size']} rows at a time"]
    rows = []
    for mode in modes:
        row = by_mode[mode]
        cells = [f"`{mode}`", f"{row['identical']:.1%}", f"{row['accuracy']:.3f}", f"{row['backbone_forwards']}"]
        rows.append([*cells, f"{alone[mode]:.2f}", f"{row['wall_clock_ratio']:.2f}"])
    return markdown(header, rows)


def decode_table(results: dict[str, Result]) -> str:
    """Speed-ups over static of `mrp bench decode`, one column for each of the results, by its name there."""
    sizes = {label: sorted({row["batch_size"] for row in result.rows}) for label, result in results.items()}
    header = ["mode", *(f"{label}, batch {_slashes(sizes[label], 'd')}" for label in results)]
    rows: dict[str, list[str]] = {}
    for label, result in results.items():
        speed = {(row["mode"], row["batch_size"]): row["speedups"]["static"] for row in result.rows}
        for mode in dict.fromkeys(mode for mode, _ in speed):
            rows.setdefault(mode, [mode]).append(_slashes(speed[mode, size] for size in sizes[label]))
    return markdown(header, rows.values())


def rules_table(result: Result) -> str:
    """A line for each rule of `mrp bench rules`; cells have the rule alone, then each kind of speculation under it.

    The accuracy is left out where the task has none.
    """
    rules = by_rule(result)
    static = rules["static"][0]
    kinds = [row["mode"].partition("+")[2] for row in rules["static"][1:]]
    columns: dict[str, Callable[[list[dict]], str]] = {
        _slashes(["rule: alone", *kinds], ""): lambda rows: rows[0]["rule"],
        "accuracy": lambda rows: f"{rows[0]['accuracy']:.3f}",
        "backbone forwards": lambda rows: _slashes((row["backbone_forwards"] for row in rows), "d"),
        "forwards saved over static": lambda rows: _slashes(forwards_saved(static, row) for row in rows),
        "same answer as the rule alone": lambda rows: f"{same_as_rule(rows):.1%}",
        "speed, one row at a time": lambda rows: _slashes(row["speed_alone"] for row in rows),
        f"speed, {result.settings['batch_size']} rows at a time": lambda rows: _slashes(
            row["speed_in_batch"] for row in rows
        ),
    }
    if static["accuracy"] is None:
        del columns["accuracy"]
    return markdown(list(columns), [[show(rows) for show in columns.values()] for rows in rules.values()])


def same_as_rule(rows: Iterable[dict]) -> float:
    """The share of the answers of speculation, among rows of `mrp bench rules`, that are those of the rule alone."""
    shares = [row["same_as_rule"] for row in rows if row["mode"] != row["rule"]]
    return sum(shares) / len(shares)


def by_rule(result: Result) -> dict[str, list[dict]]:
    """The rows of `mrp bench rules` by rule: the rule alone, then speculation under it."""
    rules: dict[str, list[dict]] = {}
    for row in result.rows:
        rules.setdefault(row["rule"], []).append(row)
    return rules


def forwards_saved(reference: dict, row: dict) -> float:
    """How many times fewer forwards of the backbone a row needs than a reference."""
    return reference["backbone_forwards"] / row["backbone_forwards"]


def shapes_table(results: Iterable[Result]) -> str:
    """What a step costs at each shape and batch size, and the speed-up that `mrp bench shapes` predicts."""
    groups: dict[tuple[str, int], list[dict]] = {}
    for result in results:
        for row in result.rows:
            groups.setdefault((row["shape"], row["batch_size"]), []).append(row)
    candidates = [row["candidates"] for row in next(iter(groups.values()))]
    looked_ahead = f"K = {_slashes(candidates, 'd')}"
    header = ["shape", "batch", "step", "head step / step", f"verification / step, {looked_ahead}"]
    rows = [
        [
            shape.upper(),
            f"{batch_size}",
            f"{rows[0]['step_seconds']:.2f} s",
            f"{rows[0]['head_step_ratio']:.1%}",
            _slashes(row["verification_ratio"] for row in rows),
            _slashes(row["speedup"] for row in rows),
        ]
        for (shape, batch_size), rows in groups.items()
    ]
    return markdown([*header, f"predicted speed-up, {looked_ahead}"], rows)


def loss_table(result: Result) -> str:
    """Time and memory of each implementation of the loss, relative to plain PyTorch, over all runs in the result."""
    rows = []
    for name in dict.fromkeys(row["name"] for row in result.rows):
        runs = [row for row in result.rows if row["name"] == name]
        cells = [span((run[field] for run in runs), form) for field, form in _LOSS_COLUMNS]
        rows.append([name, *cells, runs[0]["note"] or ""])
    return markdown(["implementation", "time / plain PyTorch", "memory / plain PyTorch", ""], rows)


_LOSS_COLUMNS = (("time_ratio", ".2f"), ("memory_ratio", ".3f"))


def train_table(results: Iterable[Result]) -> str:
    """A training step over the work that it cannot avoid."""
    rows = [
        [f"{result.settings['choice_weight']:g}", span((row["ratio"] for row in result.rows), ".2f")]
        for result in results
    ]
    return markdown(["`choice_weight`", "training step / unavoidable work"], rows)


def heads_table(results: dict[str, Result]) -> str:
    """Forwards saved by each head of `compare_heads`, the columns grouped by task and acceptance."""
    header, columns = ["head", "trained with"], []
    for task, result in results.items():
        modes = list(result.rows[0]["forwards_saved"])
        for acceptance, group in (("exact", [m for m in modes if m.count("-") == 1]), ("token", modes)):
            group = [mode for mode in group if acceptance == "exact" or mode.endswith("-token")]
            header.append(f"{task}, {acceptance}, K = {' / '.join(mode.split('-')[1] for mode in group)}")
            columns.append((result, group))
    saved = {id(result): {row["head"]: row["forwards_saved"] for row in result.rows} for result in results.values()}
    rows = [
        [
            row["head"],
            recipe_text(row["recipe"]),
            *(_slashes(saved[id(result)][row["head"]][mode] for mode in group) for result, group in columns),
        ]
        for row in next(iter(results.values())).rows
    ]
    return markdown(header, rows)


def recipe_text(recipe: dict | None) -> str:
    """A variant of `compare_heads` in words; empty for the heads that are not trained there."""
    if recipe is None:
        return ""
    if recipe["after"] is not None:
        start = f"continues `{recipe['after']}`"
    elif recipe["fresh"]:
        start = f"fresh, {recipe['layers']} layer{'s' if recipe['layers'] > 1 else ''}"
    else:
        start = "continues the common head"
    states = "states that decoding visits" if recipe["visited"] else "random states"
    residual = [] if recipe["residual"] else ["`mrp_residual: false`"]
    changes = [f"`{name}: {str(value).lower()}`" for name, value in recipe["changes"].items()]
    return ", ".join([start, states, *residual, *changes])


def eval_table(result: Result, others: dict[str, Result]) -> str:
    """Every mode of `mrp eval`; those of the other results follow, with what tells them apart after their name."""
    named = [(row["mode"], row) for row in result.rows]
    for label, other in others.items():
        named += [(f"{row['mode']}, {label}", row) for row in other.rows if row["mode"] != "static"]
    rows = [
        [
            name,
            f"{row['accuracy']:.3f} ± {row['standard_error']:.3f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['forwards']}",
            f"{row['identical']:.1%}",
        ]
        for name, row in named
    ]
    return markdown(["mode", "accuracy", "tokens per forward", "forwards", "same answer as static"], rows)


def claims_table(results: dict[str, Sequence[Result]]) -> str:
    """Every claim with its verdict, one column for each checkpoint."""
    judged = {label: {row["name"]: row for one in several for row in one.rows} for label, several in results.items()}
    rows = []
    for name in dict.fromkeys(name for found in judged.values() for name in found):
        row = next(found[name] for found in judged.values() if name in found)
        cells = [_verdict(found[name]) if name in found else "" for found in judged.values()]
        rows.append([f"{row['claim']} (`{name}`)", row["published"], *cells])
    return markdown(["claim", "published", *results], rows)


def _verdict(row: dict) -> str:
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"**{row['verdict']}**{reason}. {row['here']}".replace("|", "\\|")


def card_figures(demo: Result, build: Result) -> str:
    """What the card of an embedded checkpoint says about its figures."""
    steps = ", ".join(f"{row['step']} {row['seconds']:.0f} s" for row in build.rows)
    quality = build.figures.get("quality")
    parts = [
        f"Measured on {demo.settings['samples']} held-out samples, greedy, float32, on a "
        f"{demo.machine['device'].upper()} (threads: {demo.machine['threads']}), Python {demo.versions['python']}. "
        "Every forward of the backbone is counted. The time ratio is static's time over the mode's.",
        demo_table(demo.rows),
        *([quality] if quality else []),
        f"Built by `{build.command[-1]}`, seed {build.settings['seed']}: {steps}.",
    ]
    return "\n\n".join(parts)


def sources(results: dict[str, Result]) -> str:
    """The commands that measure some results, and the settings, machine, versions and date of each.

    Args:
        results: by the name of their file, without `.json`.
    """
    commands = dict.fromkeys(line for result in results.values() for line in result.command)
    places: dict[str, list[str]] = {}
    for file, result in results.items():
        settings = settings_text(result.settings)
        places.setdefault(_measured_on(result), []).append(f"- [{file}.json](results/{file}.json): {settings}")
    lines = ["```", *commands, "```"]
    for place, files in places.items():
        lines += ["", place, "", *files]
    return "\n".join(lines)


def settings_text(settings: dict[str, Any]) -> str:
    """The settings of a result in one line, without the machine, switches that are off and options without a value."""
    return ", ".join(
        f"{name.replace('_', ' ')}{'' if value is True else f' {_value(value)}'}"
        for name, value in settings.items()
        if name != "machine" and value is not None and value is not False and value != []
    )


def _measured_on(result: Result) -> str:
    """Date, machine and versions in a sentence."""
    machine, origin = result.machine, f", {result.origin}" if result.origin else ""
    threads = {None: "number of threads not recorded", 1: "1 thread"}.get(
        machine["threads"], f"{machine['threads']} threads"
    )
    model = machine["model"] or "model not recorded"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"Measured on {result.date}{origin}: {machine['device'].upper()}, {model}, {threads}; "
        f"{versions.replace('python', 'Python', 1)}."
    )


def _value(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def span(values: Iterable[float | None], form: str) -> str:
    """The smallest and the largest of some values as text; empty if there are none."""
    known = [value for value in values if value is not None]
    texts = [format(value, form) for value in (min(known), max(known))] if known else []
    return " to ".join(dict.fromkeys(texts))


def _slashes(values: Iterable[float | str | None], form: str = ".2f") -> str:
    return " / ".join("-" if value is None else format(value, form) for value in values)

"""Write every measured figure into the documents, from the result files in hub_cards/results/.

    python -m hub_cards.build.results             # writes what has changed
    python -m hub_cards.build.results --check     # names the documents that are out of date, exits with 1

hub_cards/RESULTS.md is written from results_template.md. README.md and the cards of the embedded checkpoints are
written by hand, except for blocks between `<!-- results:NAME -->` and `<!-- /results -->`.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path
from string import Template

from mrp_trainer.checkpoints.durable import write_text
from mrp_trainer.evaluation.claim_rules import CLAIMS
from mrp_trainer.evaluation.results import Result, read_result

from . import result_tables as tables

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).with_name("results_template.md")
README_MODES = ("static", "graph-8", "auto", "spec-8-token", "direct-2", "dynamic-0.9")
RULES_SHOWN = "graph-8"  # the speculation whose gain on top of each rule RESULTS.md quotes
BLOCK = re.compile(r"<!-- results:(\S+) -->\n.*?\n<!-- /results -->", re.DOTALL)
# What README says below its table; RESULTS.md has the long version.
README_CLOCK = """\
`graph-8` returns exactly what `static` returns, with $words_graph_8 times fewer backbone forwards. On this easy task
SDAR's own threshold decoding (`dynamic-0.9`), which needs no head, saves $words_dynamic times; but it is not lossless
($words_dynamic_same of its answers are the same). Where text leaves more choices, thresholds save little: on the
second embedded checkpoint, which completes Python functions, `dynamic-0.9` needs $code_dynamic times fewer forwards
than `static`, `graph-8` $code_graph_8 times.

**On a CPU, forwards saved are not time saved.** A forward that verifies eight states of a block costs a CPU more than
one over a single state: `graph-8` is $words_graph_8_1 times as fast as `static` with one row at a time,
$words_graph_8_16 times with 16 rows and $words_graph_8_100 times with $batch_size (Python functions: $code_graph_8_1,
$code_graph_8_16, $code_graph_8_100). `auto` drafts only as far as it pays: $words_auto_1, $words_auto_16 and
$words_auto_100 times ($code_auto_1, $code_auto_16, $code_auto_100). On random weights of the size of SDAR-4B, two CPU
threads take $verify_4b plain steps to verify four states of one row. A GPU reads small batches at the speed of its
memory, so verification should cost less there, but nothing here has been measured on a GPU yet."""


def load_results(folder: Path) -> dict[str, Result]:
    """All result files of a folder, by file name without `.json`."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


def block(name: str, text: str) -> str:
    """A block of a document that this module keeps up to date."""
    return f"<!-- results:{name} -->\n{text}\n<!-- /results -->"


def quoted(results: dict[str, Result]) -> dict[str, str]:
    """The single figures that the explanations quote, by the names that they have in the templates."""
    quotes = {}
    for task in ("words", "code"):
        demo = {row["name"]: row for row in results[f"demo-{task}"].rows}
        for mode in ("spec-4", "graph-8", "spec-4-self", "dynamic-0.9"):
            name = {"spec-4-self": "self", "dynamic-0.9": "dynamic"}.get(mode, mode.replace("-", "_"))
            saved = demo["static"]["backbone_forwards"] / demo[mode]["backbone_forwards"]
            quotes[f"{task}_{name}"] = f"{saved:.2f}"
        for name, mode in (("graph_8", "graph-8"), ("auto", "auto")):
            quotes[f"{task}_{name}_100"] = f"{demo[mode]['wall_clock_ratio']:.2f}"
            for row in results[f"bench-decode-{task}"].rows:
                if row["mode"] == mode:
                    quotes[f"{task}_{name}_{row['batch_size']}"] = f"{row['speedups']['static']:.2f}"
        quotes[f"{task}_dynamic_same"] = f"{demo['dynamic-0.9']['identical']:.0%}"
        quotes[f"{task}_direct_1_same"] = f"{demo['direct-1']['identical']:.1%}"
    quotes["batch_size"] = str(results["demo-words"].settings["batch_size"])
    return quotes | _quoted_rules(results) | _quoted_costs(results) | _quoted_builds(results)


def _quoted_rules(results: dict[str, Result]) -> dict[str, str]:
    """What speculation saves on top of each rule."""
    settings = results["rules-words"].settings
    quotes = {f"rules_{name}": str(settings[name]) for name in ("samples", "batch_size", "samples_alone")}
    for task in ("words", "code"):
        rules = tables.by_rule(results[f"rules-{task}"])
        static = rules["static"][0]
        modes = {row["mode"]: row for rows in rules.values() for row in rows}
        pairs = [(modes[rule], modes[f"{rule}+{RULES_SHOWN}"]) for rule in rules]
        quotes |= {
            f"rules_{task}_same": f"{tables.same_as_rule(modes.values()):.1%}",
            f"rules_{task}_saved": tables.span((tables.forwards_saved(*pair) for pair in pairs), ".2f"),
        }
        for rule in rules:
            name = re.sub(r"\W", "_", rule)
            quotes[f"rules_{task}_{name}"] = f"{tables.forwards_saved(static, modes[rule]):.2f}"
        for speed in ("speed_alone", "speed_in_batch"):
            ratios = (speculative[speed] / alone[speed] for alone, speculative in pairs)
            quotes[f"rules_{task}_{speed}"] = tables.span(ratios, ".2f")
    rows = results["rules-words"].rows
    accurate = [row for row in rows if row["accuracy"] >= rows[0]["accuracy"]]
    best = min(accurate, key=lambda row: row["backbone_forwards"])
    saved = tables.forwards_saved(rows[0], best)
    return quotes | {"rules_words_best": best["mode"], "rules_words_best_saved": f"{saved:.2f}"}


def _quoted_costs(results: dict[str, Result]) -> dict[str, str]:
    """Figures of the benchmarks."""
    loss = {}
    for row in results["bench-loss"].rows:
        loss.setdefault(row["name"], []).append(row)
    ours, compiled = loss["ours"][0]["memory_ratio"], loss["compile"][0]["memory_ratio"]
    shapes = results["bench-shapes-1.7b"]
    saved = [f"{row['forwards_saved']:.2f}" for row in shapes.rows if row["batch_size"] == 1]
    verified = [
        row["verification_ratio"]
        for row in results["bench-shapes-4b-8b"].rows
        if (row["shape"], row["batch_size"], row["candidates"]) == ("4b", 1, 4)
    ]
    return {
        "loss_memory": f"{1 / ours:.1f}",
        "loss_time": tables.span((row["time_ratio"] for row in loss["ours"]), ".2f"),
        "compile_time": tables.span((row["time_ratio"] for row in loss["compile"]), ".2f"),
        "compile_memory": f"{compiled / ours:.1f}",
        "train_ratio": tables.span((row["ratio"] for row in results["bench-train"].rows), ".2f"),
        "train_choice_ratio": tables.span((row["ratio"] for row in results["bench-train-choice"].rows), ".2f"),
        "rates": ", ".join(f"{rate:.2f}" for rate in shapes.figures["accepted"]),
        "rates_saved": ", ".join(saved),
        "verify_4b": f"{verified[0]:.2f}",
    }


def _quoted_builds(results: dict[str, Result]) -> dict[str, str]:
    """Figures of the embedded checkpoints' builds."""
    again = results["build-code-again"]
    minutes = {row["step"]: row["seconds"] / 60 for row in again.rows}
    return {
        "code_quality": results["build-code"].figures["quality"],
        "again_minutes": f"{sum(minutes.values()):.0f}",
        "again_steps": ", ".join(f"{step} {spent:.0f}" for step, spent in minutes.items()),
        "again_machine": again.machine["model"] or "CPU",
        "again_quality": again.figures["quality"],
        "again_saved": f"{again.figures['forwards_saved']['spec-4']:.2f}",
    }


def results_page(results: dict[str, Result]) -> str:
    """The text of hub_cards/RESULTS.md."""

    def some(*names: str) -> dict[str, Result]:
        return {name: results[name] for name in names}

    def by_task(stem: str) -> dict[str, Result]:
        return {task: results[f"{stem}-{task}"] for task in ("words", "code")}

    order = list(CLAIMS)
    claims = {
        task: sorted(
            (name for name in results if name.startswith(f"claims-{task}")),
            key=lambda name: order.index(results[name].rows[0]["name"]),
        )
        for task in ("words", "code")
    }
    fields = {
        "demo_words": tables.demo_table(results["demo-words"].rows),
        "demo_words_sources": tables.sources(some("demo-words")),
        "demo_code": tables.demo_table(results["demo-code"].rows),
        "demo_code_sources": tables.sources(some("demo-code")),
        "build_sources": tables.sources(some("build-words", "build-code", "build-code-again")),
        "decode": tables.decode_table(by_task("bench-decode")),
        "decode_sources": tables.sources(some("bench-decode-words", "bench-decode-code")),
        "rules_words": tables.rules_table(results["rules-words"]),
        "rules_code": tables.rules_table(results["rules-code"]),
        "rules_sources": tables.sources(some("rules-words", "rules-code")),
        "shapes": tables.shapes_table([results["bench-shapes-1.7b"], results["bench-shapes-4b-8b"]]),
        "shapes_sources": tables.sources(some("bench-shapes-1.7b", "bench-shapes-4b-8b")),
        "loss": tables.loss_table(results["bench-loss"]),
        "loss_sources": tables.sources(some("bench-loss")),
        "train": tables.train_table([results["bench-train"], results["bench-train-choice"]]),
        "train_sources": tables.sources(some("bench-train", "bench-train-choice")),
        "heads": tables.heads_table(by_task("compare-heads")),
        "heads_sources": tables.sources(some("compare-heads-words", "compare-heads-code")),
        "eval": tables.eval_table(results["eval-words"], {"fresh head": results["eval-words-fresh"]}),
        "eval_sources": tables.sources(some("eval-words", "eval-words-fresh")),
        "claims": tables.claims_table({task: [results[name] for name in names] for task, names in claims.items()}),
        "claims_sources": tables.sources(some(*claims["words"], *claims["code"])),
    }
    return _filled(Template(TEMPLATE.read_text(encoding="utf-8")).substitute(fields | quoted(results)))


def _filled(text: str) -> str:
    """The text with its paragraphs broken into lines of equal length; tables, lists, code and headings stay."""
    parts = text.rstrip("\n").split("\n\n")
    return "\n\n".join(part if part.startswith(("|", "#", "- ", "```")) else _paragraph(part) for part in parts) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 119, break_long_words=False, break_on_hyphens=False)


def blocks(results: dict[str, Result]) -> dict[str, str]:
    """The text of every block, by its name."""
    table = tables.readme_table(results["demo-words"], results["bench-decode-words"], README_MODES)
    cards = {f"card-{task}": card_block(results, task) for task in ("words", "code")}
    clock = _filled(Template(README_CLOCK).substitute(quoted(results))).rstrip()
    return {"demo-words": table, "clock": clock} | cards


def card_block(results: dict[str, Result], task: str) -> str:
    """The text of the block in the card of a task's checkpoint."""
    return tables.card_figures(results[f"demo-{task}"], results[f"build-{task}"])


def documents(root: Path) -> dict[Path, str]:
    """What README, RESULTS.md and the embedded checkpoints' cards should say, by path.

    Args:
        root: the folder of the repository.

    Raises:
        ValueError: if a result file is damaged, or a document has a block of an unknown name or lacks one.
    """
    results = load_results(root / "hub_cards" / "results")
    texts = blocks(results)
    cards = {"words": "sdar-tiny-mrp", "code": "sdar-tiny-code-mrp"}
    wanted = {root / "README.md": {"demo-words", "clock"}}
    wanted |= {root / "hub_cards" / folder / "README.md": {f"card-{task}"} for task, folder in cards.items()}
    written = {root / "hub_cards" / "RESULTS.md": results_page(results)}
    for path, names in wanted.items():
        present = path.read_text(encoding="utf-8")
        found = set(BLOCK.findall(present))
        if found != names:
            raise ValueError(f"{path} must have the blocks {', '.join(sorted(names))}, got {', '.join(sorted(found))}")
        written[path] = BLOCK.sub(lambda match: block(match[1], texts[match[1]]), present)
    return written


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the repository (default: this one)")
    options = parser.parse_args(arguments)
    stale = 0
    for path, text in documents(options.root).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        name = path.relative_to(options.root)
        if options.check:
            print(f"{name} does not show the figures of hub_cards/results; run python -m hub_cards.build.results")
        else:
            write_text(path, text)
            print(f"wrote {name}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""The `mrp` command. Each command is imported when it is asked for, so that `mrp --help` answers at once."""

import argparse
import difflib
import json
import os
import sys
from importlib import import_module

COMMANDS = {  # name: (module, function that takes the arguments, summary)
    "demo": (".demo", "main", "decode held-out problems with the embedded checkpoint, in every mode"),
    "convert": (".cli", "convert", "make a self-contained folder of an SDAR or SDAR-MRP checkpoint"),
    "train": ("..train", "main", "train a head as a YAML says"),
    "trajectories": (
        "..evaluation.trajectories",
        "main",
        "decode training prompts: data for a head on states that decoding visits",
    ),
    "generate": (".generate", "main", "decode prompts with a checkpoint"),
    "eval": (".eval", "main", "accuracy against tokens per forward, over a grid of modes"),
    "claims": (".claims", "main", "the paper's claims on a checkpoint, each with a figure and a verdict"),
    "verify": ("..evaluation.verify", "main", "check that speculative decoding is lossless, on your own prompts"),
    "bench": (".cli", "bench", "measure time and memory"),
    "push": (".cli", "push", "upload a folder to the Hub in one commit"),
}
BENCHMARKS = {
    "loss": ("..benchmarks.loss", "main", "the fused loss against PyTorch's ways to compute it"),
    "decode": ("..benchmarks.decode", "main", "tokens per second of every decoding mode, against three baselines"),
    "shapes": (
        "..benchmarks.shapes",
        "main",
        "what a step costs at real sizes; the speed-up to expect",
    ),
    "train": ("..benchmarks.train", "main", "tokens per second of a training step, against the work it cannot avoid"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names and return the exit status.

    0 when it worked, 2 for bad input (one line on stderr, no traceback), 130 after ^C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers too, when it is imported
    try:
        return _dispatch("mrp", COMMANDS, argv)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
        return 1
    except FileNotFoundError as error:
        print(f"mrp: error: {error.filename or error} is not there: check the name", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:  # bad input; anything else is a bug and shows its traceback
        print(f"mrp: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def bench(argv: list[str]) -> int:
    """`mrp bench WHAT`."""
    return _dispatch("mrp bench", BENCHMARKS, argv)


def _dispatch(program: str, commands: dict, argv: list[str]) -> int:
    """Run the command that the first argument names on the others, or show what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(program, commands))
        return 0
    name, *rest = argv
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"unknown command {name!r}{hint} {program} has: {', '.join(commands)}")
    module, function, _ = commands[name]
    return vars(import_module(module, __package__))[function](rest) or 0


def _overview(program: str, commands: dict) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {summary}" for name, (_, _, summary) in commands.items()]
    example = next(iter(commands))
    return "\n".join(
        [
            f"usage: {program} COMMAND [arguments]",
            "",
            "Multi-token Residual Prediction for block diffusion language models.",
            "",
            *lines,
            "",
            f"`{program} COMMAND --help` lists a command's arguments.",
            "",
            f"example:\n  {program} {example}",
        ]
    )


def command_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Parser of one command, with an example at the end of its help."""
    return argparse.ArgumentParser(
        prog=f"mrp {name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def convert(argv: list[str]):
    """`mrp convert SRC DST`."""
    parser = command_parser(
        "convert",
        "Write a self-contained remote-code folder (weights, code, tokenizer, generation defaults, card) from an\n"
        "SDAR, a published SDAR-MRP or one of our own checkpoints. Code of the source is never run.",
        "mrp convert JetLM/SDAR-1.7B-Chat sdar-1.7b-mrp --num-mrp-layers 3",
    )
    parser.add_argument("source", metavar="SRC", help="folder or Hub id")
    parser.add_argument("destination", metavar="DST", help="folder to write")
    parser.add_argument("--num-mrp-layers", type=int, help="layers of a fresh head, 0 for none (default: 3)")
    parser.add_argument("--head", help="folder or Hub id of a trained head to merge into the backbone")
    parser.add_argument(
        "--head-init",
        choices=("fresh", "backbone_layers"),
        default="fresh",
        help="how a fresh head's layers start (default: fresh)",
    )
    parser.add_argument(
        "--full-head",
        dest="mrp_residual",
        action="store_const",
        const=False,
        help="the head gives the full next distribution, no residual: say so for a published head of this kind",
    )
    parser.add_argument("--block-size", type=int, help="override the source's block size")
    parser.add_argument("--mask-token-id", type=int, help="override the source's mask token")
    parser.add_argument("--revision", help="revision of SRC on the Hub")
    parser.add_argument("--max-shard-size", default="5GB", help="largest weight file (default: 5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST when it exists")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args(argv))
    as_json = arguments.pop("json")

    from ..checkpoints.convert import convert as convert_checkpoint

    report = vars(convert_checkpoint(arguments.pop("source"), arguments.pop("destination"), **arguments))
    print(json.dumps(report) if as_json else "\n".join(f"{name:15} {value}" for name, value in report.items()))


def push(argv: list[str]):
    """`mrp push FOLDER REPO_ID`."""
    parser = command_parser(
        "push",
        "Upload a folder written by `mrp convert`, `save_pretrained` or `mrp train` in one commit.\n"
        "When anything fails on the way, the repository stays as it was.",
        "mrp push sdar-1.7b-mrp my-name/sdar-1.7b-mrp --private",
    )
    parser.add_argument("folder", metavar="MODEL", help="folder to upload")
    parser.add_argument("repo_id", metavar="REPO_ID", help="owner/name, made when missing")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--revision", help="branch (default: main)")
    parser.add_argument("--message", default="Upload the checkpoint", help="commit message")
    parser.add_argument("--json", action="store_true", help="print the commit's URL as JSON")
    arguments = vars(parser.parse_args(argv))
    as_json = arguments.pop("json")

    from ..checkpoints.push import push as push_folder

    url = push_folder(arguments.pop("folder"), arguments.pop("repo_id"), **arguments)
    print(json.dumps({"commit_url": url}) if as_json else url)


if __name__ == "__main__":
    sys.exit(main())

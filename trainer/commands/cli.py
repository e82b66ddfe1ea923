"""The `mrp` command: its commands, and how it reports errors.

A command's file imports torch and transformers inside its functions only, so that `mrp --help` answers at once.
"""

import os
import sys
from collections.abc import Sequence

import typer

from . import bench_decode, bench_loss, bench_rules, bench_shapes, bench_train, train
from .calibrate import calibrate
from .claims import claims
from .convert import convert
from .demo import demo
from .eval import EvalCommand, evaluate
from .generate import generate
from .parsing import Command, GenerateCommand
from .push import push
from .recording import MeasuringCommand
from .trajectories import trajectories
from .verify import verify

# Usage errors are click's; Typer brings its own copy of click or uses the package, depending on its version.
UsageError = typer.BadParameter.__base__

app = typer.Typer(
    help="Multi-token Residual Prediction for block diffusion language models.",
    epilog="\b\nExample:\n  mrp demo",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    rich_markup_mode=None,
    add_completion=False,
    invoke_without_command=True,
)
bench = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


def example(line: str) -> str:
    """The end of a command's help: an example on a line that is not wrapped."""
    return f"\b\nExample:\n  {line}"


app.command(cls=MeasuringCommand, epilog=example("mrp demo --model code"))(demo)
app.command(cls=Command, epilog=example("mrp convert JetLM/SDAR-1.7B-Chat sdar-1.7b-mrp --num-mrp-layers 3"))(convert)
app.command(
    cls=train.TrainCommand,
    options_metavar="[CONFIG.yaml] [--key value ...]",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=example("mrp train hub_cards/recipes/tiny.yaml --learning-rate 5e-4 --output-dir heads/tiny"),
)(train.train)
app.command(cls=Command, epilog=example("mrp trajectories sdar-1.7b --data chats.jsonl --out chats.parquet"))(
    trajectories
)
app.command(
    cls=GenerateCommand,
    options_metavar="[OPTIONS] [--generate-option value ...]",
    epilog=example('mrp generate words --raw --prompt "Tom has 23 apples, buys 14. How many?" --mrp-mode spec'),
)(generate)
app.command(
    "eval",
    cls=EvalCommand,
    options_metavar="[OPTIONS] [--generate-option value ...]",
    epilog=example(
        "mrp eval sdar-1.7b-mrp --data gsm8k.jsonl --scorer numeric --compare --thresholds 0.9,0.7 --output gsm8k"
    ),
)(evaluate)
app.command(cls=Command, epilog=example("mrp calibrate sdar-1.7b-mrp --data prompts.jsonl"))(calibrate)
app.command(
    cls=MeasuringCommand,
    epilog=example("mrp claims sdar-1.7b-mrp --data gsm8k.jsonl --scorer numeric --full-head heads/full"),
)(claims)
app.command(cls=Command, epilog=example("mrp verify sdar-1.7b-mrp --prompt-file prompts.txt --dtype float32"))(verify)
app.add_typer(bench, name="bench", help="Measure time and memory.", epilog=example("mrp bench decode words"))
app.command(cls=Command, epilog=example("mrp push sdar-1.7b-mrp my-name/sdar-1.7b-mrp --private"))(push)
bench.command(
    cls=MeasuringCommand,
    epilog=example("mrp bench loss --rows 8192 --hidden-size 2560 --dtype bfloat16 --device cuda"),
)(bench_loss.loss)
bench.command(
    cls=MeasuringCommand,
    epilog=example("mrp bench decode words --modes spec-4 direct-3 plain-sdar --batch-sizes 1 16"),
)(bench_decode.decode)
bench.command(
    cls=MeasuringCommand,
    epilog=example("mrp bench rules words --rules dynamic-0.9 sequential --speculation graph-8"),
)(bench_rules.rules)
bench.command(
    cls=MeasuringCommand,
    epilog=example("mrp bench shapes --shapes 4b --batch-sizes 1 8 --candidates 1 2 4 8 --accepted accepted.json"),
)(bench_shapes.shapes)
bench.command(
    cls=MeasuringCommand,
    epilog=example("mrp bench train --shape 1.7b --layers 4 --rows 2 --sequence-length 1024"),
)(bench_train.train)


@app.callback()
@bench.callback()
def show_help(context: typer.Context) -> None:
    """Show the help when no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: the words after `mrp`; None reads those of the process.

    Returns:
        0 when it worked, 1 when a check failed or whoever read the output has gone, 2 for bad input (one line on
        stderr, no traceback), 130 after ^C. Anything else is a bug and raises.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers too, when it is imported
    try:
        with typer.main.get_command(app).make_context("mrp", words) as context:
            return context.command.invoke(context) or 0
    except typer.Exit as stop:  # after --help
        return stop.exit_code
    except UsageError as error:
        return _fail(error.format_message(), hint=f"see {error.ctx.command_path} --help" if error.ctx else None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 1
    except FileNotFoundError as error:
        return _fail(f"{error.filename or error} does not exist")
    except (ValueError, OSError) as error:
        named = isinstance(error, OSError) and error.filename is not None  # a full disk, a missing permission ...
        return _fail(f"{error.filename}: {error.strerror}" if named else str(error))
    except KeyboardInterrupt:
        return 130


def _fail(message: str, hint: str | None = None) -> int:
    line = f"mrp: error: {' '.join(message.split())}"
    print(f"{line.removesuffix('.')}; {hint}" if hint else line, file=sys.stderr)
    return 2

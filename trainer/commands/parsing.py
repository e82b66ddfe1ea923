"""How the words of a command line reach Typer: lists, spelling of options, options of `generate`, the word none."""

from collections import deque
from typing import Any, ClassVar

import typer
import yaml
from typer.core import TyperCommand, TyperOption

NONE = ("none", "None")


class Command(TyperCommand):
    """A command that accepts its options in kebab-case and snake_case, and its lists as `a,b` or as `a b`.

    - `--batch_size 4` is `--batch-size 4`.
    - An option that may be repeated is a list: `--modes a b`, `--modes a,b` and `--modes a --modes b` are the same. A
      list takes the words up to the next option, or up to a word that itself holds a comma, so that MODEL may follow
      `--modes a,b`. `--prompt` is repeated too, but its text is never split.
    - `--head none` leaves an option unset whose default is None.
    """

    #: options that may be given without a value, and the value that they have then
    value_if_bare: ClassVar[dict[str, str]] = {}
    #: whether options that the command does not have are set aside for `generate`, in `context.args`
    takes_generate_options: ClassVar[bool] = False

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Rewrite the words for Typer's own parser, which then checks and converts them."""
        own, others = self._split_words(ctx, args)
        if not self.takes_generate_options:
            return super().parse_args(ctx, [*others, *own])  # Typer's error names options similar to the unknown one
        super().parse_args(ctx, own)
        ctx.args = others
        return ctx.args

    def _split_words(self, ctx, args: list[str]) -> tuple[list[str], list[str]]:
        """Separate the words of the command's own options and arguments from those of options it does not have."""
        options = {
            name: parameter
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        words, own, others = deque(args), [], []
        while words:
            word = words.popleft()
            if word == "--":  # what follows are arguments, whatever they look like
                own += [word, *words]
                break
            if not word.startswith("--"):
                own.append(word)
                continue
            name, equals, value = word.partition("=")
            kebab = name.replace("_", "-")
            if kebab not in options:
                others.append(word)
                if not equals and words and not words[0].startswith("--"):
                    others.append(words.popleft())
            elif options[kebab].is_flag:
                own.append(kebab + equals + value)
            else:
                values = [value] if equals else self._values_after(ctx, kebab, options[kebab], words)
                own += self._spelled_out(kebab, options[kebab], values)
        return own, others

    def _values_after(self, ctx, name: str, option, words: deque[str]) -> list[str]:
        """Take the value, or the values of a list, that follow an option."""
        if not words or words[0].startswith("--"):
            if name in self.value_if_bare:
                return [self.value_if_bare[name]]
            raise typer.BadParameter("a value must follow it", ctx, param_hint=name)
        values = [words.popleft()]
        while is_list(option) and words and not words[0].startswith("-") and "," not in values[-1].rstrip(","):
            values.append(words.popleft())
        return values

    def _spelled_out(self, name: str, option, values: list[str]) -> list[str]:
        """Write `--name value` for each value of a list; nothing for `--name none` where None is the default."""
        if option.default is None and not option.multiple and values[0] in NONE:
            return []
        if is_list(option):
            values = [part for value in values for part in value.split(",") if part]
        return [word for value in values for word in (name, value)]


class GenerateCommand(Command):
    """A command after whose own options any option of `generate` may follow: `context.args` holds their words."""

    takes_generate_options = True


def is_list(option: TyperOption) -> bool:
    """Whether the values of a Typer option are a list to be split at commas."""
    return option.multiple and option.name != "prompt"


def _value_of(name: str, text: str) -> Any:
    """Return the value of an option of `generate`: YAML, with what may stand for a list of one."""
    value = None if text in NONE else yaml.safe_load(text)
    if name == "stop_strings" and value is not None and not isinstance(value, list):
        return text  # also where it looks like a number
    return [value] if name == "suppress_tokens" and isinstance(value, int) else value


def generate_options(words: list[str]) -> dict:
    """Read options of `generate`, such as {"mrp_steps": 4} from ["--mrp-steps", "4"].

    Args:
        words: `--name value` or `--name=value`, in kebab-case or snake_case. Values are read as YAML; the words none
            and None mean None.

    Raises:
        ValueError: when an option has no value, or a value is not valid YAML.
    """
    options = {}
    pairs = iter(words)
    for word in pairs:
        name, equals, value = word.removeprefix("--").partition("=")
        value = value if equals else next(pairs, None)
        if value is None or value.startswith("--"):
            raise ValueError(f"--{name} has no value: options of generate are given as --name value")
        try:
            options[name.replace("-", "_")] = _value_of(name.replace("-", "_"), value)
        except yaml.YAMLError as error:
            raise ValueError(f"--{name}: {value!r} is not valid YAML") from error
    return options

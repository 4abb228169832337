"""The command line of a server: an argparse parser with the flags of config/loading/flags.py."""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from config.errors import ConfigError
from config.loading.flags import FILE_FLAGS, FLAGS, GROUPS, Flag
from config.loading.values import Given, joined, nearest
from config.loading.vllm_flags import ACCEPTED, SHORT_FORMS, absence, short_forms
from config.loading.vllm_spelling import Spelled, ambiguity, respelled, with_dashes

_FLAG = re.compile(r"--?[a-zA-Z]")
_MISSING = "the following arguments are required: "
_OF_NUMBER = re.compile(r"^argument --([\w-]+)(?:/--[\w-]+)*: is ")
_NO_VALUE = re.compile(r"^argument (\S+): expected (?:one|at least one|\d+) arguments?$")
_WRONG_TYPE = re.compile(r"^argument (\S+): invalid (\w+) value: (.*)$")
_TYPES = {"int": "a whole number such as 8", "float": "a number such as 0.5", "Path": "a path"}
_SAMPLES = {"N": "8", "X": "0.5"}
_DEFAULT_OF = {
    f"--{name}": flag.shown_default
    for flag in FLAGS
    if flag.kind in (int, float) and isinstance(flag.default, int | float)
    for name in flag.names
}
"""Flag -> its default, for numbers."""
EPILOG = (
    "Every flag is also a variable (--max-num-seqs: GAUDISERVE_MAX_NUM_SEQS) and a key of the "
    "YAML file. A flag takes precedence over a variable, a variable over the file. "
    "docs/coming-from-vllm.md lists vLLM's flags."
)
KindNames = Mapping[str, Callable[[], Sequence[str]]]
"""Flag -> function that returns the names of its kinds, called only when a name is given or
shown."""
NO_KINDS: KindNames = MappingProxyType({})
_UNTITLED = ("positional arguments", "options")
"""Titles of argparse's default groups, which are not groups of settings."""
SUMMARY_WIDTH = 100
MAX_SUMMARY_CHOICES = 20
"""Maximum characters of the choices of a flag in `--help` of `serve`."""
COMMON = (
    *("config", "model", "dtype", "max-model-len", "cache-dir", "device", "quantization"),
    *("enforce-eager", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"),
    *("gpu-memory-utilization", "kv-cache-memory-bytes", "kv-cache-dtype", "enable-prefix-caching"),
    *("max-num-seqs", "max-num-batched-tokens", "speculative-config", "bucketing-strategy"),
    *("enable-lora", "lora-modules", "host", "port", "api-key", "api-server-count"),
    *("max-queued-requests", "enable-page", "served-model-name", "chat-template"),
    *("tool-call-parser", "reasoning-parser", "limit-mm-per-prompt", "log-level"),
)
"""Keys of the flags that `--help` of `serve` shows."""
MAX_CHOICES = 72
"""Maximum characters of the choices beside a flag in the help."""
METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


class FlagParser(argparse.ArgumentParser):
    """Argument parser that raises a ConfigError for invalid flags instead of exiting."""

    def __init__(self, *, is_raw: bool = False, **facts: Any) -> None:
        """`is_raw`: keep the line breaks of description and epilog. `facts`: arguments of
        ArgumentParser. `usage` should show the command, its arguments, its required flags, and
        `[flags]`."""
        kind = _RawFormatter if is_raw else _Formatter
        facts.setdefault("formatter_class", partial(kind, max_help_position=34, width=100))
        super().__init__(**facts, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this text")
        self.absence: Callable[[str], str] = lambda name: ""
        """Returns why a vLLM flag is not supported by this command; empty for other names."""
        self.spell: Callable[[Iterable[str], Collection[str]], Spelled] = _as_given
        """Converts vLLM's spellings to flags that the parser knows."""
        self.server_groups: list[argparse._ArgumentGroup] = []
        """Groups that `--help` omits and `--help-all` shows last."""
        self.hint_of_words = ""
        """End of the error about a word that is neither a flag nor an argument."""
        self.common: tuple[str, ...] = ()
        """Keys of the flags that `--help` shows, in a line each; empty: it shows all flags that are
        not in `server_groups`."""
        self.kinds = NO_KINDS
        self.examples: tuple[str, ...] = ()
        """Example command lines that the help shows below the description."""

    def format_help(self) -> str:
        if self.common:
            return self._help_of_common()
        return self._help_of(lambda group: group not in self.server_groups)

    def format_all_help(self) -> str:
        """The text of `--help-all`."""
        return self._help_of(lambda group: True)

    def print_all_help(self) -> NoReturn:
        """Print the text of `--help-all`, and exit."""
        sys.stdout.write(self.format_all_help())
        self.exit()

    def _show_kinds(self) -> None:
        """Add the names of kinds to the choices in the help. Choices that do not fit in a line are
        listed in the text of the flag, which is wrapped."""
        for name, names in self.kinds.items():
            action = self._option_string_actions[f"--{name}"]
            given = str(action.metavar)
            # A flag without choices (--emulator-faults) has too many names for the help.
            if given.startswith("{"):
                choices = (*given.strip("{}").split(","), *names())
                action.metavar = _choices(dict.fromkeys(choices))
        for action in self._actions:
            given = str(action.metavar)
            if given.startswith("{") and len(given) > MAX_CHOICES:
                action.metavar = "NAME"
                if action.help != argparse.SUPPRESS:
                    words = given.strip("{}").replace(",", ", ")
                    action.help = f"{action.help}; NAME is one of {words}"

    def format_help_about(self, word: str) -> str:
        """The text of `--help=WORD`: the groups with a word that begins with `word` in their title,
        the flags with `word` in their name, and the flag whose short form is `word`. Raises
        ConfigError if nothing matches."""
        self._show_kinds()
        formatter, wanted = self._get_formatter(), _name_of(word.replace("_", "-").lstrip("-"))
        long_form = SHORT_FORMS.get(f"-{wanted}")
        num_found = 0
        for group in self._action_groups:
            is_whole = f"-{wanted}" in f"-{_name_of(str(group.title))}"
            found = [
                action
                for action in group._group_actions
                if action.help != argparse.SUPPRESS
                and (
                    is_whole
                    or long_form in action.option_strings
                    or any(wanted in name for name in action.option_strings)
                )
            ]
            if found:
                num_found += len(found)
                formatter.start_section(group.title)
                formatter.add_arguments(found)
                formatter.end_section()
        if not num_found:
            titles = ", ".join(self._titles())
            raise ConfigError(f"no flag of {self.prog} has {word!r} in its name; groups: {titles}")
        return formatter.format_help()

    def _titles(self) -> list[str]:
        return [str(group.title) for group in self._action_groups if group.title not in _UNTITLED]

    def _help_of_common(self) -> str:
        self._show_kinds()
        names = textwrap.fill(", ".join(map(_name_of, self._titles())), 96, break_on_hyphens=False)
        parts = [
            f"usage: {self.usage}",
            str(self.description).rstrip(),
            "groups of flags; --help=GROUP shows only this group:\n" + textwrap.indent(names, "  "),
            "examples:" + "".join(f"\n  {line}" for line in self.examples),
        ]
        parts.append(f"options:\n{'  -h, --help':<33} Show this text")
        for group in self._action_groups:
            flags = [action for action in group._group_actions if _key_of(action) in self.common]
            if flags:
                parts.append("\n".join([f"{group.title}:", *map(_summary, flags)]))
        return "\n\n".join([*parts, textwrap.fill(str(self.epilog), SUMMARY_WIDTH) + "\n"])

    def _help_of(self, is_shown: Callable[[argparse._ArgumentGroup], bool]) -> str:
        self._show_kinds()
        groups = self._action_groups
        ordered = sorted(groups, key=lambda group: group in self.server_groups)
        self._action_groups = list(filter(is_shown, ordered))
        try:
            usage, description, flags = super().format_help().split("\n\n", 2)
            parts = [usage, description]
            if self.examples:
                lines = "".join(f"\n  {line}" for line in self.examples)
                parts.append(f"examples:{lines}")
            return "\n\n".join([*parts, flags])
        finally:
            self._action_groups = groups

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            words = message.removeprefix(_MISSING).split(", ")
            raise ConfigError(f"`{self.prog}` needs {' and '.join(map(self._usage_of, words))}")
        if missing := _NO_VALUE.match(message):
            raise ConfigError(self._needs_value(missing[1].rpartition("/")[2]))
        if wrong := _WRONG_TYPE.match(message):
            name, kind, word = wrong.groups()
            allowed = _TYPES.get(kind, f"a {kind}")
            raise ConfigError(f"{name.rpartition('/')[2]} is {word}, it must be {allowed}")
        raise ConfigError(_OF_NUMBER.sub(r"--\1 is ", message))

    def _needs_value(self, name: str) -> str:
        action = self._option_string_actions[name]
        self._show_kinds()
        shown = str(action.metavar or ("" if action.choices else action.dest.upper()))
        choices = [str(choice) for choice in action.choices or ()] or (
            shown.strip("{}").split(",") if shown.startswith("{") else []
        )
        example = choices[0] if choices else _DEFAULT_OF.get(name, _SAMPLES.get(shown, ""))
        words = f", such as {name} {example}" if example else f": {name} {shown}"
        return f"{name} needs a value{words}"

    def _usage_of(self, name: str) -> str:
        flag = name.rpartition("/")[2]
        if flag not in self._option_string_actions:
            return flag
        return f"{flag} {self._option_string_actions[flag].metavar}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"is {value!r}, it must be one of {allowed}")

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like parse_args, but a single ConfigError reports all unknown flags, with similar
        flags."""
        arguments, problems = self.parse_known(argv)
        if problems:
            raise ConfigError(joined(problems))
        return arguments

    def parse_known(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """(arguments, problems with unknown words and with values of switches). `arguments.notes`:
        the notes of Spelled. Raises ConfigError for other invalid flags; --help exits."""
        for word in argv:
            if word == "--help=all":
                self.print_all_help()
            if word.startswith("--help="):
                sys.stdout.write(self.format_help_about(word.partition("=")[2]))
                self.exit()
        words, problems = [], []
        spelled = self.spell(argv, self._option_string_actions)
        for word in spelled.words:
            if problem := self._value_of_switch(word):
                problems.append(problem)
            else:
                words.append(word)
        arguments, left = self.parse_known_args(words)
        arguments.notes = spelled.notes
        unknown = [word for word in left if _FLAG.match(word)]
        problems += [self._unknown(word.partition("=")[0]) for word in unknown]
        if left and not unknown:
            problems.append(f"{self.prog} takes no argument {left[0]!r}{self.hint_of_words}")
        return arguments, problems

    def _unknown(self, name: str) -> str:
        if reason := self.absence(name):
            return f"{name} is not supported: {reason}"
        known = [word for word in self._option_string_actions if word.startswith("--")]
        short = name[1:]
        if SHORT_FORMS.get(short) in known:
            hint = f"; did you mean {short} ({SHORT_FORMS[short]})?"
            return f"{name} is not a flag of {self.prog}{hint}"
        return (
            f"{name} is not a flag of {self.prog}{ambiguity(name, known) or nearest(name, known)}"
        )

    def _value_of_switch(self, word: str) -> str:
        # argparse's own message wrongly says that the value is ignored.
        name, equals, _ = word.partition("=")
        action = self._option_string_actions.get(name)
        if not equals or action is None or action.nargs != 0:
            return ""
        off = f"--no-{name[2:]}"
        hint = f"; {off} turns it off" if off in self._option_string_actions else ""
        return f"{name} takes no value, and {word} sets a value{hint}"


def _as_given(words: Iterable[str], known: Collection[str]) -> Spelled:
    return Spelled(list(map(with_dashes, words)), [])


def number(
    kind: type[int] | type[float] = float,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = sys.float_info.max,
) -> Callable[[str], float]:
    """An argparse `type` for numbers in a range; by default any finite number."""
    allowed = "a whole number" if kind is int else "a number"
    if minimum > -math.inf:
        allowed = f"at least {minimum:g}"
    if above > -math.inf:
        allowed = f"above {above:g}"
    if maximum < sys.float_info.max:
        allowed = f"between {minimum:g} and {maximum:g}"

    def read(word: str) -> float:
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if not (minimum <= value <= maximum and value > above):
            raise argparse.ArgumentTypeError(f"is {word}, it must be {allowed}")
        return value

    return read


class _Record(argparse.Action):
    """Appends the flag and its value to `given`, in the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or "").lstrip("-")
        source = f"flag {option_string}"
        if self.nargs == 0:
            on = self.const
            given = Given(name if on else name.removeprefix("no-"), on, source)
        else:
            is_single = isinstance(values, list) and len(values) == 1
            given = Given(name, values[0] if is_single else values, source)
        namespace.given = [*getattr(namespace, "given", []), given]


class _Formatter(argparse.HelpFormatter):
    """Help formatter that shows the short forms of flags, which the parser itself never reads."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = super()._format_action_invocation(action)
        if not isinstance(action, _Record):
            return shown
        value = "" if action.nargs == 0 else f" {action.metavar}"
        return "".join(f"{short}{value}, " for short in short_forms(action.option_strings)) + shown


class _RawFormatter(_Formatter, argparse.RawDescriptionHelpFormatter):
    """A _Formatter that keeps the line breaks of description and epilog."""


def _key_of(action: argparse.Action) -> str:
    """The flag without dashes that `--help` shows; empty for other names of a flag."""
    if action.help == argparse.SUPPRESS or not action.option_strings:
        return ""
    return action.option_strings[-1].lstrip("-")


def _summary(action: argparse.Action) -> str:
    """A line with the flag and the first words of its help."""
    metavar = str(action.metavar) if action.nargs != 0 else ""
    words = "|".join(metavar.strip("{}").split(",")) if metavar.startswith("{") else metavar
    if len(words) > MAX_SUMMARY_CHOICES:
        words = "NAME"
    text, _, default = str(action.help).replace("%%", "%").rpartition(" [")
    first = re.split(r"[;:(]", text or str(action.help))[0].strip()
    name = f"  {action.option_strings[-1]} {words}".rstrip()
    end = f" [{default.split(';')[0].rstrip(']')}]" if text else ""
    room = SUMMARY_WIDTH - len(end) - 34
    return f"{name:<33} {textwrap.shorten(first, room, placeholder=' ...')}{end}"


def _name_of(title: str) -> str:
    """The name of a group for `--help=NAME`."""
    return title.lower().replace(" ", "-")


class _HelpAll(argparse.Action):
    """Prints the help of all flags, including the server flags, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        assert isinstance(parser, FlagParser)
        parser.print_all_help()


def server_parser(
    prog: str,
    description: str,
    *,
    has_model: bool = True,
    no_model: str = "the demo model",
    kinds: KindNames = NO_KINDS,
    has_own_flags: bool = False,
) -> FlagParser:
    """Parser of all server flags, in groups, with defaults in the help. `no_model`: model that the
    command uses if none is named, for the help. `load` rejects unknown kinds for the flags in
    `kinds`. `has_own_flags`: the caller adds its own groups; `--help` shows only these groups,
    `--help-all` shows all groups. Without own flags, `--help` shows the flags of COMMON."""
    parser = FlagParser(
        prog=prog,
        usage=f"{prog} {'[MODEL] ' if has_model else ''}[flags]",
        description=description,
        epilog=EPILOG,
    )
    parser.absence, parser.spell, parser.kinds = absence, respelled, kinds
    parser.set_defaults(given=[], model=None)
    if has_model:
        parser.hint_of_words = (
            ": it takes one model; --enable-lora --lora-modules NAME=PATH adds adapters"
        )
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help=f"Model folder, .gguf file or Hugging Face id; none: {no_model}",
        )
    else:
        parser.hint_of_words = ": --model sets a model, which this command does not need"
    general = parser.add_argument_group("Files")
    for name, help_text in FILE_FLAGS.items():
        general.add_argument(f"--{name}", metavar="FILE", action=_Record, dest=name, help=help_text)
    groups = {group: parser.add_argument_group(group) for group in GROUPS}
    for flag in FLAGS:
        _add(groups[flag.setting.group], flag)
    for name, accepted in ACCEPTED.items():
        if accepted.is_switch:
            _add_switch(parser, name, argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", action=_Record, help=argparse.SUPPRESS)
    text = "Show the flags of the server as well" if has_own_flags else argparse.SUPPRESS
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
    parser.common = () if has_own_flags else COMMON
    if has_own_flags:
        parser.server_groups = [
            group for group in parser._action_groups if group.title not in _UNTITLED
        ]
        parser.epilog = (
            "The flags of `gaudiserve serve` are accepted as well: --help-all shows them. " + EPILOG
        )
    return parser


def _choices(words: Iterable[str]) -> str:
    joined_words = ",".join(words)
    return f"{{{joined_words}}}" if joined_words else ""


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    setting = flag.setting
    off = f"; --no-{flag.key} turns it off" if flag.default is True else ""
    default = f" [{flag.shown_default}{off}]" if flag.shown_default else ""
    text = f"{setting.help}{default}".replace("%", "%%")
    shown_value = _choices(setting.choices) or setting.metavar or METAVARS[flag.kind]
    for name in flag.names:
        shown = text if name == flag.key else argparse.SUPPRESS
        if name in flag.all_switches:
            _add_switch(group, name, shown)
        else:
            nargs = "+" if setting.takes_several else None
            group.add_argument(
                f"--{name}", action=_Record, nargs=nargs, metavar=shown_value, help=shown
            )


def _add_switch(group: argparse._ActionsContainer, name: str, help_text: str) -> None:
    group.add_argument(f"--{name}", action=_Record, nargs=0, const=True, help=help_text)
    group.add_argument(f"--no-{name}", action=_Record, nargs=0, const=False, help=argparse.SUPPRESS)

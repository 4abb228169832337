"""The command line of a server: an argparse parser with the flags of config/loading/flags.py."""

import argparse
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from config.errors import ConfigError
from config.loading.flags import FILE_FLAGS, FLAGS, GROUPS, Flag
from config.loading.values import Given, joined, nearest
from config.loading.vllm_flags import ACCEPTED, SHORT_FORMS, absence

_FLAG = re.compile(r"--?[a-zA-Z]")
_SHORT = re.compile(r"(-[a-zA-Z-]+)((?:[=.].*)?)$", re.DOTALL)
_OF_NUMBER = re.compile(r"^argument --([\w-]+)(?:/--[\w-]+)*: is ")
_SWITCHES = {"true": "--NAME", "false": "--no-NAME"}
METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process, for all wrong flags together."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self.absence: Callable[[str], str] = lambda name: ""
        """Why a flag of vLLM's command of this name is not in this version."""
        self.spell: Callable[[list[str]], Iterable[str]] = iter
        """Rewrites vLLM's spellings of flags."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(_OF_NUMBER.sub(r"\1 is ", message))

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like parse_args, but one error names every wrong flag, with its near spelling."""
        arguments, problems = self.parse_known(argv)
        if problems:
            raise ConfigError(joined(problems))
        return arguments

    def parse_known(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The arguments, and what is wrong with the others."""
        words, problems = [], []
        for word in self.spell([_with_dashes(word) for word in argv]):
            if problem := self._value_of_switch(word):
                problems.append(problem)
            else:
                words.append(word)
        arguments, left = self.parse_known_args(words)
        unknown = [word for word in left if _FLAG.match(word)]
        problems += [self._unknown(word.partition("=")[0]) for word in unknown]
        if left and not unknown:
            problems.append(f"{self.prog} takes no argument {left[0]!r}")
        return arguments, problems

    def _unknown(self, name: str) -> str:
        if reason := self.absence(name):
            return f"{name} is not in this version: {reason}"
        known = [word for word in self._option_string_actions if word.startswith("--")]
        return f"{name} is no flag of {self.prog}{nearest(name, known)}"

    def _value_of_switch(self, word: str) -> str:
        # argparse's own message would say that the value is ignored, which is wrong.
        name, equals, _ = word.partition("=")
        action = self._option_string_actions.get(name)
        if not equals or action is None or action.nargs != 0:
            return ""
        off = f"--no-{name[2:]}"
        hint = f"; {off} turns it off" if off in self._option_string_actions else ""
        return f"{name} takes no value, {word} gives one{hint}"


def number(
    kind: type[int] | type[float] = float,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = sys.float_info.max,
) -> Callable[[str], float]:
    """A type of `add_argument`: a number in a range, by default any finite one."""
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


def _with_dashes(word: str) -> str:
    """--max_model_len and --max-model-len are the same flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _vllm_spelling(words: list[str]) -> Iterator[str]:
    """`words` with long forms, without the values that vLLM allows behind a switch, and without
    what turns off that which is not here."""
    rest = deque(map(_long_form, words))
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        accepted = ACCEPTED.get(name[2:])
        if accepted is not None and accepted.is_switch:
            if not equals and rest and rest[0].lower() in _SWITCHES:
                value = rest.popleft()
            word = _SWITCHES.get(value.lower(), word).replace("NAME", name[2:])
        # --no-enable-lora asks for nothing.
        if not (word.startswith("--no-") and absence(word)):
            yield word


def _long_form(word: str) -> str:
    # Like a compiler's, -O may have its value directly behind it.
    match = _SHORT.match(re.sub(r"^-O(?=\d)", "-O=", word))
    if match is None or match[1] not in SHORT_FORMS:
        return word
    return SHORT_FORMS[match[1]] + match[2]


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
            is_one = isinstance(values, list) and len(values) == 1
            given = Given(name, values[0] if is_one else values, source)
        namespace.given = [*getattr(namespace, "given", []), given]


def server_parser(prog: str, description: str, *, has_model: bool = True) -> Parser:
    """A parser of all flags of a server, in groups, with defaults in the help."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} {'[MODEL] ' if has_model else ''}[flags]",
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
        epilog="Every flag is also a variable (--max-num-seqs: GAUDISERVE_MAX_NUM_SEQS) and a key "
        "of the YAML file. A flag wins over a variable, a variable over the file. "
        "docs/coming-from-vllm.md lists vLLM's flags.",
    )
    parser.absence, parser.spell = absence, _vllm_spelling
    parser.set_defaults(given=[], model=None)
    if has_model:
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="Model folder, .gguf file or Hugging Face id; none: the demo model",
        )
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
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    setting = flag.setting
    off = f"; --no-{flag.key} turns it off" if flag.default is True else ""
    text = f"{setting.help} [{flag.shown_default}{off}]".replace("%", "%%")
    choices = "{" + ",".join(setting.choices) + "}" if setting.choices else METAVARS[flag.kind]
    for name in flag.names:
        shown = text if name == flag.key else argparse.SUPPRESS
        if name in flag.all_switches:
            _add_switch(group, name, shown)
        else:
            nargs = "+" if setting.takes_several else None
            group.add_argument(
                f"--{name}", action=_Record, nargs=nargs, metavar=choices, help=shown
            )


def _add_switch(group: argparse._ActionsContainer, name: str, help_text: str) -> None:
    group.add_argument(f"--{name}", action=_Record, nargs=0, const=True, help=help_text)
    group.add_argument(f"--no-{name}", action=_Record, nargs=0, const=False, help=argparse.SUPPRESS)

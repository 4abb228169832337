"""The command line of a server: an argparse parser with the flags of config/loading/flags.py."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from config.errors import ConfigError
from config.loading.flags import ACCEPTED, FILE_FLAGS, FLAGS, GROUPS, Flag
from config.loading.values import Given, nearest

METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process, with the flag most similar to a wrong
    one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like parse_args, but the error for an unknown flag names the most similar one."""
        words = [_with_dashes(word) for word in argv]
        for word in words:
            self._refuse_value_of_switch(word)
        arguments, left = self.parse_known_args(words)
        unknown = next((word for word in left if word.startswith("-")), None)
        if unknown is not None:
            name = unknown.partition("=")[0]
            known = [word for word in self._option_string_actions if word.startswith("--")]
            raise ConfigError(f"{name} is no flag of {self.prog}{nearest(name, known)}")
        if left:
            raise ConfigError(f"{self.prog} takes no argument {left[0]!r}")
        return arguments

    def _refuse_value_of_switch(self, word: str) -> None:
        # argparse's own message would say that the value is ignored, which is wrong.
        name, equals, _ = word.partition("=")
        action = self._option_string_actions.get(name)
        if equals and action is not None and action.nargs == 0:
            off = f"--no-{name[2:]}"
            hint = f"; {off} turns it off" if off in self._option_string_actions else ""
            raise ConfigError(f"{name} takes no value, {word} gives one{hint}")


def _with_dashes(word: str) -> str:
    """--max_model_len and --max-model-len are the same flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


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
            given = Given(name, values, source)
        namespace.given = [*getattr(namespace, "given", []), given]


def server_parser(prog: str, description: str) -> Parser:
    """A parser of all flags of a server, in groups, with defaults in the help."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [flags]",
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
        epilog="Every flag is also a variable (--max-num-seqs: GAUDISERVE_MAX_NUM_SEQS) and a key "
        "of the YAML file. A flag wins over a variable, a variable over the file.",
    )
    parser.set_defaults(given=[])
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
    for name, (value, _) in ACCEPTED.items():
        if value in ("true", "false"):
            _add_switch(parser, [name], argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", action=_Record, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    setting = flag.setting
    off = f"; --no-{flag.key} turns it off" if flag.default is True else ""
    text = f"{setting.help} [{flag.shown_default}{off}]".replace("%", "%%")
    switches = [name for name in flag.all_switches if name not in (flag.key, *setting.aliases)]
    if flag.kind is bool:
        _add_switch(group, [flag.key], text)
        if setting.aliases:
            _add_switch(group, list(setting.aliases), argparse.SUPPRESS)
    else:
        choices = "{" + ",".join(setting.choices) + "}" if setting.choices else METAVARS[flag.kind]
        group.add_argument(f"--{flag.key}", action=_Record, metavar=choices, help=text)
        for alias in setting.aliases:
            group.add_argument(f"--{alias}", action=_Record, help=argparse.SUPPRESS)
    for name in switches:
        _add_switch(group, [name], argparse.SUPPRESS)


def _add_switch(group: argparse._ActionsContainer, names: list[str], help_text: str) -> None:
    for name in names:
        group.add_argument(f"--{name}", action=_Record, nargs=0, const=True, help=help_text)
        group.add_argument(
            f"--no-{name}", action=_Record, nargs=0, const=False, help=argparse.SUPPRESS
        )

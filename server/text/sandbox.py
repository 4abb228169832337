"""Jinja sandbox for untrusted templates, with the rendering settings of transformers.

A template that runs too long can be stopped, but not during a single interpreter operation that is
slow or fills the memory. The sandbox therefore bounds or refuses operations that produce a long
text from a short text, comparisons and hashes of nested values, searches of quadratic time, and
arithmetic on large integers.
"""

import json
import re
from collections.abc import Callable, Iterable, Sized
from datetime import datetime
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_batch, do_int, do_round, make_attrgetter, make_multi_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace, pass_environment

T = TypeVar("T")
Function = Callable[..., Any]
"""A filter or a test."""

MAX_EXPONENT = 1_000
MAX_BITS = 10_000
MAX_JSON_INDENT = 16
"""Maximum indent, and maximum characters of a separator."""
MAX_COMPARED_ITEMS = 2**18
"""Maximum items of a value that is compared or hashed: a few milliseconds. Shared items count each
time."""
MAX_WRITTEN_ITEMS = 2**17
"""Maximum items, including keys, of a value that is converted to text: the conversion cannot be
interrupted. Shared items count each time."""
MAX_DEPTH = 1_000
"""Maximum depth of a value that is compared, hashed or written: Python does not bound the recursion
of the hash of a tuple."""
MAX_SEARCH_STEPS = 2**27
"""Maximum product of the lengths of a text and of the argument of a method that takes quadratic
time: a few tenths of a second."""

_WIDE_FORMAT = re.compile(r"\d{5}|\*")
_WIDE_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")
_QUADRATIC_METHODS = (
    *("strip", "lstrip", "rstrip"),
    *("rfind", "rindex", "rsplit", "rpartition"),
)
_REFUSED_METHODS = ("translate", "encode", "to_bytes", "striptags", "isdisjoint")
"""Methods that hash unchecked values, take quadratic time, return long texts, or return bytes,
whose methods are not bounded."""
_WIDE_FILTERS = ("do_center", "do_indent", "do_wordwrap")
_TEXT_FILTERS = (
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "safe"),
    *("string", "title", "trim", "truncate", "upper", "wordcount", "wordwrap"),
)
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict, MappingProxyType, Namespace, *_VIEWS)


class TooMuchText(TemplateError):
    """A template exceeds the maximum number of characters."""

    def __init__(self, max_characters: int) -> None:
        super().__init__(f"it makes more than {max_characters} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment in which templates can only read their variables and write at most
    `max_characters`. A violation raises a TemplateError."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "//"])

    def __init__(self, max_characters: int, now: Callable[[], datetime] = datetime.now) -> None:
        self._max_characters = max_characters
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._sized,
            # Constant folding at compile time would have no time limit.
            optimized=False,
        )
        self.code_generator_class = _Bounded
        self.concat = self._concat  # type: ignore[method-assign] # declared a method
        make_dict = _Dict(self.comparable)
        self.globals = {
            "range": self.globals["range"],
            "dict": make_dict,
            "namespace": lambda *args, **kwargs: _Namespace(make_dict(*args, **kwargs)),
            "raise_exception": lambda message: self._raise_exception(message),
            "strftime_now": lambda form: now().strftime(self._checked_date_format(form)),
        }
        for name in _TEXT_FILTERS:
            self.filters[name] = self._written(self.filters[name])
        self.filters["batch"] = self._batch
        self.filters["int"] = self._int
        self.filters["join"] = self._join
        self.filters["replace"] = self._replace
        self.filters["round"] = _round
        self.filters["sum"] = self._sum
        self.filters["tojson"] = self.to_json
        for name in ("sort", "unique", "groupby", "min", "max"):
            self.filters[name] = self._compared_items(self.filters[name])
        self.filters["dictsort"] = self._compared(self.filters["dictsort"])
        # jinja's own tests use `%`, which formats if its left operand is a text.
        self.tests["odd"] = lambda value: bool(self._modulo(value, 2) == 1)
        self.tests["even"] = lambda value: bool(self._modulo(value, 2) == 0)
        self.tests["divisibleby"] = lambda value, num: bool(self._modulo(value, num) == 0)
        for name in list(self.tests):
            self.tests[name] = self._compared(self.tests[name])  # type: ignore[arg-type] # functions
        # striptags takes quadratic time; urlencode writes each item of a generator.
        for name in ("pprint", "urlize", "xmlattr", "striptags", "urlencode"):
            del self.filters[name]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an arithmetic operator of a template within the limits."""
        if operator == "**" and (abs(left) > MAX_EXPONENT or abs(right) > MAX_EXPONENT):
            raise TemplateError(f"{left} ** {right} is too large; {MAX_EXPONENT} is the limit")
        if operator == "*":
            self._check_product(left, right)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self._check(len(left) + len(right))
        elif operator == "-" and (isinstance(left, _CONTAINERS) or isinstance(right, _VIEWS)):
            # The difference of a view of a dict hashes the items of the other operand.
            raise TemplateError("`-` takes numbers")
        elif operator == "//":
            _check_bits(left, right)
        elif operator == "%":
            return self._modulo(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `callee` for a template; arguments of methods of values are checked first."""
        if not hasattr(callee, "__self__"):
            return super().call(context, callee, *args, **kwargs)
        owner = callee.__self__
        # Jinja passes the variables of loops and blocks, which methods of values do not take.
        for name in ("_loop_vars", "_block_vars"):
            kwargs.pop(name, None)
        method = callee.__name__
        if isinstance(owner, type) or method in _REFUSED_METHODS:
            raise SecurityError(f"the method {method} is not allowed in chat templates")
        if isinstance(owner, str):
            if method == "replace":
                return self._replace(owner, *args, **kwargs)
            if method == "join":
                return self._join(self, args[0], owner)
            if method in _WIDE_METHODS:
                self._check_wide(owner, (*args, *kwargs.values()))
            elif method in _QUADRATIC_METHODS:
                self._check_search(owner, *args, *kwargs.values())
        for value in (owner, *args, *kwargs.values()):
            self.comparable(value)
        return super().call(context, callee, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map` within the limits; None for other values."""
        if not super().wrap_str_format(value):
            return None
        form: Any = value.__self__
        is_map = value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            formatter = (
                _EscapeFormatter(self, escape=form.escape)
                if hasattr(form, "__html__")
                else _Formatter(self)
            )
            if is_map:
                (kwargs,), args = args, ()
            text: str = type(form)(formatter.vformat(form, args, kwargs))
            return text

        return formatted

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The value of `obj[argument]` in a template."""
        return super().getitem(obj, self.comparable(argument))

    def to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """`value` as JSON without Jinja's HTML escapes."""
        if separators and not (
            len(separators) == 2
            and all(isinstance(text, str) and len(text) <= MAX_JSON_INDENT for text in separators)
        ):
            raise TemplateError(
                f"tojson: separators must be two texts of at most {MAX_JSON_INDENT} characters"
            )
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(self._sized(value))
        if not isinstance(indent, int) or indent > MAX_JSON_INDENT:
            raise TemplateError(
                f"tojson: indent is {indent!r}, it must be an integer of at most {MAX_JSON_INDENT}"
            )
        return self._concat(encoder.iterencode(self._sized(value)))

    def _raise_exception(self, message: object) -> NoReturn:
        raise TemplateError(str(self._sized(message)))

    def _concat(self, parts: Iterable[str]) -> str:
        """Join `parts` within the limit. Jinja uses this for its output and for `~`."""
        joined: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            self._check(length)
            joined.append(part)
        return "".join(joined)

    def _check(self, length: int) -> None:
        if length > self._max_characters:
            raise TooMuchText(self._max_characters)

    def _check_product(self, left: object, right: object) -> None:
        _check_bits(left, right)
        for many, count in ((left, right), (right, left)):
            if isinstance(many, Sized) and isinstance(count, int):
                self._check(len(many) * count)

    def _check_wide(self, value: object, args: Iterable[object]) -> None:
        """Check an upper bound on the length of the result: length of `value` plus 1, times the sum
        of the arguments (integers, and lengths of strings) plus 1."""
        units = sum(
            max(arg, 0) if isinstance(arg, int) else len(arg)
            for arg in args
            if isinstance(arg, int | str)
        )
        length = len(value) if isinstance(value, Sized) else 1
        self._check((length + 1) * (units + 1))

    def _check_search(self, text: str, *args: object) -> None:
        for sought in args:
            if isinstance(sought, str) and len(text) * len(sought) > MAX_SEARCH_STEPS:
                raise TemplateError(
                    f"a search takes more than {MAX_SEARCH_STEPS} steps: {len(sought)} characters "
                    f"in a text of {len(text)}"
                )

    def _checked_date_format(self, form: str) -> str:
        # Python's strftime gives up at 256 times the length of the format.
        self._check(256 * len(form))
        return form

    def _modulo(self, left: Any, right: object) -> Any:
        """The value of `left % right`, which is a format if `left` is a text."""
        _check_bits(left, right)
        if isinstance(left, str):
            parts = right if isinstance(right, tuple) else (right,)
            self._check_printf(left, parts)
        return left % right

    def _check_printf(self, form: str, parts: Iterable[object]) -> None:
        _check_format(form)
        length = len(form) * (1 + sum(len(str(self._sized(part))) for part in parts))
        # Each number of the format can be a width or a precision.
        self._check(length + sum(map(int, re.findall(r"\d+", form))))

    def _sized(self, value: T) -> T:
        """Return `value`. Raises TemplateError for a container whose text may be too long; nested
        lists may share elements many times."""
        return self._walk(value, MAX_WRITTEN_ITEMS, "writes")

    def comparable(self, value: T) -> T:
        """Return `value` if it can be compared and hashed quickly; otherwise raise TemplateError. A
        comparison visits shared items repeatedly, in a single interpreter operation."""
        return self._walk(value, MAX_COMPARED_ITEMS, "compares")

    def _walk(self, value: T, max_items: int, verb: str) -> T:
        """Return `value` if it has at most `max_items` items and MAX_DEPTH levels, and if its text
        is not too long."""
        if not isinstance(value, _CONTAINERS):
            return value
        level: list[object] = [value]
        count = length = depth = 0
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise TemplateError(
                    f"it {verb} a value that is nested more than {MAX_DEPTH} levels deep"
                )
            parts: list[object] = []
            for item in level:
                count += 1
                if isinstance(item, str):
                    length += len(item)
                elif isinstance(item, int):
                    # A lower bound of the number of digits.
                    length += item.bit_length() // 4
                elif isinstance(item, (dict, MappingProxyType)):
                    parts += item
                    parts += item.values()
                elif isinstance(item, Namespace):
                    parts.append(item._Namespace__attrs)
                elif isinstance(item, _CONTAINERS):
                    parts.extend(item)
                # An item has at least one character.
                self._check(count + len(parts) + length)
                if count + len(parts) > max_items:
                    raise TemplateError(f"it {verb} a value of more than {max_items} items")
            level = parts
        return value

    def _compared(self, wrapped: Function) -> Function:

        @wraps(wrapped)
        def compared(*args: object, **kwargs: object) -> object:
            for value in (*args, *kwargs.values()):
                self.comparable(value)
            return wrapped(*args, **kwargs)

        return compared

    def _compared_items(self, wrapped: Function) -> Function:
        """Wrap a filter that compares or hashes the items of its first argument, or an attribute of
        each item."""
        # Only `sort` splits its attribute at commas.
        getter = make_multi_attrgetter if wrapped.__name__ == "do_sort" else make_attrgetter
        parameters = signature(wrapped)

        @wraps(wrapped)
        def compared(
            environment: Sandbox, value: Iterable[object], *args: object, **kwargs: object
        ) -> object:
            items = list(value)
            given = parameters.bind(environment, items, *args, **kwargs).arguments
            keys = map(getter(environment, given.get("attribute")), items)
            self.comparable([*keys, given.get("default")])
            return wrapped(environment, items, *args, **kwargs)

        return compared

    def _written(self, wrapped: Function) -> Function:
        num_passed = 1 if hasattr(wrapped, "jinja_pass_arg") else 0

        @wraps(wrapped)
        def written(*args: object, **kwargs: object) -> object:
            passed, (value, *rest) = args[:num_passed], args[num_passed:]
            # A text that is marked as safe stays marked.
            text = value if isinstance(value, str) else str(self._sized(value))
            options = (*rest, *kwargs.values())
            if wrapped.__name__ == "do_format":
                self._check_printf(text, options)
            elif wrapped.__name__ == "do_trim":
                self._check_search(text, *options)
            elif wrapped.__name__ in _WIDE_FILTERS:
                self._check_wide(text, options)
            # `indent` would extend a list in place.
            given = text if isinstance(value, _CONTAINERS) else value
            return wrapped(*passed, given, *rest, **kwargs)

        return written

    def _batch(
        self, value: Iterable[object], linecount: int, fill_with: object = None
    ) -> Iterable[list[object]]:
        self._check_wide(value, (linecount, fill_with))
        return do_batch(value, linecount, fill_with)

    def _int(self, value: object, default: int = 0, base: int = 10) -> int:
        if isinstance(value, str) and len(value) > MAX_BITS:
            raise TemplateError(f"a number of more than {MAX_BITS} characters is too large")
        return do_int(value, default, base)

    def _sum(
        self, iterable: Iterable[object], attribute: str | int | None = None, start: Any = 0
    ) -> Any:
        for value in map(make_attrgetter(self, attribute), iterable):
            # Sums of lists copy the list for each item.
            if isinstance(start, Sized) and isinstance(value, Sized):
                self._check(len(start) + len(value))
            start = start + value
        return start

    @staticmethod
    @pass_environment
    def _join(
        environment: "Sandbox",
        value: Iterable[object],
        d: object = "",
        attribute: str | None = None,
    ) -> str:
        if attribute is not None:
            value = map(make_attrgetter(environment, attribute), value)
        between = str(environment._sized(d))
        joined: list[str] = []
        length = 0
        for part in value:
            joined.append(str(environment._sized(part)))
            length += len(joined[-1]) + len(between)
            environment._check(length)
        return between.join(joined)

    def _replace(self, value: object, old: object, new: object, count: int | None = None) -> str:
        text, old, new = (str(self._sized(part)) for part in (value, old, new))
        self._check(len(text) + text.count(old) * max(0, len(new) - len(old)))
        return text.replace(old, new, -1 if count is None else count)


class _Bounded(CodeGenerator):
    """Jinja's code generator, except that `~` compiles to the environment's concatenation, and that
    operands of comparisons and keys of dict literals are checked."""

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._visit_compared(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._visit_compared(node.expr, frame)

    def visit_Pair(self, node: nodes.Pair, frame: Frame) -> None:
        self._visit_compared(node.key, frame)
        self.write(": ")
        self.visit(node.value, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self.visit(item, frame)
            self.write(", ")
        self.write("}")

    def _visit_compared(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.comparable(")
        self.visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat([str(environment.finalize(part)) for part in (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")])")


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training, and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared without ClassVar in the base class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A separate scope, like a call block in transformers.
        return nodes.Scope(body).set_lineno(line)


class _Formatter(SandboxedFormatter):
    _env: Sandbox

    def convert_field(self, value: object, conversion: Any) -> object:
        return super().convert_field(self._env._sized(value), conversion)

    def format_field(self, value: object, format_spec: str) -> str:
        _check_format(format_spec)
        text: str = super().format_field(self._env._sized(value), format_spec)
        self._length = getattr(self, "_length", 0) + len(text)
        self._env._check(self._length)
        return text


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """`_Formatter` for formats that are marked as safe."""


class _Namespace(Namespace):
    """Namespace that rejects attributes with a leading underscore, which could reach Python
    internals."""

    def __init__(self, attributes: dict[object, object]) -> None:
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` in templates: a constructor whose only method is `fromkeys`. It checks the keys."""

    def __init__(self, checked_key: Callable[[object], object]) -> None:
        self._checked_key = checked_key

    def __call__(self, pairs: Any = (), /, **kwargs: object) -> dict[object, object]:
        if isinstance(pairs, dict):
            pairs = pairs.items()
        return {self._checked_key(key): value for key, value in pairs} | kwargs

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        return {self._checked_key(key): value for key in keys}


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attributes may not begin with an underscore: {name!r}")


def _check_format(form: str) -> None:
    if _WIDE_FORMAT.search(form):
        raise TemplateError(
            "a format must not have a width or precision of five digits or more, or *"
        )


def _check_bits(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateError(f"integers of {bits} bits are too large; {MAX_BITS} is the limit")


def _round(value: object, precision: int = 0, method: Any = "common") -> float:
    if not isinstance(value, int | float):
        raise TemplateError(f"round takes a number, not {type(value).__name__}")
    if abs(precision) > MAX_EXPONENT:
        raise TemplateError(f"round: the precision is {precision}; {MAX_EXPONENT} is the limit")
    return do_round(value, precision, method)

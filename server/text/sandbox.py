"""Jinja sandbox for untrusted templates, with the rendering settings of transformers.

It bounds every operation that can produce a long text from a short text, and every comparison and
hash of nested values. A template that runs too long can be stopped, but not during a single
interpreter operation that is slow or fills the memory.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

MAX_EXPONENT = 1_000
MAX_BITS = 10_000
MAX_JSON_INDENT = 16
MAX_COMPARED_ITEMS = 2**18
"""Maximum items of a value that is compared or hashed: a few milliseconds. Shared items count each
time."""
MAX_WRITTEN_ITEMS = 2**17
"""Maximum items, including keys, of a value that is converted to text: the conversion cannot be
interrupted. Shared items count each time."""

_WIDE_FORMAT = re.compile(r"\d{5}|\*")
_WIDE_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join")


class TooMuchText(TemplateError):
    """A template exceeds the maximum number of characters."""

    def __init__(self, max_characters: int) -> None:
        super().__init__(f"it makes more than {max_characters} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment in which templates can only read their variables and write at most
    `max_characters`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

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
        self.globals = {
            "range": self.globals["range"],
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }
        for name in ("center", "indent", "wordwrap", "format", "batch", "string"):
            self.filters[name] = self._bounded(self.filters[name])
        self.filters["join"] = self._join
        self.filters["replace"] = self._replace
        self.filters["tojson"] = self.to_json
        for name in ("sort", "unique", "groupby", "min", "max", "dictsort"):
            self.filters[name] = self._compared(self.filters[name])
        for name in list(self.tests):
            self.tests[name] = self._compared(self.tests[name])  # type: ignore[arg-type] # functions
        # striptags takes quadratic time.
        for name in ("pprint", "urlize", "xmlattr", "striptags"):
            del self.filters[name]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate `+`, `*`, `**` or `%` of a template within the limits."""
        if operator == "**" and (abs(left) > MAX_EXPONENT or abs(right) > MAX_EXPONENT):
            raise TemplateError(f"{left} ** {right} is too large; {MAX_EXPONENT} is the limit")
        if operator == "*":
            self._check_product(left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            parts = right if isinstance(right, tuple) else (right,)
            self._check(len(left) * (1 + sum(len(str(self._sized(part))) for part in parts)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, callee: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `callee` for a template; arguments of methods that can produce long texts are
        checked first."""
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, str):
            method = callee.__name__
            if method == "replace":
                return self._replace(owner, *args)
            if method == "join":
                return self._join(self, args[0], owner)
            if method == "translate":
                raise SecurityError("str.translate is not allowed in chat templates")
            if method in _WIDE_METHODS:
                self._check_wide(owner, args)
        elif isinstance(owner, (list, tuple, dict)):
            for value in (owner, *args):
                self.comparable(value)
        return super().call(context, callee, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Value of `obj.attribute` in a template, or of `obj["attribute"]` if there is no such
        attribute."""
        if isinstance(obj, str) and attribute in ("format", "format_map"):
            _check_format(obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The value of `obj[argument]` in a template."""
        self.comparable(argument)
        if isinstance(obj, str) and argument in ("format", "format_map"):
            _check_format(obj)
        return super().getitem(obj, argument)

    def to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """`value` as JSON without Jinja's HTML escapes."""
        if indent is not None and (not isinstance(indent, int) or indent > MAX_JSON_INDENT):
            raise TemplateError(
                f"tojson: indent is {indent!r}, it must be an integer of at most {MAX_JSON_INDENT}"
            )
        return json.dumps(
            self._sized(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

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

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateError(f"a product of more than {MAX_BITS} bits is too large")
            return
        for many, count in ((left, right), (right, left)):
            if hasattr(many, "__len__") and isinstance(count, int):
                self._check(len(many) * count)

    def _check_wide(self, value: Any, args: Iterable[Any]) -> None:
        """Check an upper bound on the length of the result: length of `value` plus 1, times the sum
        of the arguments (integers, and lengths of strings) plus 1."""
        units = sum(
            arg if isinstance(arg, int) else len(arg) for arg in args if isinstance(arg, int | str)
        )
        length = len(value) if hasattr(value, "__len__") else 1
        self._check((length + 1) * (units + 1))

    def _sized(self, value: Any) -> Any:
        """Return `value` if its text cannot be too long; otherwise raise TemplateError. Nested
        lists may share elements many times."""
        if not isinstance(value, (list, tuple, dict)):
            return value
        stack: list[Any] = [value]
        count = length = 0
        while stack:
            item = stack.pop()
            count += 1
            if count > MAX_WRITTEN_ITEMS:
                raise TemplateError(f"it writes a value of more than {MAX_WRITTEN_ITEMS} items")
            if isinstance(item, dict):
                stack += item
                stack += item.values()
            elif isinstance(item, (list, tuple)):
                stack += item
            elif isinstance(item, str):
                length += len(item)
            self._check(count + length)
        return value

    def comparable(self, value: Any) -> Any:
        """Return `value` if it can be compared and hashed quickly; otherwise raise TemplateError. A
        comparison visits shared items repeatedly, in a single interpreter operation."""
        if isinstance(value, (list, tuple, dict)):
            stack: list[Any] = [value]
            count = 0
            while stack:
                item = stack.pop()
                count += 1
                if count > MAX_COMPARED_ITEMS:
                    raise TemplateError(
                        f"it compares a value of more than {MAX_COMPARED_ITEMS} items"
                    )
                if isinstance(item, dict):
                    stack += item
                    stack += item.values()
                elif isinstance(item, (list, tuple)):
                    stack += item
        return value

    def _compared(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter or test that compares or hashes its arguments, to check the arguments
        first."""

        @wraps(wrapped)
        def compared(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                self.comparable(value)
            return wrapped(*args, **kwargs)

        return compared

    def _bounded(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *rest = args[1:] if hasattr(wrapped, "jinja_pass_arg") else args
            if isinstance(value, str) and wrapped.__name__ == "do_format":
                _check_format(value)
                rest = [str(self._sized(part)) for part in (*rest, *kwargs.values())]
            self._sized(value)
            self._check_wide(value, (*rest, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded

    @staticmethod
    @pass_environment
    def _join(
        environment: "Sandbox", value: Iterable[Any], d: Any = "", attribute: str | None = None
    ) -> str:
        if attribute is not None:
            value = map(make_attrgetter(environment, attribute), value)
        between = str(d)
        joined: list[str] = []
        length = 0
        for part in value:
            joined.append(str(environment._sized(part)))
            length += len(joined[-1]) + len(between)
            environment._check(length)
        return between.join(joined)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(self._sized(value)), str(old), str(new)
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


class _Namespace(Namespace):
    """Namespace that rejects attributes with a leading underscore, which could reach Python
    internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` in templates, without the other attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attributes may not begin with an underscore: {name!r}")


def _check_format(form: str) -> None:
    if _WIDE_FORMAT.search(form):
        raise TemplateError(
            "a format must not have a width or precision of five digits or more, or *"
        )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))

"""Strategy `file`: shapes from a text file in the format of vLLM's Gaudi plug-in."""

import ast
import itertools
import math

from config.errors import ConfigError
from config.whole_files import read_limited
from hpu.bucketing.cost import Shapes
from hpu.protocol import Shape

MAX_RANGE_VALUES = 10_000
MAX_FILE_BYTES = 2**20


def read_bucket_file(path: str) -> Shapes:
    """(prompt, decode) shapes of a bucket file. Raises ConfigError."""
    try:
        text = read_limited(path, MAX_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"bucket file {path} cannot be read: {reason}") from None
    return parse_buckets(text, path)


def parse_buckets(text: str, name: str = "bucket file") -> Shapes:
    """(prompt, decode) shapes of a text with lines of `(batch, query, blocks)`.

    Each element is a number, a list, or range([start, ]end[, step]). A range with a start includes
    its end if the step divides their difference, as in the example of the plug-in's documentation.
    A line yields all combinations of its elements. A query of 1 is a decode bucket. `#` starts a
    comment. Raises ConfigError.
    """
    prompts: dict[Shape, None] = {}
    decodes: dict[Shape, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        try:
            axes = _parse_line(line)
        except (SyntaxError, ValueError) as error:
            # Only the reason: Python's message has a line number within this single line.
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise ConfigError(f"{name}, line {number}: {line!r}: {reason}") from None
        for batch, query, blocks in itertools.product(*axes):
            (decodes if query == 1 else prompts)[batch, query, blocks] = None
    return list(prompts), list(decodes)


def _parse_line(line: str) -> list[list[int]]:
    tree = ast.parse(line.rstrip(","), mode="eval").body
    if not isinstance(tree, ast.Tuple) or len(tree.elts) != 3:
        raise ValueError("a line needs three elements: (batch, query, blocks)")
    axes = [_parse_axis(element) for element in tree.elts]
    if math.prod(len(axis) for axis in axes) > MAX_RANGE_VALUES:
        raise ValueError(f"a line expands to more than {MAX_RANGE_VALUES} buckets")
    if min(axes[0]) < 1 or min(axes[1]) < 1 or min(axes[2]) < 0:
        raise ValueError("batch and query must be at least 1, blocks at least 0")
    return axes


def _parse_axis(node: ast.expr) -> list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [node.value]
    if isinstance(node, ast.List) and node.elts:
        return [value for element in node.elts for value in _parse_axis(element)]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "range"
        and not node.keywords
        and 1 <= len(node.args) <= 3
    ):
        arguments = [value for argument in node.args for value in _parse_axis(argument)]
        values = range(*arguments)
        if len(arguments) > 1 and values and values[-1] + values.step == values.stop:
            values = range(values.start, values.stop + values.step, values.step)
        if not 0 < len(values) <= MAX_RANGE_VALUES:
            raise ValueError(
                f"a range has {len(values)} values, it must have 1 to {MAX_RANGE_VALUES}"
            )
        return list(values)
    raise ValueError(f"{ast.unparse(node)!r} is not a number, a list, or range(start, end, step)")

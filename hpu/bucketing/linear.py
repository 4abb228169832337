"""Where bucket boundaries come from: the generators of each strategy. Pure functions of numbers."""

import ast
import itertools
import math
from pathlib import Path

from config.buckets import Range
from config.errors import ConfigError

Shape = tuple[int, int, int]
"""(batch, query, blocks)"""

MAX_RANGE_VALUES = 10_000


def linear_points(low: int, step: int, high: int) -> list[int]:
    """`low` doubled while below `step`, then every multiple of `step` up to `high`.

    A `low` of 0 puts 0 in front of the points from `step`. Rule and examples: the bucketing chapter
    of Gaudi's vLLM guide.
    """
    if low == 0:
        return [0, *linear_points(step, step, high)]
    ramp = itertools.takewhile(lambda p: p < min(step, high + 1), (low << i for i in range(64)))
    steady = range(step * math.ceil(low / step), high + 1, step)
    return list(dict.fromkeys([*ramp, *steady]))


def exponential_points(
    low: int, step: int, high: int, limit: int, *, fill: bool, exact_last: bool = False
) -> list[int]:
    """At most `limit` points from `low` to `high`, each in the same ratio to the one before.

    Points are rounded up to multiples of `step`; with `fill` a point that exists already gives way
    to the nearest unused multiple, so that few are lost. The last is `high`, rounded up unless
    `exact_last`.
    """
    last = high if exact_last else step * math.ceil(high / step)
    if limit <= 1 or low >= high:
        return [last]
    points: set[int] = set()
    start = step if low in (0, 1) else low
    for i in range(limit):
        x = start * (high / start) ** (i / (limit - 1))
        point = min(step * math.ceil(round(x, 6) / step), last)
        if i == limit - 1:
            point = last
        if fill and point in points:
            unused = [p for p in (*range(step, last, step), last) if p not in points]
            if not unused:
                break
            point = min(unused, key=lambda p: (abs(p - point), p))
        points.add(point)
    return sorted(points | {low})


def num_points(high: int) -> int:
    """Points on an exponential axis that ends at `high`: ceil(log2(high)) + 1."""
    return math.ceil(math.log2(high)) + 1 if high > 1 else 1


def exponential_prompts(
    max_batch: int, block_size: int, budget: int, max_len: int, *, contexts: bool
) -> list[Shape]:
    """Prompt buckets whose tokens, cached context counted, stay within `budget`.

    With `contexts`, every number of cached blocks that a query leaves room for in `max_len`.
    """
    batches = exponential_points(1, 1, max_batch, num_points(max_batch), fill=True)
    queries = exponential_points(block_size, block_size, max_len, num_points(max_len), fill=True)
    shapes = []
    for batch, query in itertools.product(batches, queries):
        most = max((max_len - query) // block_size, 0) if contexts else 0
        shapes += [
            (batch, query, blocks)
            for blocks in range(most + 1)
            if batch * (query + blocks * block_size) <= budget
        ]
    return sorted(shapes)


def exponential_decodes(
    max_batch: int, block_size: int, max_blocks: int, *, exact_last: bool
) -> list[Shape]:
    """Decode buckets: every batch point with every point of total blocks."""
    batches = exponential_points(1, 1, max_batch, num_points(max_batch), fill=True)
    blocks = exponential_points(
        block_size,
        block_size,
        max_blocks,
        num_points(max_blocks),
        fill=True,
        exact_last=exact_last,
    )
    return [(batch, 1, n) for batch, n in itertools.product(batches, blocks)]


def linear_axis(given: Range, low: int, step: int, high: int) -> list[int]:
    """`linear_points` with what the user gave in place of the strategy's own numbers."""
    low = low if given.min is None else given.min
    step = step if given.step is None else given.step
    high = high if given.max is None else given.max
    return linear_points(min(low, high), step, high)


def fallback_point(wanted: int, base: int, cap: int) -> int:
    """The size to run at when `wanted` is beyond every bucket: a multiple of ceil(cbrt) * `base`,
    at most `cap` unless `wanted` is more."""
    if wanted <= 1:
        return wanted
    root = next(r for r in itertools.count(1) if r**3 >= wanted)
    unit = root * base
    return max(min(math.ceil(wanted / unit) * unit, cap), wanted)


def read_bucket_file(path: str) -> tuple[list[Shape], list[Shape]]:
    """(prompt, decode) shapes of a bucket file. Raises ConfigError with the line number."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"bucket file {path} cannot be read: {error}") from None
    return parse_buckets(text, path)


def parse_buckets(text: str, name: str = "bucket file") -> tuple[list[Shape], list[Shape]]:
    """(prompt, decode) shapes of a text with one `(batch, query, blocks)` a line.

    Each of the three is a number, a list, or range(start, end[, step]) with the end excluded; a
    line stands for all combinations. A query of 1 makes a decode bucket. `#` starts a comment.
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
            # Python would name a line of its own, the only one that it was shown.
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
        raise ValueError(f"a line stands for more than {MAX_RANGE_VALUES} buckets")
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
        if not 0 < len(values) <= MAX_RANGE_VALUES:
            raise ValueError(f"a range has {len(values)} values, 1 to {MAX_RANGE_VALUES} will do")
        return list(values)
    raise ValueError(f"{ast.unparse(node)!r} is not a number, a list, or range(start, end, step)")

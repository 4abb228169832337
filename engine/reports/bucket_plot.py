"""SVG plot of a bucket table: prompts by query and context, decodes by batch and blocks."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PREFILL, Bucket

WIDTH, HEIGHT, MARGIN, GAP = 420, 320, 60, 40
"""Size of a panel without its labels, the space for the labels, and the space between panels;
pixels."""
MADE, ADDED = "#2a78d6", "#e0762f"


class Panel(NamedTuple):
    """Buckets of a phase, plotted by two of their dimensions."""

    phase: int
    title: str
    across: tuple[int, str]
    """Index of the dimension in a bucket, and the label of the axis."""
    up: tuple[int, str]


PANELS = (
    Panel(PREFILL, "Prompts", (2, "new tokens of a prompt"), (3, "cached blocks of a prompt")),
    Panel(DECODE, "Decodes", (3, "blocks of the batch"), (1, "sequences")),
)


def plot(table: BucketTable, strategy: str) -> str:
    """SVG with a panel for each phase. Axes are logarithmic; the radius of a prompt bucket's circle
    grows with its batch."""
    panels = [panel for panel in PANELS if panel.phase in table.phases]
    width = len(panels) * (WIDTH + MARGIN + GAP)
    parts = []
    for number, panel in enumerate(panels):
        left = number * (WIDTH + MARGIN + GAP) + MARGIN
        parts.append(f'<g transform="translate({left},{MARGIN})">{_panel(table, panel)}</g>')
    title = f"{len(table.buckets)} buckets of the strategy {strategy}"
    legend = f'<tspan fill="{MADE}">● by the strategy</tspan>'
    if table.added:
        legend += f'  <tspan fill="{ADDED}">● added for the largest launches</tspan>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + 2 * MARGIN}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="22" font-size="15">{escape(title)}</text>'
        f'<text x="{MARGIN}" y="42">{legend}</text>{"".join(parts)}</svg>\n'
    )


def _panel(table: BucketTable, panel: Panel) -> str:
    buckets = [bucket for bucket in table.buckets if bucket[0] == panel.phase]
    across = _axis([bucket[panel.across[0]] for bucket in buckets], WIDTH)
    up = _axis([bucket[panel.up[0]] for bucket in buckets], HEIGHT)
    added = set(table.added)
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 38}" text-anchor="middle">'
        f"{panel.title}: {panel.across[1]}</text>",
        f'<text x="{-HEIGHT / 2}" y="-44" transform="rotate(-90)" text-anchor="middle">'
        f"{panel.up[1]}</text>",
    ]
    for value, place in _ticks(across):
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{value}</text>')
    for value, place in _ticks(up):
        parts.append(f'<text x="-6" y="{HEIGHT - place + 4:.1f}" text-anchor="end">{value}</text>')
    parts += [
        f'<circle cx="{across[bucket[panel.across[0]]]:.1f}" '
        f'cy="{HEIGHT - up[bucket[panel.up[0]]]:.1f}" r="{_radius(bucket):.1f}" '
        f'fill="{ADDED if bucket in added else MADE}" fill-opacity="0.6">'
        f"<title>{bucket[1:]}</title></circle>"
        for bucket in buckets
    ]
    return "".join(parts)


def _radius(bucket: Bucket) -> float:
    return 3 + (math.log2(bucket[1]) if bucket[0] == PREFILL else 0)


def _axis(values: Sequence[int], length: int) -> dict[int, float]:
    """Value -> position in pixels, logarithmic in value + 1, with a border of 10 pixels."""
    points = sorted(set(values))
    low, high = math.log2(points[0] + 1), math.log2(points[-1] + 1)
    scale = (length - 20) / (high - low) if high > low else 0
    return {point: 10 + scale * (math.log2(point + 1) - low) for point in points}


def _ticks(axis: dict[int, float]) -> list[tuple[int, float]]:
    """(value, position) of the ticks, far enough apart that their labels do not overlap."""
    ticks: list[tuple[int, float]] = []
    for value, place in axis.items():
        if not ticks or place - ticks[-1][1] >= 34:
            ticks.append((value, place))
    return ticks

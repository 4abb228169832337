"""Draws the charts of docs/performance.md from the tables of benchmarks/results.

Run: python benchmarks/pictures.py
"""

import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs"
COLOURS = ("#1f5fbf", "#d97706", "#4b9e6f", "#9a9a9a")
WIDTH, HEIGHT = 720, 300
LEFT, BOTTOM, TOP = 56, 44, 56

Rows = dict[str, list[float]]
"""Values of all series, by label of the group."""


def table(name: str, head: str) -> tuple[list[str], Rows]:
    """Heads and rows of the first table of a results file whose first line starts with `head`.

    Only the first number of each cell counts.
    """
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows: Rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        label, *cells = _cells(line)
        rows[label] = [float(found[0]) if (found := re.match(r"[\d.]+", c)) else 0 for c in cells]
    return _cells(lines[start])[1:], rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def bars(title: str, unit: str, series: Sequence[str], rows: Rows) -> str:
    """A bar chart as SVG: a group of bars for each row, a bar for each series."""
    top = max(max(values) for values in rows.values())
    group = (WIDTH - LEFT - 8) / len(rows)
    bar = group * 0.8 / len(series)
    scale = (HEIGHT - TOP - BOTTOM) / top
    floor = HEIGHT - BOTTOM
    parts = [_text(LEFT, 18, f"{title} ({unit})", size=14, anchor="start")]
    for i, name in enumerate(series):
        start = LEFT + i * 150
        parts.append(_bar(start, 28, 12, 12, COLOURS[i], name))
        parts.append(_text(start + 18, 39, name, anchor="start"))
    for i, (label, values) in enumerate(rows.items()):
        left = LEFT + i * group + group * 0.1
        for j, value in enumerate(values[: len(series)]):
            x, height = left + j * bar, value * scale
            hint = f"{series[j]}, {label}: {value:g}"
            parts.append(_bar(x, floor - height, bar - 2, height, COLOURS[j], hint))
            parts.append(_text(x + bar / 2 - 1, floor - height - 4, f"{value:.0f}", size=10))
        parts.append(_text(left + group * 0.4, floor + 18, label))
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{floor}" y2="{floor}" stroke="#444"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" role="img" aria-label="{escape(title)}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _bar(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{escape(hint)}</title></rect>'
    )


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="#222">{escape(text)}</text>'
    )


def pictures() -> dict[str, str]:
    """SVG text of each chart, by file name."""
    heads, loads = table("cpu-2026-11-22.md", "| prompt/output tokens, streams | gaudiserve | vLLM")
    first_heads, first = table(
        "cpu-avx512-2026-11-27.md", "| model, requests | gaudiserve | vLLM CPU |"
    )
    batches = {f"{name.split(', ')[1]} streams": loads[name] for name in list(loads)[:3]}
    demo = {label: values for label, values in first.items() if label.startswith("demo")}
    return {
        "throughput.svg": bars("Throughput beside other servers", "tokens/s", heads, loads),
        "first-token.svg": bars("Time to first token", "ms, median", first_heads, demo),
        "batch-scaling.svg": bars("Batch scaling", "tokens/s", heads[:2], batches),
    }


def main() -> int:
    """Write the charts."""
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws the charts of docs/performance.md from the pages and JSON files of benchmarks/results.

Run: python benchmarks/plots.py
"""

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import TOTAL

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs"

COLORS = ("#1f5fbf", "#d97706", "#4b9e6f", "#9a9a9a", "#a23b72")
SERVERS = ("gaudiserve", "vLLM", "OpenVINO", "llama.cpp")
"""Each server has the color at its position in all charts."""
COLUMNS = {"demo": "gaudiserve", "vLLM CPU": "vLLM"}
"""Column of a page -> server, where the names differ."""
BOUND = "bound of the machine"

WIDTH, MARGIN = 900, 8
PANEL_LEFT, PANEL_TOP, PANEL_BOTTOM = 58, 30, 56
HEAD = 56
"""Height of a chart's title and legend."""
LETTER = 0.52
"""Mean width of a letter, as a fraction of the font size."""


class Bar(NamedTuple):
    """Height of a bar, and of the pale bar behind it, if there is one."""

    value: float
    upper: float | None = None


Groups = Mapping[str, Mapping[str, Bar]]
"""Group -> series -> bar. A series that was not measured is absent."""
Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Series -> points."""


class Panel(NamedTuple):
    """One coordinate system of a chart."""

    title: str
    unit: str
    content: Groups | Lines
    axis: str = ""
    """Label of the horizontal axis."""
    digits: int = 0


class Chart(NamedTuple):
    """A chart and the results that it is drawn from."""

    title: str
    series: Sequence[str]
    panels: Sequence[Panel]
    sources: Sequence[str]
    """Names of pages in benchmarks/results."""
    columns: int = 2
    height: int = 230
    """Height of each panel."""
    note: str = ""


class Machine(NamedTuple):
    """A machine, and the page with its comparison of servers."""

    name: str
    page: str
    rates: str
    """Start of the head of the table with tokens per second."""
    first_tokens: str
    """Start of the head of the table with times to the first token."""


MACHINES = (
    Machine(
        "Intel Xeon, AVX512-BF16 and AMX",
        "cpu-amx-servers-2026-12-01.md",
        "| workload (prompt/output tokens) | gaudiserve",
        "| model, requests",
    ),
    Machine(
        "AMD EPYC Zen 5, AVX512-BF16",
        "cpu-avx512-2026-11-27.md",
        "| demo model",
        "| model, requests",
    ),
    Machine(
        "AMD EPYC Zen 4, AVX512-BF16",
        "cpu-avx512-2026-11-28.md",
        "| workload | demo | vLLM",
        "| model, prompts",
    ),
    Machine(
        "AMD EPYC Zen 3, AVX2",
        "cpu-avx2-2026-11-25.md",
        "| workload (prompt/output tokens) | gaudiserve",
        "| model, requests",
    ),
)
SCALING = {
    "demo model, 135 M parameters": "| demo model",
    "mixture of experts, 0.95 B": "| mixture of experts",
    "dense, 1.17 B": "| dense",
}
"""Model -> start of the head of its table in SCALING_PAGE."""
SCALING_PAGE = "cpu-avx512-2026-11-27.md"
LOADS = ("128/128, 1", "128/128, 8", "128/128, 32", "1024/16, 4", "1024 shared + 32/32, 8")
PADDED = ("8B, 8192/128/8192", "70B on 8 cards, 131072/128/8192")
"""Settings whose padding is shown."""


def records(page: str, head: str) -> list[dict[str, str]]:
    """Rows of the first table of a page whose first line starts with `head`, by column. Where
    columns have the same name, the first one counts."""
    lines = (RESULTS / page).read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(head)), None)
    if start is None:
        raise SystemExit(f"{page}: no table starts with {head!r}")
    names = _cells(lines[start])
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row: dict[str, str] = {}
        for name, cell in zip(names, _cells(line), strict=True):
            row.setdefault(name, cell)
        rows.append(row)
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def newest(stem: str, suffix: str = ".json") -> Path | None:
    """The last dated file of a benchmark in the results."""
    return max(RESULTS.glob(f"{stem}-2*{suffix}"), default=None)


def newest_data(stem: str) -> tuple[str, Any]:
    """(page, content of the JSON file beside it) of a benchmark's last run."""
    path = newest(stem)
    if path is None:
        raise SystemExit(f"{RESULTS} has no {stem}-DATE.json")
    return path.with_suffix(".md").name, json.loads(path.read_text(encoding="utf-8"))


def day(page: str) -> str:
    """Date in the name of a page."""
    (found,) = re.findall(r"\d{4}-\d\d-\d\d", page)
    return str(found)


def servers(row: Mapping[str, str]) -> dict[str, Bar]:
    """Bars of the servers in a row of a comparison: one number a cell, or median / 99th
    percentile."""
    bars = {}
    for name, cell in row.items():
        server = COLUMNS.get(name, name)
        number = re.match(r"([\d.]+)(?: / ([\d.]+))?", cell)
        if server in SERVERS and number:
            median, last = number.groups()
            bars[server] = Bar(float(median), float(last) if last else None)
    return bars


def rates(page: str, head: str) -> dict[str, dict[str, Bar]]:
    """Output tokens per second by load and server."""
    found = {}
    for row in records(page, head):
        load = re.sub(r" streams?$", "", next(iter(row.values())))
        if load in LOADS:
            found[load] = servers(row)
    return found


def throughput() -> Chart:
    panels = []
    for machine in MACHINES:
        groups = {}
        for load, bars in rates(machine.page, machine.rates).items():
            lengths, _, streams = load.rpartition(", ")
            groups[f"{lengths}\n{streams} {'stream' if streams == '1' else 'streams'}"] = bars
        title = f"{machine.name} ({day(machine.page)})"
        panels.append(Panel(title, "output tokens/s", groups))
    return Chart(
        "Throughput of the demo model by machine: more is better",
        SERVERS,
        panels,
        [machine.page for machine in MACHINES],
        note="groups: prompt/output tokens, streams at once",
    )


def first_token() -> Chart:
    panels = []
    for machine in MACHINES:
        groups = {}
        for row in records(machine.page, machine.first_tokens):
            model, _, count = next(iter(row.values())).partition(", ")
            if model == "demo":
                groups[f"{count} prompts at once"] = servers(row)
        title = f"{machine.name} ({day(machine.page)})"
        panels.append(Panel(title, "ms to the first token", groups))
    return Chart(
        "Time to first token when prompts of 128 tokens arrive at once: less is better",
        SERVERS,
        panels,
        [machine.page for machine in MACHINES],
        note="solid: median; pale: 99th percentile",
    )


def scaling() -> Chart:
    panels = []
    for model, head in SCALING.items():
        lines: dict[str, list[tuple[float, float]]] = {name: [] for name in (*SERVERS, BOUND)}
        for row in records(SCALING_PAGE, head):
            streams = re.match(r"128/128, (\d+)", next(iter(row.values())))
            if streams is None:
                continue
            bars = servers(row)
            for server, bar in bars.items():
                lines[server].append((float(streams[1]), bar.value))
            share = float(row["of the bound"].rstrip(" %")) / 100
            lines[BOUND].append((float(streams[1]), bars["gaudiserve"].value / share))
        measured = {name: points for name, points in lines.items() if points}
        panels.append(Panel(model, "output tokens/s", measured, axis="streams at once"))
    return Chart(
        f"Scaling with streams, AMD EPYC Zen 5 ({day(SCALING_PAGE)})",
        (*SERVERS, BOUND),
        panels,
        [SCALING_PAGE],
        columns=3,
        height=260,
        note="128 prompt and 128 output tokens",
    )


def memory() -> Chart:
    page, data = newest_data("memory")
    states = {"idle": "idle", "loaded": f"{data['streams']} streams of 128/128 tokens"}
    part = "part of the engine's memory"
    groups = {
        name.replace(".", ".\n"): {
            shown: Bar(data[state][name]) for state, shown in states.items() if name in data[state]
        }
        for name in sorted(data["loaded"], key=lambda name: name == TOTAL)
    }
    groups |= {name: {part: Bar(size)} for name, size in data["parts"].items()}
    return Chart(
        f"Resident memory by process, demo model ({day(page)}): less is better",
        (*states.values(), part),
        [Panel("", "MiB", groups)],
        [page],
        columns=1,
        height=260,
    )


def padding() -> Chart:
    page, data = newest_data("padding")
    names = {"plugin": f"vllm-gaudi at {data['plugin_commit']}", "ours": "gaudiserve"}
    graphs: dict[str, dict[str, Bar]] = {}
    shares: dict[str, dict[str, dict[str, Bar]]] = {setting: {} for setting in PADDED}
    for row in data["rows"]:
        setting = row["setting"]
        name = re.sub(r"^(.+?), (\d+)/(\d+)/(\d+)$", r"\1\n\2/\3/\4", setting)
        graphs[name] = {shown: Bar(row["graphs"][key]) for key, shown in names.items()}
        if setting in shares:
            shares[setting][row["traffic"]] = {
                shown: Bar(row[key]["work"] * 100) for key, shown in names.items()
            }
    panels = [
        Panel(f"Padding: {setting}", "% of the work", groups, digits=1)
        for setting, groups in shares.items()
    ]
    return Chart(
        f"Graphs and padding of the default buckets ({day(page)}): less is better",
        (names["ours"], names["plugin"]),
        [*panels, Panel("Graphs", "graphs", graphs)],
        [page],
        note="settings: context/sequences/tokens per step",
    )


def host() -> Chart:
    """Drawn from the newest JSON file of each benchmark, or from its newest page if it has no JSON
    file."""
    engine_page, engine = _engine_us()
    worker_page, worker = _worker_us()
    series = (
        f"engine: result to next plan ({day(engine_page)})",
        f"worker: host logic ({day(worker_page)})",
        f"worker: launching ({day(worker_page)})",
    )
    groups = {}
    for batch, (logic, launching) in worker.items():
        values = (engine[batch], logic, launching)
        groups["1 request" if batch == 1 else f"{batch} requests"] = {
            name: Bar(value) for name, value in zip(series, values, strict=True)
        }
    return Chart(
        "Host time of a decode step, simulated device: less is better",
        series,
        [Panel("", "microseconds", groups)],
        [engine_page, worker_page],
        columns=1,
        height=240,
    )


def _engine_us() -> tuple[str, dict[int, float]]:
    """(page, microseconds by batch) of the case without waiting requests."""
    if newest("host") is not None:
        page, data = newest_data("host")
        steps = [(s["rows"], s["waiting"], s["context"], s["wall_us"]) for s in data["steps"]]
    else:
        page = _newest_page("host")
        steps = [
            (row["rows"], row["waiting"], row["context"], row["us"])
            for row in records(page, "| rows | waiting | context |")
        ]
    return page, {
        int(batch): float(us)
        for batch, waiting, context, us in steps
        if (int(waiting), int(context)) == (0, 1024)
    }


def _worker_us() -> tuple[str, dict[int, tuple[float, float]]]:
    """(page, microseconds of host logic and of launching by batch), with replays that return at
    once."""
    if newest("launch") is not None:
        page, data = newest_data("launch")
        steps = [(s["rows"], s["logic"], s["launch"]) for s in data["steps"] if not s["computes"]]
    else:
        page = _newest_page("launch")
        steps = [
            (row["rows"], row["host logic"], row["launching"])
            for row in records(page, "| rows | a replay |")
            if row["a replay"] == "returns at once"
        ]
    return page, {int(batch): (float(logic), float(launch)) for batch, logic, launch in steps}


def _newest_page(stem: str) -> str:
    page = newest(stem, ".md")
    if page is None:
        raise SystemExit(f"{RESULTS} has no {stem}-DATE.md")
    return page.name


def charts() -> dict[str, Chart]:
    """All charts by file name."""
    return {
        "throughput.svg": throughput(),
        "first-token.svg": first_token(),
        "scaling.svg": scaling(),
        "memory.svg": memory(),
        "padding.svg": padding(),
        "host-time.svg": host(),
    }


def drawn(chart: Chart) -> str:
    """A chart as SVG."""
    rows = math.ceil(len(chart.panels) / chart.columns)
    height = HEAD + rows * chart.height + MARGIN
    parts = [_text(MARGIN, 20, chart.title, size=15, anchor="start", weight="bold")]
    colors = dict(zip(chart.series, COLORS, strict=False))
    parts += _legend(chart, colors)
    for index, panel in enumerate(chart.panels):
        row, column = divmod(index, chart.columns)
        # A last panel without a neighbour takes the whole width.
        is_alone = index == len(chart.panels) - 1 and column == 0
        width = (WIDTH - 2 * MARGIN) / (1 if is_alone else chart.columns)
        frame = _Frame(
            panel, MARGIN + column * width, HEAD + row * chart.height, width, chart.height
        )
        parts += frame.drawn(colors)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" role="img" aria-label="{escape(chart.title)}">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _legend(chart: Chart, colors: Mapping[str, str]) -> Iterator[str]:
    x = float(MARGIN)
    for name, color in colors.items():
        yield _bar(x, 32, 12, 12, color, name)
        yield _text(x + 17, 42, name, anchor="start")
        x += 17 + _width(name, 12) + 18
    if chart.note:
        yield _text(WIDTH - MARGIN, 42, chart.note, size=11, anchor="end", color="#555")


class _Frame:
    """A panel at its place in the chart."""

    def __init__(self, panel: Panel, x: float, y: float, width: float, height: float) -> None:
        self._panel = panel
        self._left, self._right = x + PANEL_LEFT, x + width - MARGIN
        self._top, self._floor = y + (PANEL_TOP if panel.title else 12), y + height - PANEL_BOTTOM
        self._x, self._y = x, y
        top = max(_values(panel.content))
        self._step = _nice_step(top)
        # Room for the number above the highest bar.
        self._most = max(math.ceil(top / self._step) * self._step, top * 1.06)

    def drawn(self, colors: Mapping[str, str]) -> Iterator[str]:
        panel = self._panel
        yield _text(self._left, self._y + 18, panel.title, size=13, anchor="start")
        middle = (self._top + self._floor) / 2
        yield _text(self._x + 12, middle, panel.unit, size=11, color="#555", turned=True)
        for index in range(math.floor(self._most / self._step + 1e-9) + 1):
            value = index * self._step
            yield _line(self._left, self._height(value), self._right, self._height(value), "#ddd")
            yield _text(
                self._left - 5, self._height(value) + 4, f"{value:g}", size=10, anchor="end"
            )
        if _is_lines(panel.content):
            yield from self._lines(panel.content, colors)
        else:
            yield from self._bars(panel.content, colors)
        yield _line(self._left, self._floor, self._right, self._floor, "#444")

    def _height(self, value: float) -> float:
        return self._floor - value / self._most * (self._floor - self._top)

    def _bars(self, groups: Any, colors: Mapping[str, str]) -> Iterator[str]:
        order = [name for name in colors if any(name in bars for bars in groups.values())]
        width = (self._right - self._left) / len(groups)
        bar = min(width * 0.86 / len(order), 60)
        for index, (label, bars) in enumerate(groups.items()):
            shown = [name for name in order if name in bars]
            centre = self._left + (index + 0.5) * width
            for place, name in enumerate(shown):
                x = centre + (place - len(shown) / 2) * bar
                yield from self._one_bar(x, bar, bars[name], colors[name], f"{name}, {label}")
            yield from self._label(centre, width, label)

    def _one_bar(self, x: float, width: float, bar: Bar, color: str, name: str) -> Iterator[str]:
        digits = self._panel.digits
        if bar.upper is not None and bar.upper > bar.value:
            top = self._height(bar.upper)
            hint = f"{name}, 99th percentile: {bar.upper:g}"
            yield _bar(x, top, width - 2, self._floor - top, color, hint, opacity=0.35)
        top = self._height(bar.value)
        hint = f"{name}: {bar.value:.{digits}f}".replace("\n", " ")
        yield _bar(x, top, width - 2, self._floor - top, color, hint)
        middle = x + width / 2 - 1
        above = self._height(bar.value if bar.upper is None else max(bar.upper, bar.value)) - 3
        if bar.upper is None:
            yield _text(middle, above, f"{bar.value:.{digits}f}", size=9)
            return
        yield _text(middle, above, f"{bar.upper:.{digits}f}", size=9)
        if bar.upper > bar.value and self._floor - top > 14:
            yield _text(middle, top + 11, f"{bar.value:.{digits}f}", size=9, color="#fff")

    def _label(self, centre: float, width: float, label: str) -> Iterator[str]:
        letters = max(6, int(width / (10 * LETTER)))
        lines = [part for line in label.split("\n") for part in textwrap.wrap(line, letters)]
        for number, line in enumerate(lines):
            yield _text(centre, self._floor + 14 + number * 12, line, size=10)

    def _lines(self, lines: Any, colors: Mapping[str, str]) -> Iterator[str]:
        ticks = sorted({x for points in lines.values() for x, _ in points})
        # Streams double from tick to tick, so the axis is logarithmic.
        first, last = math.log(ticks[0]), math.log(ticks[-1])
        span = self._right - self._left - 34

        def across(value: float) -> float:
            return self._left + 12 + (math.log(value) - first) / (last - first) * span

        for tick in ticks:
            yield _text(across(tick), self._floor + 14, f"{tick:g}", size=10)
        middle = (self._left + self._right) / 2
        yield _text(middle, self._floor + 32, self._panel.axis, size=11, color="#555")
        for name, points in lines.items():
            spots = [(across(x), self._height(y)) for x, y in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            dashes = ' stroke-dasharray="5 4"' if name == BOUND else ""
            yield (
                f'<polyline points="{path}" fill="none" stroke="{colors[name]}" '
                f'stroke-width="2"{dashes}/>'
            )
            for (x, y), (streams, value) in zip(spots, points, strict=True):
                hint = f"{name}, {streams:g}: {value:.1f}"
                yield (
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colors[name]}">'
                    f"<title>{escape(hint)}</title></circle>"
                )
        last_y = self._floor + 12
        # Numbers of lines that end close together move up, the lowest line first.
        for _, value in sorted((points[-1] for points in lines.values()), key=lambda p: p[1]):
            last_y = min(self._height(value) + 3, last_y - 10)
            yield _text(across(ticks[-1]) + 5, last_y, f"{value:.0f}", size=9, anchor="start")


def _is_lines(content: Groups | Lines) -> bool:
    return not isinstance(next(iter(content.values())), Mapping)


def _values(content: Any) -> Iterator[float]:
    for entry in content.values():
        if isinstance(entry, Mapping):
            yield from (bar.upper or bar.value for bar in entry.values())
        else:
            yield from (y for _, y in entry)


def _nice_step(top: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides `top` into three to eight."""
    power = 10.0 ** math.floor(math.log10(top / 3))
    return next(power * factor for factor in (5, 2, 1) if power * factor <= top / 3)


def _width(text: str, size: int) -> float:
    return len(text) * size * LETTER


def _bar(
    x: float, y: float, width: float, height: float, color: str, hint: str, opacity: float = 1
) -> str:
    pale = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{color}"{pale}><title>{escape(hint)}</title></rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}" stroke-width="1"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "middle",
    color: str = "#222",
    weight: str = "",
    turned: bool = False,
) -> str:
    more = f' font-weight="{weight}"' if weight else ""
    more += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{color}"{more}>{escape(text)}</text>'
    )


def main() -> int:
    for name, chart in charts().items():
        (FOLDER / name).write_text(drawn(chart), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

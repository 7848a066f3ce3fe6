"""Charts as inline SVG: numbers in, markup out. No script, no font, no file; colours are CSS variables of the page.

    line_chart      one or several series over steps; noisy ones as a faint line under their running mean
    interval_chart  before and after with their intervals, one row a quantity
    stacked_chart   parts of a whole, one bar a row, against a limit

Left out: zoom, log scales and everything else that MLflow's charts do better; the page is for reading, not for digging.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 26.0
MAX_POINTS = 300
SMOOTH_FROM = 40  # points from which a noisy series is drawn with its running mean
NUM_COLOURS = 4

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    label: str
    points: tuple[Point, ...]  # (step, value), in order of steps, finite
    noisy: bool = True


@dataclass(frozen=True)
class Interval:
    label: str
    before: tuple[float, float, float] | None  # value, low, high
    after: tuple[float, float, float] | None


def number(value: float) -> str:
    """Return a number as people write it: three significant digits, thousands apart, tiny ones with an exponent."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.3g}"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers that span low..high: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor * (1 + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points: means over equal stretches, so that no peak is invented and no file is huge."""
    if len(points) <= limit:
        return list(points)
    edges = [round(index * len(points) / limit) for index in range(limit + 1)]
    stretches = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Return the centred running mean over `window` points; at the ends over what there is."""
    half = window // 2
    values = [y for _, y in points]
    means = []
    for index, (x, _) in enumerate(points):
        near = values[max(0, index - half) : index + half + 1]
        means.append((x, sum(near) / len(near)))
    return means


def _span(values: Sequence[float], bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low - pad if bounds[0] is None else bounds[0]), (high + pad if bounds[1] is None else bounds[1])


def _path(points: Sequence[Point], x: Scale, y: Scale, css: str) -> str:
    way = "L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in points)
    return f'<path class="{css}" d="M{way}"/>'


@dataclass(frozen=True)
class Scale:
    """Maps low..high of the data to start..end of the drawing; what lies outside stays at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def line_chart(
    title: str,
    series: Sequence[Series],
    bounds: tuple[float | None, float | None] = (None, None),
    marks: Sequence[tuple[float, str]] = (),
    num_colours: int = NUM_COLOURS,
) -> str:
    """Return one chart.

    Args:
        title: read aloud by screen readers.
        series: at least one with at least one point.
        bounds: lowest and highest value of the vertical axis; None follows the data.
        marks: steps at which something happened, with its name; drawn as dashed lines.
        num_colours: that the page defines, as classes s1, s2, ...
    """
    shown = [Series(s.label, tuple(thin(s.points)), s.noisy) for s in series]
    xs = [px for s in shown for px, _ in s.points]
    low, high = _span([py for s in shown for _, py in s.points], bounds)
    x = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">']
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6:g}" y="{y(tick) + 3.5:.1f}">{number(tick)}</text>')
    for tick in (t for t in ticks(x.low, x.high, 5) if t == int(t)):
        parts.append(f'<text class="tick middle" x="{x(tick):.1f}" y="{HEIGHT - 8:g}">{number(tick)}</text>')
    for step, name in marks:
        parts.append(
            f'<line class="mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}">'
            f"<title>{escape(name)} at step {step:g}</title></line>"
        )
    for index, one in enumerate(shown):
        colour = f"s{index % num_colours + 1}"
        drawn: Sequence[Point] = one.points
        if one.noisy and len(one.points) >= SMOOTH_FROM:
            parts.append(_path(one.points, x, y, f"line faint {colour}"))
            drawn = running_mean(one.points, max(3, len(one.points) // 12))
        parts.append(_path(drawn, x, y, f"line {colour}"))
        last_x, last_y = drawn[-1]
        parts.append(
            f'<circle class="{colour} dot" cx="{x(last_x):.1f}" cy="{y(last_y):.1f}" r="2.5">'
            f"<title>{escape(one.label)}: {number(last_y)} at step {last_x:g}</title></circle>"
        )
    parts.append("</svg>")
    return "".join(parts)


def interval_chart(title: str, rows: Sequence[Interval]) -> str:
    """Return a chart of shares between 0 and 1: a dot with its interval before, one after, an arrow between."""
    row_height, left = 42.0, 132.0
    height = row_height * len(rows) + BOTTOM
    x = Scale(0.0, 1.0, left, WIDTH - 20)
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="4" y2="{height - BOTTOM:g}"/>')
        parts.append(f'<text class="tick middle" x="{x(tick):.1f}" y="{height - 8:g}">{tick:.0%}</text>')
    for index, row in enumerate(rows):
        middle = row_height * (index + 0.5) + 2
        parts.append(f'<text class="label" x="0" y="{middle + 4:.1f}">{escape(row.label)}</text>')
        if row.before and row.after:
            parts.append(
                f'<line class="way" x1="{x(row.before[0]):.1f}" x2="{x(row.after[0]):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            )
        for name, css, shift, three in (("before", "before", -7, row.before), ("after", "after", 7, row.after)):
            if three is None:
                continue
            value, low, high = three
            level = middle + shift
            parts.append(
                f'<line class="whisker {css}" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{level:.1f}" y2="{level:.1f}"/>'
                f'<circle class="dot {css}" cx="{x(value):.1f}" cy="{level:.1f}" r="5">'
                f"<title>{name}: {value:.1%} ({low:.1%} to {high:.1%})</title></circle>"
            )
    parts.append("</svg>")
    return "".join(parts)


@dataclass(frozen=True)
class Part:
    name: str
    value: float
    colour: int  # 0 to NUM_PARTS - 1


NUM_PARTS = 10


def stacked_chart(title: str, rows: Sequence[tuple[str, Sequence[Part]]], limit: float, say: Callable[[float], str]) -> str:
    """Return horizontal bars of parts, one row each, with a line at the limit.

    Args:
        title: read aloud by screen readers.
        rows: label and parts, largest first.
        limit: where the line stands.
        say: turns a value into text.
    """
    row_height, left, right = 30.0, 78.0, 70.0
    width, height = 640.0, row_height * len(rows) + BOTTOM
    longest = max([limit, *(sum(part.value for part in parts) for _, parts in rows)])
    x = Scale(0.0, longest, left, width - right)
    parts_ = [f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">']
    for index, (label, parts) in enumerate(rows):
        top, total = index * row_height + 5, sum(part.value for part in parts)
        parts_.append(f'<text class="label" x="0" y="{top + 15:.1f}">{escape(label)}</text>')
        begin = 0.0
        for part in parts:
            start, end = x(begin), x(begin + part.value)
            begin += part.value
            box = f'x="{start:.1f}" y="{top:.1f}" width="{max(end - start, 0):.2f}" height="20"'
            parts_.append(
                f'<rect class="p{part.colour % NUM_PARTS}" {box}>'
                f"<title>{escape(part.name)}: {escape(say(part.value))}</title></rect>"
            )
        css = "tick over" if total > limit else "tick"
        parts_.append(f'<text class="{css}" x="{x(begin) + 6:.1f}" y="{top + 14:.1f}">{escape(say(total))}</text>')
    parts_.append(
        f'<line class="mark" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="0" y2="{height - BOTTOM:g}">'
        f"<title>limit: {escape(say(limit))}</title></line>"
    )
    parts_.append(f'<text class="tick middle" x="{x(limit):.1f}" y="{height - 8:g}">{escape(say(limit))} usable</text></svg>')
    return "".join(parts_)

"""Charts: the numbers land where they belong, and no text gets out of its place."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from tasks.charts import Interval, Series, interval_chart, line_chart, number, running_mean, thin, ticks


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag == tag]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.8751, "0.875"),
        (1e-4, "1e-4"),
        (-2.5e-5, "-2.5e-5"),
        (12345.6, "12,346"),
        (999.4, "999"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_read_as_people_write_them(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 60.0, [0, 20, 40, 60]),
        (3.0, 3.0, [3.0]),
        (-1e-5, 1e-5, [-1e-5, -5e-6, 0, 5e-6, 1e-5]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_thinning_keeps_the_mean_and_the_order() -> None:
    points = [(float(x), float(x % 7)) for x in range(1000)]
    thinned = thin(points, 50)
    assert len(thinned) == 50
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    assert sum(y for _, y in thinned) / 50 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:50], 50) == points[:50]


def test_the_running_mean_is_centred() -> None:
    assert running_mean([(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)], 3) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]


def test_a_line_chart_puts_higher_values_higher() -> None:
    svg = line_chart("t", [Series("a", ((0, 0.0), (10, 1.0)), noisy=False)], (0.0, 1.0))
    (path,) = elements(svg, "path")
    (x0, y0), (x1, y1) = ([float(n) for n in pair.split(" ")] for pair in path.attrib["d"].removeprefix("M").split("L"))
    assert x0 < x1
    assert y0 > y1  # SVG counts downwards


def test_a_long_noisy_series_gets_its_mean_and_a_short_one_does_not() -> None:
    def count(num_points: int, noisy: bool) -> int:
        return len(elements(line_chart("t", [Series("a", tuple((float(x), x % 2) for x in range(num_points)), noisy)]), "path"))

    assert (count(100, True), count(100, False), count(10, True), count(1, True)) == (2, 1, 1, 1)


def test_a_flat_or_single_series_is_drawn() -> None:
    for points in (((5.0, 2.0),), ((0.0, 0.0), (1.0, 0.0)), ((0.0, -3.0), (1.0, -3.0))):
        elements(line_chart("t", [Series("a", points)]), "path")


def test_text_stays_text() -> None:
    evil = '"><script>alert(1)</script>'
    svgs = [
        line_chart(evil, [Series(evil, ((0.0, 1.0), (1.0, 2.0)))], marks=[(0.5, evil)]),
        interval_chart(evil, [Interval(evil, (0.1, 0.0, 0.2), (0.5, 0.4, 0.6))]),
    ]
    for svg in svgs:
        assert "<script" not in svg
        assert elements(svg, "script") == []


def test_an_interval_chart_takes_one_side_alone() -> None:
    svg = interval_chart("t", [Interval("pass@1", None, (0.5, 0.4, 0.6)), Interval("pass@4", (0.2, 0.1, 0.3), (0.9, 0.8, 1.0))])
    assert len(elements(svg, "circle")) == 3
    assert "after: 50.0% (40.0% to 60.0%)" in svg

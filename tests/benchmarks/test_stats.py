from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from benchmarks.chart import Line, Panel, draw
from benchmarks.stats import difference_of, first_reach, mean_of, median


def test_the_interval_is_students() -> None:
    # Five values 1..5: mean 3, s = 1.5811, t(4) = 2.776: 3 ± 1.963.
    result = mean_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.high - 3.0 == pytest.approx(1.963, abs=1e-3)
    assert 3.0 - result.low == pytest.approx(1.963, abs=1e-3)


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    assert math.isinf(mean_of([0.5]).high)
    with pytest.raises(ValueError, match="no value"):
        mean_of([])


def test_a_difference_is_taken_seed_by_seed() -> None:
    steady = difference_of([0.5, 0.7, 0.9], [0.4, 0.6, 0.8])
    assert steady.mean == pytest.approx(0.1)
    assert steady.high - steady.low < 1e-9
    with pytest.raises(ValueError, match="argument 2"):
        difference_of([1.0], [1.0, 2.0])


def test_a_curve_reaches_a_mark_when_it_has_it_on_average_from_there_on() -> None:
    at = [0, 10, 20, 30, 40]
    assert first_reach(at, [0.1, 0.9, 0.2, 0.8, 0.9], 0.8) == 30
    assert first_reach(at, [0.1, 0.9, 0.7, 0.8, 0.9], 0.8) == 10
    assert first_reach(at, [0.1, 0.2, 0.3, 0.3, 0.3], 0.8) is None


def test_the_median_of_an_even_number_lies_between() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_a_chart_is_well_formed_and_has_every_line_once_in_its_legend() -> None:
    lines = [
        Line("a <b>", [0, 10], [0.1, 0.9], [0.0, 0.8], [0.2, 1.0]),
        Line("c", [0, 10], [0.2, 0.4]),
    ]
    panels = [Panel("one", lines, [0.5]), Panel("two", lines)]
    chart = draw(panels, x_label="x", y_label="y & z", y_most=1.0)
    root = ElementTree.fromstring(chart)
    names = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("a <b>") == 1
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 4
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) == 2
    assert chart == draw(panels, x_label="x", y_label="y & z", y_most=1.0)


def test_higher_values_are_drawn_higher() -> None:
    chart = draw([Panel("p", [Line("a", [0, 1], [0.25, 0.75])])], x_label="", y_label="", y_most=1)
    root = ElementTree.fromstring(chart)
    line = next(root.iter("{http://www.w3.org/2000/svg}polyline"))
    first, second = (float(p.split(",")[1]) for p in line.attrib["points"].split())
    assert second < first

"""The access curve in a terminal: it rises, and the budget is marked where it lies."""

import numpy as np
import pytest

from hotrow.report.access_curve import curve_as_text


def curve(points):
    return {"bytes": [b for b, _ in points], "share": [s for _, s in points]}


def test_the_curve_rises_from_left_to_right():
    sizes = np.geomspace(100, 1_000_000, 50)
    lines = curve_as_text(curve(list(zip(sizes, np.linspace(0.1, 1, 50), strict=True))), 10_000, width=40, height=6)
    filled = [sum(line[5 + x] not in " " for line in lines[:6]) for x in range(40)]
    assert filled == sorted(filled) and filled[-1] == 6 and filled[0] == 1
    assert lines[6][5 + 19 : 5 + 21].count("▲") == 1 and lines[6].count("▲") == 1
    assert "▲ 9.8 KiB" in lines[7] and lines[7].rstrip().endswith("976.6 KiB")


@pytest.mark.parametrize("memory", [1, 100, 10**9])
def test_a_budget_outside_the_curve_is_marked_at_its_end(memory):
    lines = curve_as_text(curve([(100, 0.5), (400, 1.0)]), memory, width=20, height=4)
    assert lines[4].index("▲") == (24 if memory == 10**9 else 5)


def test_a_curve_of_one_point_is_drawn():
    assert len(curve_as_text(curve([(84, 1.0)]), 84)) == 10

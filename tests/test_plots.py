"""Figures show the numbers they were given, with units, and without needing colour."""

from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects as go
import pytest

from sparkmoe import plots, roofline
from sparkmoe.inventory import from_config
from sparkmoe.stats import Interval

KNOWN = Interval(36.0, 35.0, 38.0, 0.95, "t", 3, "boot")
POINT = Interval(90.0, float("nan"), float("nan"), 0.95, "none", 1, "request")
LING = from_config("ling-3.0-flash-fp4")


def figures() -> dict[str, go.Figure]:
    rng = np.random.default_rng(0)
    base = rng.lognormal(6, 0.5, 50)
    sizes = roofline.step_bytes(LING, roofline.Load(drafts=3)).by_part()
    return {
        "ladder": plots.ladder({"baseline": KNOWN, "all three": POINT}, {"baseline": 53.0, "all three": 130.0}),
        "roofline": plots.roofline(
            {"baseline": (4.8e9, KNOWN), "all three": (2.2e9, POINT)}, {"nominal": 273.0, "measured": 233.0}
        ),
        "step_bars": plots.step_bars({part: 1 + i for i, part in enumerate(sizes)}, sizes),
        "top_kernels": plots.top_kernels({f"kernel {i}" * 20: (0.1 * i, i) for i in range(30)}),
        "draft_sweep": plots.draft_sweep(roofline.sweep(LING, 233, [0.8]), {0: KNOWN, 3: POINT}),
        "users_sweep": plots.users_sweep({"plain": {1: 80.0, 4: 150.0}, "with drafts": {1: 120.0, 4: 160.0}}),
        "accept_histogram": plots.accept_histogram({"a": [10, 20, 70], "b": [50, 30, 20]}),
        "length_scatter": plots.length_scatter(base, base * rng.lognormal(0, 0.2, 50)),
    }


UNITS = ("(tok/s)", "(ms)", "(GB)", "(%)", "(tokens)")


@pytest.mark.parametrize("name", list(figures()))
def test_axes_are_named_with_their_units_and_nothing_is_told_by_colour_alone(name: str) -> None:
    figure = figures()[name]
    content = json.loads(figure.to_json())
    axes = [axis for key, axis in content["layout"].items() if key.startswith("yaxis")]
    titles = [axis["title"]["text"] for axis in axes] + [content["layout"]["xaxis"].get("title", {}).get("text", "")]
    assert all(titles[: len(axes)])
    assert any(title.endswith(UNITS) for title in titles)
    assert content["layout"]["title"]["text"]
    # What can be told apart by colour can be told apart without: the looks minus colour are as many as the names.
    looks = set()
    for trace in content["data"]:
        marker = trace.get("marker", {})
        shape = (marker.get("pattern") or {}).get("shape")
        text = trace.get("text")
        told = tuple(shape) if isinstance(shape, list) else shape
        label = tuple(text) if isinstance(text, list) and trace.get("type") == "bar" and name == "step_bars" else None
        looks.add(
            (
                trace["type"],
                told,
                marker.get("symbol"),
                trace.get("line", {}).get("dash"),
                bool(label and label[0]),
                told,
            )
        )
    names = {trace["name"] for trace in content["data"] if trace.get("name")}
    if name != "step_bars":  # more parts than hatchings: there each large block carries its name, checked below
        assert len(looks) >= len(names)
    assert "NaN" not in figure.to_json()


def test_ladder_has_whiskers_where_the_interval_is_known_and_the_ceiling() -> None:
    bars, ceiling = figures()["ladder"].data
    assert list(bars.y) == [36.0, 90.0]
    assert (list(bars.error_y.array), list(bars.error_y.arrayminus)) == ([2.0, 0], [1.0, 0])
    assert list(ceiling.y) == [53.0, 130.0]
    assert len(set(bars.marker.pattern.shape)) == 2
    assert not plots.ladder({"baseline": KNOWN}).layout.showlegend


def test_roofline_lines_are_the_bandwidth() -> None:
    nominal, measured, first, _ = figures()["roofline"].data
    assert np.allclose(np.array(nominal.x) * np.array(nominal.y), 273)
    assert np.allclose(np.array(measured.x) * np.array(measured.y), 233)
    assert nominal.line.dash != measured.line.dash
    assert (first.x[0], first.y[0]) == (4.8, 36.0)


def test_step_bars_stack_to_the_totals_and_name_large_blocks() -> None:
    sizes = roofline.step_bytes(LING).by_part()
    ms = {part: 1.0 for part in sizes if part != "norms"} | {"sampling": 0.01}
    figure = plots.step_bars(ms, sizes)
    by_axis: dict[str, float] = {}
    for bar in figure.data:
        by_axis[bar.yaxis] = by_axis.get(bar.yaxis, 0) + bar.y[0]
    assert by_axis["y"] == pytest.approx(sum(ms.values()))
    assert by_axis["y2"] == pytest.approx(sum(sizes.values()) / 1e9)
    kda = next(bar for bar in figure.data if bar.name == "kda" and bar.yaxis == "y2")
    assert kda.text[0] == "kda 2.21"
    looks = {(bar.marker.pattern.shape, bar.marker.color) for bar in figure.data}
    assert len(looks) == len({bar.name for bar in figure.data}) == len(ms)
    assert {"norms", "sampling"} & {bar.name for bar in figure.data} == set()  # below 1 % in both: in `rest`


def test_sweep_histogram_scatter_and_kernels_show_their_numbers() -> None:
    made = figures()
    curve, points = made["draft_sweep"].data
    assert list(curve.x) == list(range(9))
    assert curve.line.dash == "dash"
    assert list(points.x) == [0, 3]
    first, second = made["accept_histogram"].data
    assert list(first.y) == [10, 20, 70]
    assert "accept length 2.60" in first.name
    assert first.marker.pattern.shape != second.marker.pattern.shape
    longer, shorter, equal = made["length_scatter"].data
    assert len(longer.x) + len(shorter.x) == 50
    assert all(y > x for x, y in zip(longer.x, longer.y, strict=True))
    assert longer.marker.symbol != shorter.marker.symbol
    assert list(equal.x) == list(equal.y)
    kernels = made["top_kernels"].data[0]
    assert len(kernels.x) == 15
    assert max(map(len, kernels.y)) <= 60
    assert kernels.x[-1] == max(kernels.x) == pytest.approx(2.9)

"""Figures that say the same in black and white.

One reader in twelve does not see these colours as drawn, and reports are printed. So nothing here is told by colour
alone: bars differ by hatching, lines by dashes, points by symbol, and each is named where it stands. Every axis has a
unit, every measured value its interval, and wherever there is a physical ceiling it is drawn, because a speed without
its ceiling says nothing about what is left to gain. No second y axis, no third dimension: two quantities get two
panels.

The functions take what `stats`, `roofline` and `breakdown` return and give a Plotly figure back; they compute nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from sparkmoe.roofline import Prediction
from sparkmoe.stats import Interval

# Bars: Paul Tol's light palette, pale enough for black text. Points: Okabe and Ito's. Both made for colour blindness.
TINTS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#DDDDDD")
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "/", "x", "-", ".", "\\", "+", "|")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "triangle-down")
_AROUND = ("bottom center", "middle left", "top center", "middle right")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def _figure(title: str, x: str, y: str, **layout: Any) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(template="simple_white", title=title, xaxis_title=x, yaxis_title=y, **layout)
    return figure


def _whiskers(intervals: Sequence[Interval], scale: float = 1.0) -> dict[str, Any]:
    """Plotly's error bars for intervals; one that is not known gets none."""
    up = [(i.high - i.estimate) * scale if i.known else 0 for i in intervals]
    down = [(i.estimate - i.low) * scale if i.known else 0 for i in intervals]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": "black", "thickness": 1.5}


def _hatch(k: int) -> dict[str, Any]:
    """Look of the k-th kind of bar; beyond eight kinds, colour and hatching go on in different steps."""
    pattern = {"shape": HATCHES[k % len(HATCHES)], "fgcolor": "black", "size": 10, "solidity": 0.12}
    color = TINTS[(k + k // len(TINTS)) % len(TINTS)]
    return {"color": color, "pattern": pattern, "line": {"color": "black", "width": 1}}


def ladder(
    speeds: Mapping[str, Interval],
    ceilings: Mapping[str, float] | None = None,
    *,
    title: str = "Decoding speed by recipe",
) -> go.Figure:
    """Bars of tok/s per recipe with whiskers, and a thick line per recipe at its ceiling (tok/s) where one is known."""
    names, values = list(speeds), list(speeds.values())
    figure = _figure(title, "recipe", "decoding speed (tok/s)", showlegend=bool(ceilings), bargap=0.35)
    hatches = [HATCHES[k % len(HATCHES)] for k in range(len(names))]
    figure.add_bar(
        x=names, y=[i.estimate for i in values], error_y=_whiskers(values), name="measured, 95 % interval",
        marker=_hatch(0) | {"pattern": _hatch(0)["pattern"] | {"shape": hatches}},
        text=[f"<b>{i.estimate:.1f}</b>" for i in values], textposition="inside", insidetextanchor="middle",
        textfont={"color": "black", "size": 14}, textangle=0,
    )  # fmt: skip
    if ceilings:
        known = [name for name in names if name in ceilings]
        figure.add_scatter(
            x=known, y=[ceilings[name] for name in known], mode="markers+text", name="ceiling: bytes ÷ bandwidth",
            marker={"symbol": "line-ew", "size": 46, "line": {"width": 3, "color": "black"}},
            text=[f"ceiling {ceilings[name]:.0f}" for name in known], textposition="top center",
        )  # fmt: skip
    top = max([i.high if i.known else i.estimate for i in values] + list((ceilings or {}).values()))
    figure.update_yaxes(range=[0, 1.3 * top])
    return figure


def roofline(
    points: Mapping[str, tuple[float, Interval]],
    bandwidths: Mapping[str, float],
    *,
    title: str = "Roofline of decoding",
) -> go.Figure:
    """Each recipe at (GB read per token, tok/s) under the lines tok/s = bandwidth ÷ bytes.

    `points`: name → (bytes per token, measured tok/s); `bandwidths`: name ("nominal", "measured") → GB/s.
    """
    figure = _figure(title, "read per token (GB)", "decoding speed (tok/s)")
    sizes = np.array([size for size, _ in points.values()]) / 1e9
    span = np.geomspace(sizes.min() / 4, sizes.max() * 4, 60)  # room for the names
    for k, (name, gb_s) in enumerate(bandwidths.items()):
        figure.add_scatter(
            x=span, y=gb_s / span, mode="lines", name=f"ceiling, {name} {gb_s:.0f} GB/s",
            line={"dash": DASHES[k % len(DASHES)], "color": "black"},
        )  # fmt: skip
    for k, (name, (size, speed)) in enumerate(points.items()):
        figure.add_scatter(
            x=[size / 1e9], y=[speed.estimate], error_y=_whiskers([speed]), mode="markers+text", name=name, text=[name],
            textposition=_AROUND[k % len(_AROUND)],  # neighbours by number are often neighbours in the plot
            marker={"symbol": SYMBOLS[k % len(SYMBOLS)], "size": 12, "color": COLORS[k % len(COLORS)]},
        )  # fmt: skip
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def step_bars(
    ms: Mapping[str, float], size: Mapping[str, float], *, title: str = "One decode step: its time and its bytes"
) -> go.Figure:
    """Two panels, a step's time (ms) and what it reads (bytes), stacked by the same parts in the same hatching.

    Parts below 1 % in both are drawn together as `rest`. What is read is in GB, that of a miniature in MB.
    """
    read, scale = ("GB", 1e9) if sum(size.values()) >= 5e8 else ("MB", 1e6)
    panels = [_with_rest(ms, size), _with_rest(size, ms)]
    figure = make_subplots(rows=1, cols=2, subplot_titles=("time", "read"), horizontal_spacing=0.2)
    shares = [{part: value / sum(panel.values()) for part, value in panel.items()} for panel in panels]
    parts = sorted({*panels[0], *panels[1]}, key=lambda part: -sum(share.get(part, 0.0) for share in shares))
    for k, part in enumerate(parts):
        for column, value, unit in ((1, panels[0].get(part, 0.0), "ms"), (2, panels[1].get(part, 0.0) / scale, read)):
            large = shares[column - 1].get(part, 0.0) > 0.06
            figure.add_bar(
                x=["step"], y=[value], name=part, legendgroup=part, showlegend=column == 1, marker=_hatch(k), row=1,
                col=column, text=[f"{part} {value:.2f}" if large else ""], insidetextanchor="middle",
                hovertemplate=f"{part}: %{{y:.3f}} {unit}<extra></extra>",
                insidetextfont={"color": "black"}, constraintext="none",
            )  # fmt: skip
    figure.update_layout(template="simple_white", title=title, barmode="stack", legend_title="part")
    figure.update_yaxes(title_text="time per step (ms)", row=1, col=1)
    figure.update_yaxes(title_text=f"read per step ({read})", row=1, col=2)
    return figure


def _with_rest(values: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """`values` with the parts that are below 1 % here and in `others` summed up as `rest`."""
    small = {
        part
        for part in values
        if values[part] < 0.01 * sum(values.values()) and others.get(part, 0.0) < 0.01 * sum(others.values())
    }
    kept = {part: value for part, value in values.items() if part not in small}
    return kept | ({"rest": sum(values[part] for part in small)} if small else {})


def top_kernels(
    top: Mapping[str, tuple[float, float]], *, count: int = 15, title: str = "Longest kernels"
) -> go.Figure:
    """Horizontal bars of the kernels with the most time per step; `top` is `Breakdown.top`."""
    rows = sorted(top.items(), key=lambda item: item[1][0])[-count:]
    names = [name for name, _ in rows]
    figure = _figure(title, "time per step (ms)", "kernel", showlegend=False)
    figure.add_bar(
        x=[ms for _, (ms, _) in rows], y=[name if len(name) <= 60 else name[:57] + "…" for name in names],
        orientation="h", marker=_hatch(0), text=[f"{calls:.0f} calls" for _, (_, calls) in rows],
        textposition="outside", cliponaxis=False,
        customdata=names, hovertemplate="%{customdata}: %{x:.3f} ms<extra></extra>",
    )  # fmt: skip
    return figure


def draft_sweep(
    predicted: Mapping[int, Prediction], measured: Mapping[int, Interval], *, title: str = "How many drafts?"
) -> go.Figure:
    """Time per token (ms) over the number of drafts K: the prediction as a curve, measurements as points."""
    figure = _figure(title, "drafts per step, K", "time per output token (ms)")
    figure.add_scatter(
        x=list(predicted), y=[p.tpot_ms for p in predicted.values()], mode="lines+markers", name="predicted",
        line={"dash": "dash", "color": "black"}, marker={"symbol": "circle-open", "size": 8},
        text=[f"accept length {p.accept_length:.2f}" for p in predicted.values()],
    )  # fmt: skip
    values = list(measured.values())
    figure.add_scatter(
        x=list(measured), y=[i.estimate for i in values], error_y=_whiskers(values), mode="markers",
        name="measured, 95 % interval", marker={"symbol": "diamond", "size": 11, "color": COLORS[0]},
    )  # fmt: skip
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    return figure


def users_sweep(
    tok_s: Mapping[str, Mapping[int, float]], *, title: str = "All users together, by their number"
) -> go.Figure:
    """Tokens a second of all users together over the number of users, a line per arm."""
    figure = _figure(title, "users at once", "decoding speed of all users (tok/s)")
    for k, (name, rates) in enumerate(tok_s.items()):
        figure.add_scatter(
            x=list(rates), y=list(rates.values()), mode="lines+markers", name=name,
            line={"dash": DASHES[k % len(DASHES)], "color": COLORS[k % len(COLORS)]},
            marker={"symbol": SYMBOLS[k % len(SYMBOLS)], "size": 10},
        )  # fmt: skip
    figure.update_xaxes(tickvals=sorted({n for rates in tok_s.values() for n in rates}))
    figure.update_yaxes(rangemode="tozero")
    return figure


def accept_histogram(histograms: Mapping[str, Sequence[int]], *, title: str = "Accepted drafts per step") -> go.Figure:
    """Share of verify steps (%) that accepted exactly k drafts, by arm; the legend gives the accept length."""
    figure = _figure(title, "drafts accepted in a step", "share of verify steps (%)", barmode="group")
    for k, (name, counts) in enumerate(histograms.items()):
        total = sum(counts) or 1
        length = 1 + sum(i * n for i, n in enumerate(counts)) / total
        figure.add_bar(
            x=list(range(len(counts))), y=[100 * n / total for n in counts], marker=_hatch(k),
            name=f"{name}: accept length {length:.2f}", text=[str(n) for n in counts], textposition="outside",
        )  # fmt: skip
    figure.update_xaxes(dtick=1)
    return figure


def length_scatter(
    base: ArrayLike, new: ArrayLike, *, names: tuple[str, str] = ("baseline", "all three"), title: str = "Output length"
) -> go.Figure:
    """Output tokens of the same problems in two arms, one point a problem; on the line both are equally long."""
    x, y = np.asarray(base, dtype=float), np.asarray(new, dtype=float)
    figure = _figure(title, f"output of {names[0]} (tokens)", f"output of {names[1]} (tokens)")
    longer = y > x
    for k, (mask, what) in enumerate(((longer, f"{names[1]} longer"), (~longer, f"{names[1]} not longer"))):
        figure.add_scatter(
            x=x[mask], y=y[mask], mode="markers", name=f"{what}: {int(mask.sum())}",
            marker={"symbol": f"{SYMBOLS[k]}-open", "size": 6, "color": COLORS[k]},
        )  # fmt: skip
    ends = [max(1.0, min(x.min(), y.min())), max(x.max(), y.max())]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dash", "color": "black"})
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure

"""The training curves of the bundled model as a figure: `python -m sparkmoe.nano.curves OUT.html`.

Two panels over steps: the losses (next token, and each draft step), and the mean accept length of three greedy drafts
on held-out problems. A dashed line marks where the learning rate begins to fall and weights are rounded. The
accept length of problems in wholly unseen wording stays behind: there the draft is less sure as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparkmoe.nano import bundle, problems

DASHES = ("solid", "dash", "dot", "dashdot")


def points(path: Path | None = None) -> list[dict[str, Any]]:
    """One dictionary a logged step, as `sparkmoe.nano.train` wrote them."""
    return json.loads((path or bundle.BUNDLE / "curves.json").read_text())


def figure(curve: list[dict[str, Any]], decay_step: int | None = None) -> go.Figure:
    """Losses on a logarithmic axis above accept lengths. `decay_step` is where rate and rounding change."""
    out = make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=("Loss", "Accept length, three drafts"))
    names = ["loss", *(n for n in curve[0] if n.startswith("draft "))]
    for name, dash in zip(names, DASHES, strict=False):
        series = [(p["step"], p[name]) for p in curve]
        label = "next token" if name == "loss" else name.removesuffix(" loss")
        out.add_scatter(
            x=[s for s, _ in series], y=[y for _, y in series], name=label, line={"dash": dash}, row=1, col=1
        )
    for split, dash in zip(problems.SPLITS, DASHES, strict=False):
        series = [(p["step"], p[f"{split} accept"]) for p in curve if f"{split} accept" in p]
        out.add_scatter(
            x=[s for s, _ in series], y=[y for _, y in series], name=split, line={"dash": dash}, row=2, col=1
        )
    if decay_step:
        out.add_vline(x=decay_step, line_dash="dash", line_color="gray")
    out.update_yaxes(type="log", title="nats a token", row=1, col=1)
    out.update_yaxes(title="tokens a verification", row=2, col=1)
    out.update_xaxes(title="optimizer step", row=2, col=1)
    return out


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m sparkmoe.nano.curves OUT.html")
    curve = points()
    figure(curve, decay_step=round(0.6 * curve[-1]["step"])).write_html(sys.argv[1], include_plotlyjs="cdn")


if __name__ == "__main__":
    main()

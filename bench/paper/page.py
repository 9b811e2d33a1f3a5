"""The page with every figure that was played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bench.paper.figures import Measures, PaperFigure, Play, factors_of, ratio, sensitivity, value_of
from gateway.cli.report import HUES, PARTS, STYLE


def page(
    drawn: Mapping[str, PaperFigure],
    done: Mapping[Play, Measures],
    notes: Sequence[str],
    spreads: Mapping[str, Mapping[str, tuple[float, float, float]]],
) -> str:
    """Return the page with every figure that was played; ``spreads``: mean and interval of factors over seeds."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>The paper, played here</title><style>{STYLE}</style>"
        "<main><h1>ARL-Tangram's evaluation, played here</h1>"
        "<p class=dim>Simulated on the real scheduler; seconds are virtual. python -m bench.paper</p>"
    ]
    for key, figure in drawn.items():
        parts.append(f"<section><h2>{escape(figure.title)}</h2><p>The paper: {escape(figure.reported)}</p>")
        rows = factors_of(figure, done)
        if rows:
            parts.append("<table><tr><th>baseline over ours<th class=n>paper<th class=n>here</tr>")
            for name, (here, paper) in rows.items():
                spread = spreads.get(key, {}).get(name)
                shown = _times(here) if spread is None else "{:.2f}x ({:.2f} to {:.2f})".format(*spread)
                parts.append(f"<tr><td>{escape(name)}<td class=n>{_times(paper)}<td class=n>{shown}</tr>")
            parts.append("</table>")
        if figure.value == "windows":
            failed = {
                play: done[play]["failures"] for line in figure.lines.values() for _, play in line if play in done
            }
            listed = ", ".join(f"{each.workload} ({each.policy}) {count}" for each, count in failed.items() if count)
            parts.append(f"<p>Actions that never ended well: {escape(listed) or 'none'}.</p>")
        parts.append(
            {"stages": _stages, "breakdown": _stages, "trainers": _trainers}.get(figure.value, _chart)(figure, done)
        )
        parts.append(f"<p class=dim>{escape(figure.why)}</p></section>")
    parts += [f"<section><h2>What the paper does not give</h2>{_sensitivity_table(done)}</section>"]
    parts += [f"<p class=dim>{escape(note)}</p>" for note in notes]
    return "\n".join([*parts, "</main></html>\n"])


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def _chart(figure: PaperFigure, done: Mapping[Play, Measures]) -> str:
    """Lines over one axis; the other begins at 0."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, line in figure.lines.items():
        if figure.value == "windows":
            lines[name] = [tuple(each) for _, play in line if play in done for each in done[play]["windows"]]  # type: ignore[union-attr,arg-type]
        else:
            lines[name] = [(at, value_of(done[play], figure.value)) for at, play in line if play in done]
    points = [point for line in lines.values() for point in line]
    if not points:
        return "<p>Not played.</p>"
    right, top = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    wide, high, left = 760, 240, 60

    def at(point: tuple[float, float]) -> str:
        return f"{left + (wide - left - 10) * point[0] / right:.1f},{10 + (high - 40) * (1 - point[1] / top):.1f}"

    shown = [f"<svg width={wide} height={high} role=img aria-label='{escape(figure.title)}'>"]
    for part in (0.0, 0.5, 1.0):
        y = 10 + (high - 40) * (1 - part)
        shown.append(f"<line x1={left} x2={wide - 10} y1={y:.0f} y2={y:.0f} stroke='#86909C' stroke-opacity=.3 />")
        shown.append(f"<text x=0 y={y + 4:.0f}>{part * top:.3g} s</text>")
        shown.append(f"<text x={left + (wide - left - 60) * part:.0f} y={high - 14}>{part * right:.4g}</text>")
    shown.append(f"<text x={wide / 2:.0f} y={high - 2}>{escape(figure.x)}</text>")
    legend = []
    for (name, drawn), hue in zip(lines.items(), HUES * 3, strict=False):
        shown.append(f"<polyline fill=none stroke='{hue}' stroke-width=2 points='{' '.join(map(at, drawn))}'/>")
        shown += [f"<circle r=3 fill='{hue}' cx={at(one).split(',')[0]} cy={at(one).split(',')[1]} />" for one in drawn]
        legend.append(f"<i class=sw style='background:{hue}'></i>{escape(name)}")
    return f"<p>{''.join(legend)}</p>{''.join(shown)}</svg>"


def _stages(figure: PaperFigure, done: Mapping[Play, Measures]) -> str:
    """A bar for each line, cut into its stages."""
    stages = ("generation", "tools", "reward") if figure.value == "stages" else ("queue", "overhead", "execution")
    hues = dict(zip(stages, PARTS.values(), strict=True))
    rows = {
        name: [value_of(done[line[0][1]], stage) for stage in stages]
        for name, line in figure.lines.items()
        if line[0][1] in done
    }
    most = max((sum(row) for row in rows.values()), default=1.0) or 1.0
    shown = ["".join(f"<i class=sw style='background:{hue}'></i>{stage}" for stage, hue in hues.items()), "<table>"]
    for name, row in rows.items():
        x, bars = 0.0, ""
        for hue, value in zip(hues.values(), row, strict=True):
            bars += f"<rect x={x:.1f} width={480 * value / most:.1f} height=13 fill='{hue}'/>"
            x += 480 * value / most
        cells = "".join(f"<td class=n>{value:.3f}" for value in row)
        shown.append(f"<tr><td>{escape(name)}{cells}<td><svg width=480 height=13>{bars}</svg></tr>")
    return "".join([*shown, "</table>"])


def _trainers(figure: PaperFigure, done: Mapping[Play, Measures]) -> str:
    """A row for each line: what its rollouts take, and its steps by how the trainer waits."""
    columns = ("rollouts", "synchronous", "one_step_off")
    head = "".join(f"<th class=n>{each.replace('_', ' ')}, s" for each in columns)
    rows = [
        f"<tr><td>{escape(name)}" + "".join(f"<td class=n>{value_of(done[play], each):.0f}" for each in columns)
        for name, ((_, play), *_) in figure.lines.items()
        if play in done
    ]
    return f"<table><tr><th>{head}</tr>{'</tr>'.join(rows)}</tr></table>"


def _sensitivity_table(done: Mapping[Play, Measures]) -> str:
    head = "<table><tr><th>assumed<th class=n>half<th class=n>as it is<th class=n>double</tr>"
    rows = [
        f"<tr><td>{escape(name)}" + "".join(f"<td class=n>{_times(ratio(done, *pair))}" for pair in row) + "</tr>"
        for name, row in sensitivity().items()
    ]
    return f"{head}{''.join(rows)}</table><p class=dim>Baseline over ours, on a fifth of the cluster.</p>"

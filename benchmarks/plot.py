"""Draws the figures of the benchmarks from their JSON files.

python benchmarks/plot.py benchmarks/results benchmarks/figures
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
OURS, THEIRS, FLOOR = "#2a6fbb", "#c8553d", "#7a7a7a"


def draw(results: Path, figures: Path) -> Iterator[Path]:
    """Draws every figure whose numbers exist, and returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figures.mkdir(parents=True, exist_ok=True)
    for name, function in FIGURES.items():
        source = results / f"{name}.json"
        if not source.exists():
            continue
        figure = function(plt, json.loads(source.read_text()))
        file = figures / f"{name}.png"
        figure.savefig(file, dpi=90, bbox_inches="tight")
        plt.close(figure)
        yield file


def layers(plt: Any, found: Mapping[str, Any]) -> Any:
    """Ratios of one layer, by group and pass."""
    kinds = [(g, p) for g in ("np", "hnp") for p in ("forward", "forward+backward")]
    figure, axes = plt.subplots(2, 2, figsize=(8, 4.6), sharey=True)
    for axis, (group, which) in zip(axes.flat, kinds, strict=True):
        rows = [r for r in found["rows"] if (r["group"], r["pass"]) == (group, which)]
        _bars(axis, rows, "case", ("ours / nfn", "ours / products"), (OURS, FLOOR))
        axis.set_title(f"{group.upper()}, {which}")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def mixed(plt: Any, found: Mapping[str, Any]) -> Any:
    """Ratios of a mixed batch."""
    rows = [{**r, "case": f"{r['networks']} networks,\n{r['channels']} ch."} for r in found["rows"]]
    columns = ("ours / loop of nfn", "ours / padded nfn", "mixed / uniform, per edge")
    return _one(plt, rows, "case", columns, (OURS, THEIRS, FLOOR), "Networks of all widths")


def memory(plt: Any, found: Mapping[str, Any]) -> Any:
    """Peak memory of a training step."""
    columns = ("ours / nfn", "recomputing / nfn")
    return _one(plt, found["rows"], "case", columns, (OURS, FLOOR), found["title"])


def step(plt: Any, found: Mapping[str, Any]) -> Any:
    """Time of a training step."""
    return _one(plt, found["rows"], "case", ("ours / nfn",), (OURS,), found["title"])


def scaling(plt: Any, found: Mapping[str, Any]) -> Any:
    """Time and memory against edges, channels and networks."""
    figure, axes = plt.subplots(2, 3, figsize=(8, 4.6))
    for column, against in enumerate(("edges", "channels", "networks")):
        rows = [r for r in found["rows"] if r["against"] == against]
        x = [r[against] for r in rows]
        top, bottom = axes[0, column], axes[1, column]
        for name, color in (("ours ms", OURS), ("products ms", FLOOR)):
            top.loglog(x, [r[name] for r in rows], "o-", color=color, ms=3, label=name)
        bottom.loglog(x, [r["ours peak MB"] for r in rows], "o-", color=OURS, ms=3)
        bottom.set_xlabel(against)
        if against == "networks":  # At a constant number of edges, the expected line is level.
            for axis in (top, bottom):
                axis.set_yscale("linear")
                axis.set_ylim(bottom=0)
    slopes = found["notes"]
    for line in axes[0, 0].get_lines():
        slope = next(v for k, v in slopes.items() if f" {line.get_label()} " in f" {k} ")
        line.set_label(f"{line.get_label()[:-3]}, slope {slope:.2f}")
    axes[0, 0].legend(frameon=False)
    axes[0, 0].set_ylabel("milliseconds")
    axes[1, 0].set_ylabel("peak MB")
    figure.tight_layout()
    return figure


def _one(
    plt: Any, rows: Rows, key: str, columns: Sequence[str], colors: Sequence[str], title: str
) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2.6))
    _bars(axis, rows, key, columns, colors)
    axis.set_title(title)
    axis.legend(frameon=False)
    return figure


def _bars(axis: Any, rows: Rows, key: str, columns: Sequence[str], colors: Sequence[str]) -> None:
    """Draws groups of bars with their values; 1 means equal time, or equal memory."""
    width = 0.8 / len(columns)
    for i, (column, color) in enumerate(zip(columns, colors, strict=True)):
        places = [n + (i - (len(columns) - 1) / 2) * width for n in range(len(rows))]
        bars = axis.bar(places, [r[column] for r in rows], width, color=color, label=column)
        axis.bar_label(bars, fmt="%.2g", fontsize=6)
    axis.axhline(1, color="black", lw=0.6)
    axis.set_xticks(range(len(rows)), [r[key] for r in rows])


FIGURES = {
    "nf_layer": layers,
    "mixed_batch": mixed,
    "memory": memory,
    "scaling": scaling,
    "train_step": step,
}

if __name__ == "__main__":
    for drawn in draw(*map(Path, sys.argv[1:3])):
        print(drawn)

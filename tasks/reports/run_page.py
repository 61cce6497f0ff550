"""The report of one run: its numbers, figures and options, and the command to repeat it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nfn_graph.tasks.option_checks import flag
from nfn_graph.tasks.reports.page import Section, Shown, Table, write_report
from nfn_graph.tasks.reports.runs import (
    EVALUATES,
    Run,
    format_value,
    metric_name,
    read_run,
    reads,
    scalar_metrics,
)

# The metric that a report begins with: the first of these that a task has.
_FIRST = ("tau", "accuracy", "mse", "overlap")
# Kinds of figures in the order of a report; the rest of a file's name says of what.
_FIGURES = {
    "scatter": "Predicted against true values on {}. On the dashed line both are equal.",
    "confusion": "Confusion matrix on {}: a row for each true class, with counts.",
    "curves": "Learning curves, by epoch.",
    "probes": "The inputs that the model runs networks on: images, or points on a background of "
    "how much the outputs of the networks differ there.",
    "inrs": "Networks of {}, drawn back, each with the class that the model took it for.",
    "edits": "Networks of {}: what they showed, what they show after the edit, what they were to.",
    "scores": "Networks of {}: the score of every weight against its initial value, by layer.",
}


def run_report(run: Path) -> Path:
    """Writes the `report.html` of a finished run from what is in its folder."""
    found = read_run(run)
    options, metrics = found.options, found.metrics
    sections = [
        Section("Results", _headline(found), [_summary(metrics)]),
        Section("Figures", figures=_figures(run / "figures")),
        Section("Options", tables=[_listing(options, "", "option", "value")]),
        Section("Data and versions", tables=_origins(found.config)),
        Section("Repeat this run", code=repeat_command(found.task, options)),
    ]
    title = f"{found.task}: {options.get('model', 'model')}, seed {options.get('seed', 'unknown')}"
    kept = [s for s in sections if s.text or s.tables or s.figures or s.code]
    return write_report(run / "report.html", title, kept)


def repeat_command(task: str, options: Mapping[str, object]) -> str:
    """The command line that gives these options, quoted for a shell, an option per line."""
    words = [f"nfn-graph train {shlex.quote(task)}"]
    for name, value in options.items():
        words.append(_option(name, value))
    return " \\\n  ".join(words)


def _headline(run: Run) -> str:
    test = scalar_metrics(run.metrics["test"])
    name = next((m for m in _FIRST if m in test), None)
    text = f"{run.options.get('model', 'The model')} on the test split"
    if name is not None:
        text += f": {metric_name(name)} {format_value(test[name])}"
    if "networks" in test:
        text += f", {test['networks']:,} networks"
    if reads(run.options) == EVALUATES:
        text += f". It evaluates the networks, on {run.options.get('probes')} inputs"
    facts = [
        (f"{run.metrics.get('epochs')} epochs", "epochs"),
        (f"best epoch {run.metrics.get('best_epoch')}", "best_epoch"),
        (f"{run.metrics.get('parameters', 0):,} parameters", "parameters"),
        (f"{run.metrics.get('seconds', 0):.0f} seconds", "seconds"),
    ]
    known = ", ".join(fact for fact, key in facts if run.metrics.get(key) is not None)
    return f"{text}.\n\nTraining: {known}." if known else f"{text}."


def _summary(metrics: Mapping[str, Any]) -> Table:
    parts = {name: metrics[name] for name in ("test", "validation") if metrics.get(name)}
    parts |= metrics.get("evaluations") or {}
    values = {name: scalar_metrics(part) for name, part in parts.items()}
    names = list(dict.fromkeys(metric for part in values.values() for metric in part))
    rows = [[name, *(part.get(metric) for metric in names)] for name, part in values.items()]
    return Table(["networks of", *map(metric_name, names)], rows)


def _figures(folder: Path) -> list[Shown]:
    """The figures of a run: by kind, the test split first, then evaluations, then validation."""

    def place(path: Path) -> tuple[int, int, str]:
        kind, _, part = path.stem.partition("-")
        kinds = [*_FIGURES, kind]
        return kinds.index(kind), {"test": 0, "validation": 2}.get(part, 1), path.name

    shown = []
    for path in sorted(folder.glob("*.png"), key=place):
        kind, _, part = path.stem.partition("-")
        of = f"the {part or 'test'} split" if part in ("", "test", "validation") else part
        other = f"{path.stem.replace('-', ' ').capitalize()}."
        caption = _FIGURES[kind].format(of) if kind in _FIGURES else other
        shown.append(Shown(path, caption, caption))
    return shown


def _origins(config: Mapping[str, Any]) -> list[Table]:
    parts = {"zoo": ("Zoo", "property", "value"), "versions": ("Versions", "package", "version")}
    return [_listing(config[name], *titles) for name, titles in parts.items() if config.get(name)]


def _listing(values: Mapping[str, Any], caption: str, name: str, value: str) -> Table:
    rows = [[key, x if isinstance(x, str) else json.dumps(x)] for key, x in values.items()]
    return Table([name, value], rows, caption)


def _option(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([flag(name), *(shlex.quote(str(x)) for x in values)])

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
    HEADLINE,
    Run,
    describe_model,
    format_value,
    loss_name,
    metric_name,
    read_run,
    reads,
    scalar_metrics,
)

# Kinds of figures in the order of a report; the rest of a file's name is the split or evaluation.
_FIGURES = {
    "scatter": "Predicted against true values on {}. On the dashed line, both are equal.",
    "confusion": "Confusion matrix on {}: one row for each true class, with counts.",
    "curves": "Learning curves by epoch.",
    "probes": "The inputs that the model runs networks on: images, or points on a background that "
    "shows how much the outputs of the networks differ.",
    "inrs": "Networks of {}, rendered, each with the class that the model predicts.",
    "edits": "Networks of {}: what they showed, what they show after the edit, and the target.",
    "scores": "Networks of {}: the score of every weight against its initial value, by layer.",
}
# Figures with pictures in them, which keep their colours on a dark page.
_PICTURES = ("probes", "inrs", "edits")


def run_report(run: Path) -> Path:
    """Writes the `report.html` of a finished run from the files in its folder.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import run_report
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Path(name)
        ...     config = '{"task": "regress", "options": {"model": "nfn-np", "seed": 0}}'
        ...     _ = (folder / "config.json").write_text(config)
        ...     _ = (folder / "metrics.json").write_text('{"test": {"tau": 0.8}}')
        ...     print("a Kendall tau of 0.800" in run_report(folder).read_text("utf-8"))
        True
    """
    found = read_run(run)
    options, metrics = found.options, found.metrics
    sections = [
        Section("Results", _headline(found), [_summary(metrics)]),
        Section("Figures", figures=_figures(run / "figures", loss_name(found.task, options))),
        Section("Options", tables=[_listing(options, "", "option", "value")]),
        Section("Data and versions", tables=_origins(found.config)),
        Section("Repeat this run", code=repeat_command(found.task, options)),
    ]
    title = f"{found.task}: {options.get('model', 'model')}, seed {options.get('seed', 'unknown')}"
    kept = [s for s in sections if s.text or s.tables or s.figures or s.code]
    return write_report(run / "report.html", title, kept)


def repeat_command(task: str, options: Mapping[str, object]) -> str:
    """Returns the shell command with these options, one per line.

    Example:
        >>> from nfn_graph.tasks.reports import repeat_command
        >>> print(repeat_command("regress", {"zoo": "my zoo", "compile": False}))
        nfn-graph train regress \\
          --zoo 'my zoo' \\
          --no-compile
    """
    words = [f"nfn-graph train {shlex.quote(task)}"]
    for name, value in options.items():
        words.append(_option(name, value))
    return " \\\n  ".join(words)


def _headline(run: Run) -> str:
    """Returns three paragraphs: the conclusion, the model, and its training."""
    model = str(run.options.get("model", "The model"))
    about = describe_model(run.task, run.options)
    what = f"{model} is {about}. " if about else ""
    if reads(run.options) == EVALUATES:
        what += f"It evaluates every network on {run.options.get('probes')} inputs."
    else:
        what += "It reads weights and never runs the networks."
    return f"{conclusion(run)}\n\n{what}\n\n{_training(run)}".strip()


def conclusion(run: Run) -> str:
    """Returns one sentence about the numbers of the test split."""
    test = scalar_metrics(run.metrics["test"])
    name = next((m for m in HEADLINE if m in test), None)
    model = run.options.get("model", "The model")
    where = f"{test['networks']:,} test networks" if "networks" in test else "the test split"
    if name is None:
        return f"{model} was evaluated on {where}."
    value = format_value(test[name])
    if name == "tau":
        limit = f"; ties limit it to {test['tau_ceiling']:.3f}" if "tau_ceiling" in test else ""
        return (
            f"On {where}, {model} reaches a Kendall tau of {value} between predicted and true "
            f"values (1 is the same order, 0 is chance{limit})."
        )
    if name == "accuracy":
        rows = [sum(row) for row in run.metrics["test"].get("confusion") or ()]
        chance = f"{max(rows) / sum(rows):.3f}" if any(rows) else ""
        more = f"; always choosing the most frequent class gives {chance}" if chance else ""
        return f"On {where}, {model} reaches an accuracy of {value}{more}."
    if name == "mse" and "relative" in test:
        left = format_value(test["relative"])
        return f"On {where}, {model} leaves {left} of the squared error of unedited networks."
    if name == "overlap" and "overlap_magnitude" in test:
        known = format_value(test["overlap_magnitude"])
        return (
            f"On {where}, the masks of {model} share {value} of their weights with the true masks; "
            f"masks by magnitude share {known}."
        )
    return f"On {where}, {model} reaches a {metric_name(name)} of {value}."


def _training(run: Run) -> str:
    """Says how the model was trained: networks, loss, epochs, time and size, as far as known."""
    counts = (run.config.get("zoo") or {}).get("networks")
    known = counts if isinstance(counts, dict) else {}
    uses = (("train", "training"), ("validation", "validation"), ("test", "the test"))
    networks = [f"{known[part]:,} for {use}" for part, use in uses if part in known]
    loss = loss_name(run.task, run.options)
    metrics = {key: value for key, value in run.metrics.items() if value is not None}
    sentences = [
        f"Numbers of networks: {_series(networks)}." if networks else "",
        f"The loss is the {loss}." if loss else "",
        *(
            text.format(metrics[key])
            for text, key in (
                ("The model has {:,} parameters.", "parameters"),
                ("It was trained for {} epochs.", "epochs"),
                ("The best one was epoch {}, counted from 0.", "best_epoch"),
                ("Training took {:.0f} seconds.", "seconds"),
            )
            if key in metrics
        ),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _series(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _summary(metrics: Mapping[str, Any]) -> Table:
    parts = {name: metrics[name] for name in ("test", "validation") if metrics.get(name)}
    parts |= metrics.get("evaluations") or {}
    values = {name: scalar_metrics(part) for name, part in parts.items()}
    names = list(dict.fromkeys(metric for part in values.values() for metric in part))
    rows = [[name, *(part.get(metric) for metric in names)] for name, part in values.items()]
    return Table(["evaluated on", *map(metric_name, names)], rows)


def _figures(folder: Path, loss: str) -> list[Shown]:
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
        if kind == "curves" and loss:
            caption += f" The loss is the {loss}."
        shown.append(Shown(path, caption, caption, is_plot=kind not in _PICTURES))
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

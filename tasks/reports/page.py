"""Reports: one HTML file with its figures inside, which opens anywhere and asks nothing."""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nfn_graph.converters.files.atomic import replacing
from nfn_graph.tasks.reports.template import PAGE, STYLE
from nfn_graph.tasks.training.folder import RunFolder

# Facts about the data, which no model changes.
BACKGROUND = ("networks", "tau_ceiling", "mse_unedited", "mse_fit", "overlap_magnitude")
_NAMES = {
    "tau": "Kendall tau",
    "tau_ceiling": "tau ceiling",
    "r2": "R²",
    "mae": "MAE",
    "mse": "MSE",
    "mse_unedited": "MSE without an edit",
    "mse_fit": "MSE of the fits",
    "relative": "MSE / without an edit",
    "relative_to_fit": "MSE / of the fits",
    "overlap_magnitude": "overlap by magnitude",
}
# The metric that a report begins with: the first of these that a task has.
_FIRST = ("tau", "accuracy", "mse", "overlap")
_PNG = b"\x89PNG\r\n\x1a\n"
# A figure wider than this, or in relation to its height, gets a row of its own.
_WIDE_PIXELS, _WIDE_RATIO = 1200, 1.6
# Kinds of figures in the order of a report; the rest of a file's name says of what.
_FIGURES = {
    "scatter": "Predicted against true values on {}. On the dashed line both are equal.",
    "confusion": "Confusion matrix on {}: a row for each true class, with counts.",
    "curves": "Learning curves, by epoch.",
    "inrs": "Networks of {}, drawn back, each with the class that the model took it for.",
    "edits": "Networks of {}: what they showed, what they show after the edit, what they were to.",
    "scores": "Networks of {}: the score of every weight against its initial value, by layer.",
}


@dataclass(frozen=True)
class Table:
    """A table; numbers are formatted and stand at the right, None is left blank."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True)
class Shown:
    """A picture with what it shows, once below it and once for those who cannot see it."""

    png_path: Path
    caption: str
    alt: str


@dataclass(frozen=True)
class Section:
    """A part of a report, in this order; blank lines part the text into paragraphs."""

    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Shown] = ()
    code: str = ""


@dataclass(frozen=True)
class Run:
    """What a finished run left in its folder."""

    folder: Path
    task: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]


def write_report(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Writes a report as one HTML file, with a list of its sections if they are more than three.

    Every string is plain text: whatever it holds is shown, none of it acts.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string(PAGE).render(
        title=title, style=Markup(STYLE), sections=[_section(section) for section in sections]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(page, "utf-8")
    return path


def read_run(folder: Path) -> Run:
    """Reads the folder of a finished run."""
    found = {}
    for name in ("config.json", "metrics.json"):
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"Expected a finished run in '{folder}' (got no {name})")
        found[name] = RunFolder(folder).read(name)
    config, metrics = found["config.json"], found["metrics.json"]
    for name, part, kind in (
        ("config.json", "task", str),
        ("config.json", "options", dict),
        ("metrics.json", "test", dict),
    ):
        if not isinstance(found[name].get(part), kind):
            got = type(found[name][part]).__name__ if part in found[name] else "none"
            raise ValueError(f"Expected '{part}' in '{folder / name}' (got {got})")
    evaluations = metrics.get("evaluations") or {}
    described = [config.get("zoo") or {}, evaluations]
    if isinstance(evaluations, dict):
        described += evaluations.values()
    if not all(isinstance(value, dict) for value in described):
        raise ValueError(
            f"Expected the zoo and the evaluations of a run in '{folder}' (got others)"
        )
    return Run(folder, config["task"], config["options"], config, metrics)


def run_report(run: Path, *, defaults: Mapping[str, object] | None = None) -> Path:
    """Writes the `report.html` of a finished run from what is in its folder.

    Args:
        run: The run's folder.
        defaults: The task's default options, which the command to repeat the run leaves out.
    """
    found = read_run(run)
    options, metrics = found.options, found.metrics
    sections = [
        Section("Results", _headline(found), [_summary(metrics)]),
        Section("Figures", figures=_figures(run / "figures")),
        Section("Options", tables=[_listing(options, "", "option", "value")]),
        Section("Data and versions", tables=_origins(found.config)),
        Section("Repeat this run", code=repeat_command(found.task, options, defaults or {})),
    ]
    title = f"{found.task}: {options.get('model', 'model')}, seed {options.get('seed', 'unknown')}"
    kept = [s for s in sections if s.text or s.tables or s.figures or s.code]
    return write_report(run / "report.html", title, kept)


def repeat_command(
    task: str, options: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> str:
    """The command line that gives these options, quoted for a shell, an option per line."""
    words = [f"nfn-graph train {shlex.quote(task)}"]
    for name, value in options.items():
        if not defaults or name not in defaults or defaults[name] != value:
            words += _flag(name, value)
    return " \\\n  ".join(words)


def metric_name(metric: str) -> str:
    """A metric's name for readers."""
    return _NAMES.get(metric, metric.replace("_", " "))


def scalar_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among metrics, without matrices and names; null is NaN."""
    return {
        name: math.nan if value is None else value
        for name, value in metrics.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def format_value(value: object) -> str:
    """A cell of a table: numbers with three decimals, or digits if they are small or large."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.3g}"


def _section(section: Section) -> dict[str, object]:
    return {
        "heading": section.heading,
        "paragraphs": [p for p in section.text.split("\n\n") if p.strip()],
        "tables": [_table(table) for table in section.tables],
        "figures": [_figure(shown) for shown in section.figures],
        "code": section.code,
    }


def _table(table: Table) -> dict[str, object]:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(
                f"Expected rows of {len(table.columns)} cells: {list(table.columns)} (got {row})"
            )
    cells = [
        [row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns))
    ]
    numeric = [bool(column) and all(map(_is_number, column)) for column in cells]
    return {
        "caption": table.caption,
        "columns": list(zip(table.columns, numeric, strict=True)),
        "rows": [
            [(format_value(x), n or _is_number(x)) for x, n in zip(row, numeric, strict=True)]
            for row in table.rows
        ],
    }


def _is_number(value: object) -> bool:
    """Also of a mean with its error, which is text."""
    if isinstance(value, str):
        return " ± " in value
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(shown: Shown) -> dict[str, object]:
    data = shown.png_path.read_bytes()
    if not data.startswith(_PNG) or len(data) < 24:
        raise ValueError(f"Expected a PNG picture (got '{shown.png_path}')")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    return {
        "data": base64.b64encode(data).decode("ascii"),
        "caption": shown.caption,
        "alt": shown.alt,
        "width": width,
        "height": height,
        "wide": width > min(_WIDE_PIXELS, _WIDE_RATIO * height),
    }


def _headline(run: Run) -> str:
    test = scalar_metrics(run.metrics["test"])
    name = next((m for m in _FIRST if m in test), None)
    text = f"{run.options.get('model', 'The model')} on the test split"
    if name is not None:
        text += f": {metric_name(name)} {format_value(test[name])}"
    if "networks" in test:
        text += f", {test['networks']:,} networks"
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


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, Mapping):
        return [word for key, x in value.items() for word in _flag(f"{name}.{key}", x)]
    if isinstance(value, bool):
        parent, dot, leaf = flag.rpartition(".")
        return [f"--{flag}" if value else f"--{parent}{dot}no-{leaf}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [" ".join([f"--{flag}", *(shlex.quote(str(x)) for x in values)])]

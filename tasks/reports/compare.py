"""Runs side by side: the mean and the standard error over seeds."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfn_graph.messages import UserError, one_line
from nfn_graph.tasks.reports.figures import bars, progress, read_curves
from nfn_graph.tasks.reports.page import Section, Shown, Table, print_rows, write_report
from nfn_graph.tasks.reports.runs import (
    BACKGROUND,
    EVALUATES,
    HEADLINE,
    Run,
    describe_model,
    format_value,
    metric_name,
    read_run,
    reads,
    scalar_metrics,
)
from nfn_graph.tasks.training.options import NEUTRAL
from nfn_graph.tasks.training.run_folder import write_csv

_ALWAYS = ("zoo", "model", "preset")
_FACTS = ("parameters", "seconds")
_MISSING = "(none)"
Row = dict[str, Any]
# The seconds of training and the values of a metric.
Course = tuple[list[float], list[float]]


@dataclass(frozen=True)
class _Group:
    """Runs that differ only in their seed, and what distinguishes them from other groups."""

    label: str
    columns: Mapping[str, str]
    runs: Mapping[int, Run]


def compare(runs: Sequence[Path], out: Path | None = None) -> list[Row]:
    """Computes the mean and standard error over seeds for every metric of test and evaluations.

    Runs that agree in all but their seed (and in where they ran) are one group. A row has the
    group's `label`, `task`, `zoo`, `model`, `preset` and the `options` in which groups differ,
    then `part` (`test`, the name of an evaluation, or `run` for parameters and seconds),
    `metric`, `mean`, `standard_error` (None for one seed), `seeds` and `values`.

    Runs that failed or are not finished are left out; :func:`failed_runs` lists them, and so does
    the page.

    Args:
        runs: Folders of runs; a folder with runs in it stands for all of them.
        out: A folder for `compare.html`, `compare.csv`, `compare.png`, and `progress.png`, which
            shows the main metric against the seconds of training; None to write nothing.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import compare
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Path(name)
        ...     config = '{"task": "regress", "options": {"model": "nfn-np", "seed": 0}}'
        ...     _ = (folder / "config.json").write_text(config)
        ...     _ = (folder / "metrics.json").write_text('{"test": {"tau": 0.8}}')
        ...     rows = compare([folder])
        >>> [(row["label"], row["metric"], row["mean"]) for row in rows]
        [('nfn-np', 'tau', 0.8)]
    """
    found, failed = _read(runs)
    if not found:
        folder, reason = next(iter(failed.items()))
        raise UserError(f"Expected at least one finished run (got '{folder}': {reason})")
    _check_one_task(found)
    groups = _groups(found)
    rows = [row for group in groups for row in _rows(group)]
    if out is not None:
        _write(out, rows, groups, failed)
    return rows


def failed_runs(runs: Sequence[Path]) -> dict[Path, str]:
    """Returns the runs that failed or are not finished, with the reason; `compare` skips them.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import failed_runs
        >>> with tempfile.TemporaryDirectory() as name:
        ...     Path(name, "config.json").touch()
        ...     print(list(failed_runs([Path(name)])) == [Path(name)])
        True
    """
    return _read(runs)[1]


def _read(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The finished runs, and the others with the reason."""
    found, failed = [], {}
    for folder in find_runs(folders):
        try:
            found.append(read_run(folder))
        except (OSError, UserError) as error:
            failed[folder] = one_line(error)
    return found, failed


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Finds the runs in folders, each once, in a fixed order.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import find_runs
        >>> with tempfile.TemporaryDirectory() as name:
        ...     for run in ("first", "second"):
        ...         Path(name, run).mkdir()
        ...         Path(name, run, "config.json").touch()
        ...     print([path.name for path in find_runs([Path(name)])])
        ['first', 'second']
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"Expected the folder of a run (got '{folder}')")
        below = []
        for parent, names, files in os.walk(folder):
            names.sort()
            # A run's own folders hold no runs.
            if "config.json" in files:
                names.clear()
                below.append(Path(parent))
        if not below:
            raise UserError(f"Expected at least one run in '{folder}' (got no config.json)")
        for path in below:
            found.setdefault(path.resolve(), path)
    if not found:
        raise UserError("Expected at least one run to compare (got none)")
    return list(found.values())


def print_table(rows: Sequence[Row], failed: Mapping[Path, str] | None = None) -> None:
    """Prints the rows of `compare`: a table per part, a line per group, a column per metric.

    The number of networks and the ceiling of tau are left to the files, for lack of space.

    Args:
        rows: The rows.
        failed: Runs that failed, for a table of their own.

    Example:
        >>> from nfn_graph.tasks.reports import print_table
        >>> row = {"label": "nfn-np", "zoo": "zoo", "model": "nfn-np", "preset": "small"}
        >>> row |= {"options": {}, "part": "test", "metric": "tau", "mean": 0.8}
        >>> row |= {"standard_error": None, "seeds": 1, "values": [0.8]}
        >>> print_table([row])  # doctest: +ELLIPSIS
        Networks of: test...
    """
    for shown in _tables([row for row in rows if row["metric"] not in BACKGROUND]):
        print_rows(shown)
    if failed:
        print_rows(_failures(failed))


def _failures(failed: Mapping[Path, str]) -> Table:
    rows = [[str(folder), reason] for folder, reason in failed.items()]
    return Table(["run", "reason"], rows, f"Failed or not finished: {len(failed)}")


def _check_one_task(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        if run.task != runs[0].task:
            raise UserError(
                f"Expected runs of one task (got '{runs[0].task}' in '{runs[0].folder}' and "
                f"'{run.task}' in '{run.folder}')"
            )


def _groups(runs: Sequence[Run]) -> list[_Group]:
    zoos = _zoo_names(runs)
    described = [{"zoo": zoo, **_options(run)} for run, zoo in zip(runs, zoos, strict=True)]
    members: dict[str, list[int]] = {}
    for i, options in enumerate(described):
        members.setdefault(json.dumps(options, sort_keys=True), []).append(i)
    kinds = [described[indices[0]] for indices in members.values()]
    names = list(dict.fromkeys(["zoo", "model", "preset", *(n for k in kinds for n in k)]))
    columns = [
        {n: kind.get(n, _MISSING) for n in names if n in _ALWAYS or _differ(kinds, n)}
        for kind in kinds
    ]
    labels = [_label(chosen, columns) for chosen in columns]
    groups = zip(labels, columns, members.values(), strict=True)
    return [_Group(label, c, _by_seed([runs[i] for i in m])) for label, c, m in groups]


def _options(run: Run) -> dict[str, str]:
    """Returns the options that determine the result, and what the model reads, as text."""
    found = {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in run.options.items()
        if name not in (*NEUTRAL, "seed")
    }
    return {**found, "reads": reads(run.options)}


def _zoo_names(runs: Sequence[Run]) -> list[str]:
    """Names the zoo of every run by its folder, with more of the path if two names agree."""
    prints = [str((run.config.get("zoo") or {}).get("fingerprint") or "") for run in runs]
    paths = [str(run.options.get("zoo", _MISSING)) for run in runs]
    # One zoo may have been at several places; the first name stands for it.
    first: dict[str, str] = {}
    for mark, path in zip(prints, paths, strict=True):
        first.setdefault(mark or path, path)
    short = {key: Path(path).name or path for key, path in first.items()}
    names = list(short.values())
    for key, name in short.items():
        if names.count(name) > 1:
            short[key] = f"{name} ({first[key] if key == first[key] else key[:8]})"
    return [short[mark or path] for mark, path in zip(prints, paths, strict=True)]


def _differ(kinds: Sequence[Mapping[str, str]], name: str) -> bool:
    return len({kind.get(name) for kind in kinds}) > 1


def _label(chosen: Mapping[str, str], columns: Sequence[Mapping[str, str]]) -> str:
    """Returns the model, and the options in which groups of the same model differ."""
    same = [other for other in columns if other["model"] == chosen["model"]]
    # What a model reads follows from its other options.
    more = [n for n in chosen if n not in ("model", "reads") and _differ(same, n)]
    extra = [chosen[n] if n in _ALWAYS else f"{n} {chosen[n]}" for n in more]
    return ", ".join([chosen["model"], *extra])


def _by_seed(runs: Sequence[Run]) -> dict[int, Run]:
    found: dict[int, Run] = {}
    for run in runs:
        seed = run.options.get("seed")
        if not isinstance(seed, int):
            raise UserError(f"Expected a seed in the options of '{run.folder}' (got {seed!r})")
        if seed in found:
            raise UserError(
                f"Expected every seed once among runs with the same options (got seed {seed} in "
                f"'{found[seed].folder}' and in '{run.folder}')"
            )
        found[seed] = run
    return dict(sorted(found.items()))


def _rows(group: _Group) -> list[Row]:
    collected: dict[tuple[str, str], list[float]] = {}
    for run in group.runs.values():
        facts = {name: run.metrics[name] for name in _FACTS if name in run.metrics}
        parts = {
            "test": run.metrics["test"],
            **(run.metrics.get("evaluations") or {}),
            "run": facts,
        }
        for part, metrics in parts.items():
            for metric, value in scalar_metrics(metrics).items():
                collected.setdefault((part, metric), []).append(value)
    task = next(iter(group.runs.values())).task
    head = {name: group.columns[name] for name in _ALWAYS}
    options = {name: value for name, value in group.columns.items() if name not in _ALWAYS}
    return [
        {
            "label": group.label, "task": task, **head, "options": options,
            "part": part, "metric": metric,
            "mean": sum(values) / len(values), "standard_error": _standard_error(values),
            "seeds": len(values), "values": values,
        }
        for (part, metric), values in collected.items()
    ]  # fmt: skip


def _standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None for a single value."""
    if len(values) < 2:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def _tables(rows: Sequence[Row]) -> list[Table]:
    """A table per part, with a line per group and a column per metric."""
    heads = [n for n in _ALWAYS if n == "model" or len({row[n] for row in rows}) > 1]
    options = list(dict.fromkeys(name for row in rows for name in row["options"]))
    parts = dict.fromkeys(row["part"] for row in rows)
    tables = []
    for part in sorted(parts, key="run".__eq__):
        lines: dict[str, dict[str, Row]] = {}
        for row in rows:
            if row["part"] == part:
                lines.setdefault(row["label"], {})[row["metric"]] = row
        metrics = list(dict.fromkeys(metric for line in lines.values() for metric in line))
        cells = []
        for line in lines.values():
            some = next(iter(line.values()))
            head = [*(some[n] for n in heads), *(some["options"].get(n) for n in options)]
            seeds = max(row["seeds"] for row in line.values())
            values = [_cell(line[metric]) if metric in line else None for metric in metrics]
            cells.append([*head, seeds, *values])
        caption = "Size and time of the runs" if part == "run" else f"Networks of: {part}"
        columns = [*heads, *options, "seeds", *map(metric_name, metrics)]
        tables.append(Table(columns, cells, caption))
    return tables


def _cell(row: Row) -> object:
    """`mean ± standard error`, or the mean alone; a count that never changes as such."""
    mean, error, first = row["mean"], row["standard_error"], row["values"][0]
    if isinstance(first, int) and len(set(row["values"])) == 1:
        return first
    if error is None:
        return mean
    text = format_value(float(mean))
    # Both with the same decimals, unless the mean is very small or large.
    decimals = 3 if "e" not in text and text == f"{mean:.3f}" else None
    small = format_value(float(error)) if decimals is None else f"{error:.{decimals}f}"
    return f"{text} ± {small}"


def _conclusion(rows: Sequence[Row]) -> str:
    """Returns one sentence about the test split: which group is ahead, and by how much."""
    test = [row for row in rows if row["part"] == "test" and math.isfinite(row["mean"])]
    name = next((m for m in HEADLINE if any(row["metric"] == m for row in test)), None)
    ranked = [row for row in test if row["metric"] == name]
    if name is None or len(ranked) < 2:
        return ""
    ranked.sort(key=lambda row: row["mean"], reverse=HEADLINE[name] is max)
    first, second = ranked[:2]
    ahead, behind = (f"{row['label']} ({format_value(row['mean'])})" for row in (first, second))
    text = f"On the test networks, {ahead} has the best {metric_name(name)}, before {behind}"
    errors = [row["standard_error"] for row in (first, second)]
    if None in errors:
        return f"{text}; a single seed does not show how much of this is chance."
    gap, error = abs(first["mean"] - second["mean"]), math.hypot(*errors)
    verdict = "more" if gap > 2 * error else "less"
    return (
        f"{text}; the difference of {format_value(float(gap))} is {verdict} than twice its "
        f"standard error of {format_value(float(error))}."
    )


def _about(rows: Sequence[Row], task: str) -> str:
    """Describes the compared models, one sentence each."""
    models = dict.fromkeys(row["model"] for row in rows)
    known = {model: describe_model(task, {"model": model}) for model in models}
    return " ".join(f"{model} is {text}." for model, text in known.items() if text)


def _progress(groups: Sequence[_Group]) -> tuple[str, dict[str, list[Course]]]:
    """The main metric, and its course on validation networks in the runs of every group.

    A run records how long it took as a whole, so every epoch counts as equally long. Runs without
    logs are left out.
    """
    name = ""
    found: dict[str, list[Course]] = {}
    for group in groups:
        for run in group.runs.values():
            log = run.folder / "logs" / "metrics.csv"
            total, epochs = run.metrics.get("seconds"), run.metrics.get("epochs")
            if not total or not epochs or not log.is_file():
                continue
            logged = read_curves(log)
            name = name or next((m for m in HEADLINE if f"validation/{m}" in logged), "")
            if f"validation/{name}" in logged:
                at, values = logged[f"validation/{name}"]
                seconds = [total * (epoch + 1) / epochs for epoch in at]
                found.setdefault(group.label, []).append((seconds, values))
    return name, found


def _write(
    out: Path, rows: Sequence[Row], groups: Sequence[_Group], failed: Mapping[Path, str]
) -> None:
    task = rows[0]["task"]
    options = dict.fromkeys(name for row in rows for name in row["options"])
    table = []
    for row in rows:
        plain = {name: x for name, x in row.items() if name not in ("options", "values")}
        values = " ".join(map(str, row["values"]))
        table.append({**plain, **options, **row["options"], "values": values})
    write_csv(out / "compare.csv", table)
    bars(out / "compare.png", rows)
    caption = "Bars: means. Whiskers: standard errors over seeds. Dots: single seeds."
    seeds = sorted({row["seeds"] for row in rows})
    text = (
        f"Mean ± standard error over {' or '.join(map(str, seeds))} "
        f"{'seed' if seeds == [1] else 'seeds'}; a single seed has no standard error."
    )
    sections = [
        Section(
            "Table",
            f"{_conclusion(rows)} {_about(rows, task)}\n\n{text}",
            [*_tables(rows), *([_failures(failed)] if failed else [])],
        ),
        Section("Figure", figures=[Shown(out / "compare.png", caption, f"Bar chart. {caption}")]),
    ]
    metric, courses = _progress(groups)
    if courses:
        first = [(group.label, next(iter(group.runs.values()))) for group in groups]
        evaluating = [label for label, run in first if reads(run.options) == EVALUATES]
        progress(out / "progress.png", courses, metric, evaluating=evaluating)
        caption = (
            "Bold: means over seeds. Thin: single seeds. Dashed: models that evaluate the network. "
            "The epochs of a run count as equally long."
        )
        shown = Shown(out / "progress.png", caption, f"Line chart. {caption}")
        sections.append(Section("Progress", figures=[shown]))
    write_report(out / "compare.html", f"{task}: runs compared", sections)

"""The tasks by name, and the commands `nfn-graph train`, `evaluate`, `predict` and `compare`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from nfn_graph.converters.commands import Files, Reading, ReadingOptions, Where, unset
from nfn_graph.converters.conversion.jobs import counting
from nfn_graph.messages import UserError, exit_code, located
from nfn_graph.tasks.classify import Classify
from nfn_graph.tasks.classify_inr import ClassifyInr
from nfn_graph.tasks.edit_inr import EditInr
from nfn_graph.tasks.option_checks import choices
from nfn_graph.tasks.predict import predict_files
from nfn_graph.tasks.regress import PredictGeneralization, Regress
from nfn_graph.tasks.reports.compare import compare as compare_runs
from nfn_graph.tasks.reports.compare import failed_runs, print_table
from nfn_graph.tasks.reports.runs import format_value
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.training.run import evaluate as evaluate_run
from nfn_graph.tasks.training.run import train as train_task
from nfn_graph.tasks.training.run_folder import write_csv
from nfn_graph.tasks.training.task import Task
from nfn_graph.tasks.winning_tickets import WinningTickets
from nfn_graph.tasks.zoo.builder import Split

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task
    for task in (Regress, Classify, PredictGeneralization, ClassifyInr, EditInr, WinningTickets)
}
if TYPE_CHECKING:
    TrainCommand = TrainOptions
else:
    TrainCommand = reduce(
        or_, (Annotated[task.OPTIONS, subcommand(name)] for name, task in TASKS.items())
    )


def train(command: OmitArgPrefixes[OmitSubcommandPrefixes[TrainCommand]]) -> int:
    """Train a model on the networks of a zoo.

    A run that was interrupted resumes when the same command is run again.

    Examples:
      nfn-graph train regress --zoo graphs/ --label loss --out runs/loss
      nfn-graph train classify --zoo graphs/ --label optimiser --out runs/optimiser
      nfn-graph train predict-generalization --zoo zoos/digits --out runs/np --model nfn-np
      nfn-graph train classify-inr --zoo zoos/fashion --out runs/inr --preset medium
      nfn-graph train edit-inr --zoo zoos/fashion --out runs/dilate --operation dilate
      nfn-graph train winning-tickets --zoo zoos/tickets --out runs/tickets
      nfn-graph train classify-inr --zoo zoos/fashion --out runs/check --overfit 16

    Args:
        command: The task and its options.
    """
    task = next(t for t in TASKS.values() if t.OPTIONS is type(command))
    metrics = train_task(task(command), progress=True)
    if not metrics:
        return 0  # Only the first of several processes reports.
    if "overfit" in metrics:
        return _report_overfit(task.by_heart, metrics)
    print(f"{command.out}: {_line(metrics['test'])} on {metrics['test']['networks']} test networks")
    print(f"Report: {command.out / 'report.html'}")
    return 0


def _report_overfit(by_heart: tuple[str, float], metrics: dict[str, Any]) -> int:
    """Prints whether a model has memorised a few networks; returns 1 if it has not."""
    (name, bound), found = by_heart, metrics["overfit"]
    verdict = "has learnt" if found["has_learnt"] else "has not learnt"
    print(
        f"The model {verdict} {found['networks']} networks by heart in {found['steps']} steps: "
        f"{name} {format_value(metrics['test'][name])} (the bound is {bound:g})"
    )
    if found["has_learnt"]:
        return 0
    print(
        "If more --epochs do not help, look for inputs on a wrong scale, a --learning-rate that is "
        "too high or too low, labels that belong to other networks, or a model that is too small."
    )
    return 1


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a trained model on other networks.

    Attributes:
        run: The folder of a finished run.
        zoo: The zoo with the networks, of any widths.
        name: The name of this evaluation; by default the name of the zoo's folder.
        split: The split to evaluate on; by default all networks.
        where: The networks to use, by the values of columns: width=8 or width=8,16.
    """

    run: Positional[Path]
    zoo: Path
    name: Annotated[str | None, unset("NAME")] = None
    split: Annotated[Split | None, unset(choices(Split, "{}"))] = None
    where: Where = ()


def evaluate(options: Annotated[EvaluateOptions, arg(name="")]) -> int:
    """Evaluate a trained model on other networks, such as networks of unseen widths.

    The metrics are added to the run's metrics.json and report.html.

    Examples:
      nfn-graph evaluate runs/np --zoo zoos/wide
      nfn-graph evaluate runs/np --zoo zoos/digits --split test --where width=16 --name w16

    Args:
        options: The options of the command.
    """
    found = evaluate_run(
        options.run, options.zoo, name=options.name, split=options.split, where=options.where
    )
    print(f"{options.run}: {_line(found)} on {found['networks']} networks")
    return 0


@dataclass(frozen=True)
class PredictOptions:
    """Apply a trained model to checkpoint files.

    Attributes:
        run: The folder of a finished run of regress, classify, predict-generalization or
            classify-inr.
        files: Checkpoint files in any readable format, folders of them, or stores.
        out: The CSV file to write, with one row for every network.
        overwrite: Whether to replace an existing table.
        reading: The options for reading the files.
    """

    run: Positional[Path]
    files: Files
    out: Path
    overwrite: bool = False
    reading: Reading = field(default_factory=ReadingOptions)


def predict(options: Annotated[PredictOptions, arg(name="")]) -> int:
    """Apply a trained model to checkpoints, and write its predictions into a table.

    Files that cannot be read, or whose network the model cannot process, are listed, and the others
    are written to the table. The exit code is 1 if some files failed, and 2 if all of them did.

    Examples:
      nfn-graph predict runs/loss new/ --out predictions.csv
      nfn-graph predict runs/loss a.pt b.safetensors c.onnx --out predictions.csv
      nfn-graph predict runs/loss graphs/ --out predictions.csv

    Args:
        options: The options of the command.
    """
    if options.out.is_dir() or (options.out.exists() and not options.overwrite):
        raise UserError(
            f"Expected a new file as --out (got '{options.out}', which exists). Choose another, or "
            f"replace it with --overwrite."
        )
    with counting("Predicting", len(options.files)) as count_on:
        found = predict_files(options.run, options.files, options.reading, on_done=count_on)
    for file, reason in found.failed.items():
        print(f"nfn-graph: {located(file, reason)}", file=sys.stderr)
    written = "nothing written"
    if found.rows:
        write_csv(options.out, found.rows)
        written = str(options.out)
    print(f"{len(found.rows)} predicted, {len(found.failed)} failed ({written})")
    return exit_code(len(found.rows), len(found.failed))


@dataclass(frozen=True)
class CompareOptions:
    """Compare runs.

    Attributes:
        runs: Folders of finished runs, or folders that hold such folders.
        out: A folder for compare.html, compare.csv, compare.png and progress.png; none by default.
    """

    runs: Annotated[Positional[tuple[Path, ...]], unset("RUN ...")]
    out: Annotated[Path | None, unset("PATH")] = None


def compare(options: Annotated[CompareOptions, arg(name="")]) -> int:
    """Compare runs over models and seeds: mean and standard error.

    Runs that failed or are not finished are listed, and are left out of the means.

    Examples:
      nfn-graph compare runs/ --out comparison/

    Args:
        options: The options of the command.
    """
    print_table(compare_runs(options.runs, options.out), failed_runs(options.runs))
    return 0


def _line(metrics: dict[str, Any]) -> str:
    shown = [f"{k} {format_value(v)}" for k, v in metrics.items() if isinstance(v, float)]
    return ", ".join(shown)

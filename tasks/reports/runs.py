"""The contents of the folders of finished runs, and the names of their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfn_graph.messages import UserError
from nfn_graph.tasks.training.run_folder import read_json

# Facts about the data, which no model changes.
BACKGROUND = ("networks", "tau_ceiling", "mse_unedited", "mse_fit", "overlap_magnitude")
# The two kinds of input that a model may use.
WEIGHTS, EVALUATES = "weights", "evaluates the network"
# The metric that a report begins with: the first of these that a task has, and which is better.
HEADLINE = {"tau": max, "accuracy": max, "mse": min, "overlap": max}
_MODELS = {
    "nfn-np": "a stack of NF-Layers, which are equivariant to permutations of all neurons (NP), "
    "followed by a pool and an MLP",
    "nfn-hnp": "a stack of NF-Layers, which are equivariant to permutations of hidden neurons "
    "(HNP), followed by a pool and an MLP",
    "nfn-pointwise": "a stack of layers that process every weight separately, followed by a pool "
    "and an MLP",
    "statnn": "an MLP on the mean, variance and quantiles of every weight tensor",
    "mlp": "an MLP on the concatenated weights",
    "mlp-aug": "an MLP on the concatenated weights, with randomly permuted neurons in training",
    "gine": "PyG's GINE convolutions on the graph of neurons",
    "pna": "PyG's PNA convolutions on the graph of neurons",
    "transformer": "PyG's transformer convolutions on the graph of neurons",
    "probe": "an MLP on the outputs of the network at learned inputs",
    "probe-grid": "an MLP on the outputs of the network on a fixed grid of inputs",
}
# Models that return weights, or masks, instead of one vector per network.
_EDITORS = {
    "nfn-np": "a stack of NF-Layers, which are equivariant to permutations of all neurons (NP)",
    "nfn-hnp": "a stack of NF-Layers, which are equivariant to permutations of hidden neurons "
    "(HNP)",
    "nfn-pointwise": "a stack of layers that process every weight separately",
    "mlp": "an MLP from the concatenated weights to their changes",
    "mlp-aug": "an MLP from the concatenated weights to their changes, with randomly permuted "
    "neurons in training",
}
# What the models that run the networks read as well, where a number is predicted.
_ALSO_READ = ", which also reads the entropies of these outputs and statistics of the weights"
_LOSSES = {
    "regress": "mean squared error of the standardized number",
    "classify": "cross-entropy",
    "classify-inr": "cross-entropy",
    "edit-inr": "mean squared error of the image",
    "winning-tickets": "negative variational bound of the masks",
}
_NAMES = {
    "tau": "Kendall tau",
    "tau_ceiling": "tau ceiling",
    "r2": "R²",
    "mae": "MAE",
    "rmse": "RMSE",
    "mse": "MSE",
    "mse_unedited": "MSE without an edit",
    "mse_fit": "MSE of the fits",
    "relative": "MSE / without an edit",
    "relative_to_fit": "MSE / of the fits",
    "overlap_magnitude": "overlap by magnitude",
}


@dataclass(frozen=True)
class Run:
    """The contents of the folder of a finished run.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import Run
        >>> Run(Path("run"), "regress", {"seed": 0}, {}, {"test": {"tau": 0.8}}).metrics["test"]
        {'tau': 0.8}
    """

    folder: Path
    task: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]


def read_run(folder: Path) -> Run:
    """Reads the folder of a finished run.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import read_run
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Path(name)
        ...     config = '{"task": "regress", "options": {"model": "nfn-np", "seed": 0}}'
        ...     _ = (folder / "config.json").write_text(config)
        ...     _ = (folder / "metrics.json").write_text('{"test": {"tau": 0.8}}')
        ...     print(read_run(folder).metrics["test"]["tau"])
        0.8
    """
    found = {}
    for name in ("config.json", "metrics.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"Expected a finished run in '{folder}' (got no {name})")
        found[name] = read_json(folder / name)
    config, metrics = found["config.json"], found["metrics.json"]
    for name, part, kind in (
        ("config.json", "task", str),
        ("config.json", "options", dict),
        ("metrics.json", "test", dict),
    ):
        if not isinstance(found[name].get(part), kind):
            got = type(found[name][part]).__name__ if part in found[name] else "none"
            raise UserError(f"Expected '{part}' in '{folder / name}' (got {got})")
    evaluations = metrics.get("evaluations") or {}
    described = [config.get("zoo") or {}, evaluations]
    if isinstance(evaluations, dict):
        described += evaluations.values()
    if not all(isinstance(value, dict) for value in described):
        raise UserError(
            f"Expected the zoo and the evaluations of a run in '{folder}' (got other types)"
        )
    return Run(folder, config["task"], config["options"], config, metrics)


def reads(options: Mapping[str, Any]) -> str:
    """Returns what a run's model reads: weights alone, or also the outputs at its probes."""
    # Every task has the option, but among models that return weights only editors have probes.
    is_editor_with_probes = "operation" in options and bool(options.get("probes"))
    is_probe = str(options.get("model")).startswith("probe")
    return EVALUATES if is_probe or is_editor_with_probes else WEIGHTS


def describe_model(task: str, options: Mapping[str, Any]) -> str:
    """Describes a model, as the end of a sentence; empty for an unknown model."""
    names = _EDITORS if task in ("edit-inr", "winning-tickets") else _MODELS
    about = names.get(str(options.get("model")), "")
    if about and task in ("regress", "predict-generalization") and reads(options) == EVALUATES:
        about += _ALSO_READ
    return about


def loss_name(task: str, options: Mapping[str, Any]) -> str:
    """Names the loss that a task minimises; empty for an unknown task."""
    if task in ("regress", "predict-generalization") and options.get("target") == "share":
        return "binary cross-entropy"
    return _LOSSES.get(task, "")


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

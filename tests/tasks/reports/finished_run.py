"""Writes the folder of a finished run without training."""

from __future__ import annotations

import json
from pathlib import Path

from nfn_graph.tasks.reports import scatter

OPTIONS = {
    "zoo": "zoos/my digits",
    "model": "nfn-np",
    "preset": "paper",
    "seed": 3,
    "epochs": 50,
    "target": "share",
}


def make_run(folder: Path, options: dict[str, object] | None = None) -> Path:
    (folder / "logs").mkdir(parents=True)
    test = {"tau": 0.8125, "tau_ceiling": 0.99, "r2": 0.75, "mae": 0.00123, "networks": 1200}
    metrics = {
        "test": test,
        "validation": {**test, "tau": 0.7},
        "evaluations": {"wide": {**test, "tau": None}},
        "epochs": 50,
        "best_epoch": 31,
        "seconds": 41.2,
        "parameters": 23344,
    }
    config = {
        "task": "predict-generalization",
        "options": OPTIONS if options is None else options,
        "versions": {"torch": "2.99"},
        "zoo": {"fingerprint": "abc123", "networks": {"train": 900, "validation": 100}},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "metrics.json").write_text(json.dumps(metrics), "utf-8")
    for name in ("zzz", "curves", "scatter-validation", "scatter-wide", "scatter-test"):
        scatter(folder / "figures" / f"{name}.png", [0.0, 1.0], [0.0, 1.0], title=name)
    return folder

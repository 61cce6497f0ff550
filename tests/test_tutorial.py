"""The commands of the tutorial's second half, in their order, on fewer networks."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nfn_graph.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
LABELLED, UNLABELLED = 60, 6


def test_from_checkpoints_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text("utf-8")
    half = text[text.index("## From checkpoints to two trained models") :]
    half = half[: half.index("\n## ", 1)]
    (script,) = re.findall(r'```py title="make_networks.py"\n(.*?)```', half, re.DOTALL)
    shells = re.findall(r"```bash\n(.*?)```", half, re.DOTALL)
    commands = [line for shell in shells for line in shell.splitlines()]
    assert len(commands) == 7
    (tmp_path / "make_networks.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    counts = [str(LABELLED), str(UNLABELLED)]
    subprocess.run([sys.executable, "make_networks.py", *counts], check=True, timeout=300)
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "nfn-graph"
        small = ["--preset", "tiny"] if words[0] == "train" else []
        assert main([*words, *small]) == 0, command
    for name, metric in (("loss", "tau"), ("activation", "accuracy")):
        metrics = json.loads((tmp_path / "runs" / name / "metrics.json").read_text())
        assert metrics["test"]["networks"] == LABELLED / 10 and metric in metrics["test"]
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == UNLABELLED and all(row["prediction"] for row in rows)
    assert {row["prediction"] for row in rows} <= {"ReLU", "Tanh"}
    evaluations = json.loads((tmp_path / "runs" / "loss" / "metrics.json").read_text())
    assert evaluations["evaluations"]["relu"]["networks"] < LABELLED / 10

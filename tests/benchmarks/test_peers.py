"""The comparison with other packages: its rows, and the names that it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zoo_data import tiny_images

from nfn_graph.tasks.zoo import InrZooOptions, build_zoo
from pages import ROOT


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SIRENs of one shape, at least 16 for training and 4 for each other split."""
    options = InrZooOptions(
        tmp_path_factory.mktemp("zoos") / "inrs",
        images=32,
        test_images=6,
        widths=(6,),
        steps=5,
        validation_share=0.3,
    )
    return build_zoo(options, source=tiny_images(60))


def run(zoo: Path, *options: str) -> subprocess.CompletedProcess[str]:
    settings = ["--networks", "16", "--epochs", "1", "--rates", "1e-3", "--seeds", "0"]
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--zoo", str(zoo)]
    return subprocess.run(
        [*command, *settings, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_every_model_has_a_row(zoo: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run(zoo, "--ours", "nfn-np", "--peer", "nfn", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [row["model"] for row in rows] == ["nfn-np", "nfn"], done.stderr
    for row in rows:
        # Of four networks.
        assert row["test accuracy"] in (0, 0.25, 0.5, 0.75, 1)
        assert row["ms of CPU per step"] > 0
        assert row["parameters"] > 10_000
        assert (row["learning rate"], row["seeds"], row["standard error"]) == (1e-3, 1, None)
        assert f"| {row['model']} | {row['parameters']} |" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--peer", "nobody"],
        ["--peer", "nobody=folder"],
        ["--peer", "dws"],
        ["--peer", "nfn=folder"],
        ["--peer", "nfn-np"],
        ["--ours", "nfn"],
    ],
    ids=" ".join,
)
def test_other_names_are_refused(options: list[str], tmp_path: Path) -> None:
    """Before the zoo is opened, which is not there."""
    done = run(tmp_path / "none", *options)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Expected --peer nfn, or --peer NAME=PATH with a NAME of dws, neural-graphs, or --ours of "
        f"nfn-np, nfn-hnp, probe (got '{options[1]}')"
    )

"""Training on published zoos: through an import, with their own splits and labels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from imitations_cnn import model_zoo, small_cnn_zoo, wild_park
from imitations_inr import dws_fashion, dws_mnist, inr2vec, nfn_inrs

from nfn_graph.cli import main
from nfn_graph.converters import WeightDataset, load, open_zoo
from nfn_graph.converters.store import StoreWriter
from nfn_graph.converters.store.table import SPLITS
from nfn_graph.converters.zoos import importing
from nfn_graph.tasks.training import evaluate

Build = Callable[[Path], Any]
# How each zoo is built, which task uses it, and with which options.
ZOOS: dict[str, tuple[Build, str, list[str]]] = {
    "small cnn": (lambda p: small_cnn_zoo(p, [86] * 20), "predict-generalization", []),
    "model zoo": (lambda p: model_zoo(p, trials=8), "predict-generalization", []),
    "wild park": (wild_park, "predict-generalization", ["--unify", "roles"]),
    "dws mnist": (dws_mnist, "classify-inr", []),
    "dws fashion": (dws_fashion, "classify-inr", []),
    "nfn": (lambda p: nfn_inrs(p, 1), "classify-inr", []),
    "inr2vec": (inr2vec, "classify-inr", []),
}


def trained(task: str, zoo: Path, out: Path, *options: str) -> dict[str, Any]:
    command = ["train", task, "--zoo", str(zoo), "--out", str(out), "--preset", "tiny"]
    assert main([*command, "--epochs", "1", *options]) == 0
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return {name: found[name] for name in ("test", "validation", "parameters")}


def converted(path: Path, folder: Path) -> Path:
    """A store of the same networks: each is saved as a checkpoint, which is then converted."""
    zoo = open_zoo(path)
    networks = []
    for split in SPLITS:
        part = zoo.split(split)
        for i in range(len(part)):
            file = folder / f"{split}{i}.pt"
            torch.save(part.state_dict(i), file)
            row, network = part.row(i), part.source.network(part.state_dict(i), part.row(i))
            graph = load(file, arch=network.module, example_input=network.example)
            known = {"label": row[zoo.description.label], "split": split}
            if zoo.description.w0 is not None:
                known["w0"] = zoo.description.w0
            networks.append((known, graph))
    StoreWriter(folder / "store", {}).publish("all", networks)
    return folder / "store"


@pytest.mark.parametrize("kind", ZOOS)
def test_one_epoch(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics equal those of the same networks converted one by one, to the last bit."""
    build, task, options = ZOOS[kind]
    build(tmp_path / "published")
    found = trained(task, tmp_path / "published", tmp_path / "run", *options)
    assert "nfn-graph zoo import" in capsys.readouterr().err
    (tmp_path / "files").mkdir()
    store = converted(tmp_path / "published", tmp_path / "files")
    wanted = trained(task, store, tmp_path / "other", *options, "--label", "label")
    assert found == wanted and found["test"]["networks"] > 0
    # An evaluation reads the published folder, too.
    again = evaluate(tmp_path / "run", tmp_path / "published", name="again", split="test")
    assert again == found["test"]
    if kind != "small cnn":
        return
    # The same holds for a run from a store that was imported before.
    out = str(tmp_path / "imported")
    assert main(["zoo", "import", str(tmp_path / "published"), "--out", out]) == 0
    assert trained(task, Path(out), tmp_path / "third", *options) == wanted
    assert main(["store", out, "--verify"]) == 0


def test_left_out_and_augmented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nfn_inrs(tmp_path / "zoo", 1)

    def imported(name: str, *options: str) -> list[tuple[int, str | None]]:
        command = ["zoo", "import", str(tmp_path / "zoo"), "--out", str(tmp_path / name)]
        assert main([*command, *options]) == 0
        rows = WeightDataset(tmp_path / name).rows
        assert all(row["w0"] == 30 and row["is_finite"] for row in rows)
        return [(row["fit"], row["split"]) for row in rows]

    first = imported("first")
    assert [split for _, split in first] == ["train", "train", *["validation"] * 2, "test"]
    assert "3 are in no split and left out" in capsys.readouterr().out
    augmented = imported("augmented", "--train-split", "train_augmented")
    assert [fit for fit, split in augmented if split == "train"] == [0, 0, 1, 13]
    everything = imported("all", "--all")
    assert len(everything) == 8 and [split for _, split in everything[5:]] == [None] * 3
    command = ["zoo", "import", str(tmp_path / "zoo"), "--out", str(tmp_path / "first"), "--all"]
    capsys.readouterr()
    assert main(command) == 2
    assert "was begun with: networks = 5" in capsys.readouterr().err


def test_killed_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published shards stay; the store is that of an import without interruption."""
    small_cnn_zoo(tmp_path / "zoo", [86] * 24)
    command = (
        "import sys; from nfn_graph.converters.zoos import importing; "
        "importing.SHARD_SIZE = 4; from nfn_graph.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["zoo", "import", str(tmp_path / "zoo"), "--out", str(tmp_path / "killed")]
    process = subprocess.Popen([sys.executable, "-c", command, *arguments])
    limit = time.monotonic() + 200
    while len(list((tmp_path / "killed" / "shards").glob("*.json"))) < 2:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list((tmp_path / "killed" / "shards").glob("*.json"))) < 6
    monkeypatch.setattr(importing, "SHARD_SIZE", 4)
    assert main(arguments) == 0
    assert main([*arguments[:-1], str(tmp_path / "whole")]) == 0
    killed, whole = (WeightDataset(tmp_path / name) for name in ("killed", "whole"))
    assert len(whole) == 24 and killed.fingerprint == whole.fingerprint

"""The comparison with other packages: its table, and the names that it refuses."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from zoo_data import tiny_images

from nfn_graph.tasks.zoo import InrZooOptions, build_zoo
from pages import ROOT


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates SIRENs of one shape, at least 16 for training and 4 for each other split."""
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
        # The mean over four networks.
        assert row["test accuracy"] in (0, 0.25, 0.5, 0.75, 1)
        assert row["ms of CPU per step"] > 0
        assert row["parameters"] > 10_000
        assert (row["learning rate"], row["seeds"], row["standard error"]) == (1e-3, 1, None)
        assert row["validation accuracy by rate"].startswith("0.001: 0.")
        assert f"| {row['model']} | {row['parameters']} |" in done.stdout


# Stand-ins for what the adapters import: models that check their inputs. SIRENs are 2-6-6-1.
DNG = {
    "data/__init__.py": "",
    "data/graph_utils.py": "def get_graph_spec(sizes): return sizes.tolist()",
    "dng_models.py": """
import torch

class DNG_Classifier(torch.nn.Linear):
    def __init__(self, spec, *, ds, cls_drop, **settings):
        assert (spec, ds, cls_drop) == ([2, 6, 6, 1], "mnist", 0.5)
        super().__init__(12 + 36 + 6 + 13, 10)

    def forward(self, data):
        return super().forward(torch.cat(data, 1))
""",
}
SCALEGMN = {
    "configs/mnist_cls/scalegmn.yml": "scalegmn_args: {direction: forward}",
    "configs/mnist_cls/scalegmn_bidir.yml": "scalegmn_args: {direction: bidirectional}",
    "src/data/data_utils.py": """
import torch

def nn_to_edge_index(sizes, device):
    return torch.tensor([[0, 1], [2, 14]])

def get_node_types(sizes):
    return torch.arange(sum(sizes))

def get_edge_types(sizes):
    return torch.arange(12 + 36 + 6)
""",
    "src/scalegmn/models.py": """
import torch

class ScaleGMN(torch.nn.Linear):
    def __init__(self, settings):
        assert settings["layer_layout"] == [2, 6, 6, 1]
        self.backward_too = settings["direction"] == "bidirectional"
        super().__init__(15 + 54 + self.backward_too, 10)

    def forward(self, data):
        count = data.num_graphs
        x = data.x.view(count, 15)
        assert (x[:, :2] == 1).all() and (x[:, 2:] != 1).all()
        assert data.edge_index.tolist() == [
            [at for i in range(count) for at in (15 * i, 15 * i + 1)],
            [at for i in range(count) for at in (15 * i + 2, 15 * i + 14)],
        ]
        assert data.bw_edge_index.equal(data.edge_index.flip(0))
        hidden = data.mask_hidden.view(count, 15)
        assert hidden[:, 2:14].all() and not hidden[:, :2].any() and not hidden[:, 14:].any()
        assert data.node2type.view(count, 15)[:, 14].eq(14).all()
        assert data.edge2type.view(count, 54)[:, 53].eq(53).all()
        assert data.batch.view(count, 15)[:, 14].tolist() == list(range(count))
        parts = [x, data.edge_attr.view(count, 54)] + [x[:, 2:3]] * self.backward_too
        return super().forward(torch.cat(parts, 1))
""",
}


@pytest.mark.parametrize(
    ("name", "files", "parameters"),
    [("dng", DNG, 680), ("scalegmn", SCALEGMN, 700), ("scalegmn-b", SCALEGMN, 710)],
)
def test_checkouts_are_given_all_weights(
    name: str, files: dict[str, str], parameters: int, zoo: Path, tmp_path: Path
) -> None:
    """The tests have no checkouts of other packages, so stand-in models check their inputs."""
    for file, text in files.items():
        (tmp_path / "theirs" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / file).write_text(text, "utf-8")
    file = tmp_path / "rows.json"
    done = run(zoo, "--ours", "--peer", f"{name}={tmp_path / 'theirs'}", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [(row["model"], row["parameters"]) for row in rows] == [(name, parameters)], done.stderr


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
    """The name is checked before the zoo, which does not exist, is opened."""
    done = run(tmp_path / "none", *options)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Expected --peer nfn, or --peer NAME=PATH with a NAME of dws, neural-graphs, dng, "
        f"scalegmn, scalegmn-b, or --ours of nfn-np, nfn-hnp, probe (got '{options[1]}')"
    )


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """Before the zoo is opened, which is not there."""
    done = run(tmp_path / "none", "--peer", f"dng={tmp_path / 'theirs'}")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"Expected a folder with a checkout of dng (got '{tmp_path / 'theirs'}')"
    )


@pytest.mark.parametrize("name", ["dws", "neural-graphs", "dng", "scalegmn", "scalegmn-b"])
def test_a_folder_without_the_peer_is_named(name: str, zoo: Path, tmp_path: Path) -> None:
    done = run(zoo, "--ours", "--peer", f"{name}={tmp_path}")
    assert done.returncode == 1
    assert f"Expected a checkout of its repository in '{tmp_path}'" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().endswith(f"Failed, see above: {name}={tmp_path}")


def test_other_models_keep_their_rows(zoo: Path, tmp_path: Path) -> None:
    done = run(zoo, "--ours", "probe", "--peer", f"dng={tmp_path}")
    assert done.returncode == 1
    assert "| probe |" in done.stdout


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("peers")


def test_the_rate_is_chosen_on_validation_networks(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate with the best test accuracy, 1e-2, is not the one with the best validation."""
    validation = {1e-3: 0.3, 3e-3: 0.5, 1e-2: 0.4}
    test = {1e-3: 0.1, 3e-3: 0.2, 1e-2: 0.9}
    calls = []

    def fit(make: object, parts: object, epochs: int, rate: float, seed: int) -> tuple[float, ...]:
        calls.append((rate, seed))
        return validation[rate], test[rate] + seed / 100, 7.0, 5

    monkeypatch.setattr(peers, "fit", fit)
    monkeypatch.setattr(peers, "open_zoo_folder", lambda path: None)
    monkeypatch.setattr(peers, "load", lambda *_: SimpleNamespace())
    args = SimpleNamespace(
        threads=1, zoo=Path("zoo"), networks=8, epochs=1, rates=list(validation), seeds=[0, 1, 2]
    )
    row = peers.measure(args, "nfn-np", None)
    assert calls == [(1e-3, 0), (3e-3, 0), (1e-2, 0), (3e-3, 1), (3e-3, 2)]
    assert row["learning rate"] == 3e-3
    assert row["validation accuracy by rate"] == "0.001: 0.300, 0.003: 0.500, 0.01: 0.400"
    assert row["test accuracy"] == pytest.approx(0.21)
    assert row["standard error"] == pytest.approx(0.01 / 3**0.5)


def test_scores_are_those_after_the_last_epoch(peers: ModuleType) -> None:
    """Networks of other splits are seen after the last step only, and without dropout."""
    seen: list[tuple[bool, str, list[int]]] = []

    class Model(torch.nn.Linear):
        def forward(self, batch: tuple[str, Tensor]) -> Tensor:
            split, index = batch
            seen.append((self.training, split, index.tolist()))
            return super().forward(torch.ones(len(index), 1))

    def pick(part: object, index: Tensor) -> tuple[str, Tensor]:
        return next(name for name, given in parts.items() if given is part), index

    sizes = {"train": 40, "validation": 70, "test": 9}
    parts = {
        split: peers.Part([], [], [], torch.full((count,), 3)) for split, count in sizes.items()
    }
    model = Model(1, 10)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    found = peers.fit(lambda: peers.Candidate(model, pick), parts, 2, 0.1, 0)
    assert [(training, split, len(index)) for training, split, index in seen] == [
        *[(True, "train", count) for count in (32, 8, 32, 8)],
        *[(False, "validation", count) for count in (64, 6)],
        (False, "test", 9),
    ]
    for epoch in (seen[:2], seen[2:4]):
        assert sorted(i for *_, index in epoch for i in index) == list(range(40))
    # All labels are 3, which the bias alone learns.
    assert (found[0], found[1], found[3]) == (1.0, 1.0, 20)

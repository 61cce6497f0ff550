"""The comparison with other packages: its table, and the names that it refuses."""

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

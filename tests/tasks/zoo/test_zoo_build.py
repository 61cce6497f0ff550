"""Zoos from end to end: files, tables, graphs, shards, resuming, and the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from zoo_data import IMAGES, same_networks, small, tiny_images

from nfn_graph import Batch
from nfn_graph.cli import main
from nfn_graph.converters import from_module, from_state_dict, to_state_dict
from nfn_graph.converters.store import writer as store_writer
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.tasks.zoo import (
    CnnZooOptions,
    InrZooOptions,
    TicketZooOptions,
    TransformerZooOptions,
    build_zoo,
    open_zoo_folder,
)
from nfn_graph.tasks.zoo.builder import BuildOptions, ZooBuilder, ZooWriter
from nfn_graph.tasks.zoo.classifiers import Architecture, build_module
from nfn_graph.tasks.zoo.cnn import CnnZooBuilder
from nfn_graph.tasks.zoo.inr import InrZooBuilder
from nfn_graph.tasks.zoo.tickets import TicketZooBuilder
from nfn_graph.tasks.zoo.transformer import TransformerZooBuilder


def test_table_and_checkpoints(tmp_path: Path) -> None:
    options = small(tmp_path / "zoo", checkpoints=(0.0, 1.0))
    zoo = open_zoo_folder(build_zoo(options, source=IMAGES))
    assert len(zoo) == 20
    assert [row["network"] for row in zoo.rows] == [i // 2 for i in range(20)]
    assert [row["is_last"] for row in zoo.rows] == [False, True] * 10
    wanted = {"activation", "init", "init_scale", "learning_rate", "l2", "dropout", "optimiser"}
    wanted |= {"train_fraction", "epochs", "seed", "split", "step", "width", "depth", "arch"}
    wanted |= {"train_loss", "train_accuracy", "test_loss", "test_accuracy"}
    assert wanted <= set(zoo.table.column_names)
    assert {(row["width"], row["depth"]) for row in zoo.rows} == {(3, 1), (3, 2), (5, 1), (5, 2)}
    # Any reader of Parquet and safetensors can open the files.
    assert pq.read_table(tmp_path / "zoo" / "metadata").num_rows == 20
    with safe_open(tmp_path / "zoo" / "weights" / "00000.safetensors", "pt") as file:
        stacks = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    row = zoo.rows[0]
    entries = torch.cat([x.flatten() for x in zoo.state_dict(0).values()])
    stored = stacks[f"{row['architecture']}/float32"][row["row"]]
    assert torch.equal(stored.sort().values, entries.sort().values)


def test_stored_networks_have_the_stated_accuracy(tmp_path: Path) -> None:
    zoo = open_zoo_folder(build_zoo(small(tmp_path / "zoo", epochs=(4, 6)), source=IMAGES))
    x, y = IMAGES.values(IMAGES.test_index) * 2 - 1, IMAGES.labels[IMAGES.test_index]
    for i, row in enumerate(zoo.rows):
        shape = Architecture((1, 8, 8), (row["width"],) * row["depth"], (), 3, row["padding"])
        module = build_module(shape, row["activation"])
        module.load_state_dict(zoo.state_dict(i))
        accuracy = (module(x).argmax(1) == y).float().mean().item()
        assert accuracy == pytest.approx(row["test_accuracy"])
    assert len({row["test_accuracy"] for row in zoo.rows}) > 2


def test_graphs(tmp_path: Path) -> None:
    zoo = open_zoo_folder(build_zoo(small(tmp_path / "zoo"), source=IMAGES))
    graph = zoo[3]
    for key, value in zoo.state_dict(3).items():
        assert torch.equal(graph.to_tensors()[key], value)
    assert zoo.rows[3]["network"] == 3
    batch = Batch.from_data_list(list(zoo))
    assert batch.num_graphs == 10
    assert all(torch.equal(batch[3].to_tensors()[k], x) for k, x in zoo.state_dict(3).items())
    part = zoo.where(width=3)
    assert 0 < len(part) < 10 and {row["width"] for row in part.rows} == {3}
    assert torch.equal(part[0].to_tensors()["layers.0.bias"], part.state_dict(0)["layers.0.bias"])
    assert len(zoo[2:5]) == 3
    with pytest.raises(ValueError, match="column"):
        zoo.where(colour=3)


SIZES: dict[str, Any] = {"widths": (4, 6), "epochs": (1, 1), "networks": 5}
BUILDERS: dict[str, Callable[[Path], ZooBuilder[Any, Any, Any]]] = {
    "cnn": lambda out: CnnZooBuilder(CnnZooOptions(out, depths=(1, 2), **SIZES), IMAGES),
    "inr": lambda out: InrZooBuilder(
        InrZooOptions(out, images=4, test_images=2, widths=(4, 6), depths=(1, 2), steps=1), IMAGES
    ),
    "tickets": lambda out: TicketZooBuilder(
        TicketZooOptions(out, arch="cnn", **{**SIZES, "epochs": 1, "networks": 9}), IMAGES
    ),
    "transformer": lambda out: TransformerZooBuilder(
        TransformerZooOptions(out, heads=(2,), **SIZES), IMAGES
    ),
}


@pytest.mark.parametrize("kind", BUILDERS)
def test_graphs_are_those_of_the_converter(kind: str, tmp_path: Path) -> None:
    """The tensors of many networks are arranged together, with the same result as one by one."""
    builder = BUILDERS[kind](tmp_path / "zoo")
    zoo = open_zoo_folder(builder.build())
    trained = builder._trained(builder.list_networks(), lambda steps: None)
    assert len(zoo) == len(trained) >= 5 and len({row["group"] for row in zoo.rows}) > 1
    for graph, network in zip(zoo, trained, strict=True):
        module, shape = builder.module(network.item)
        values = [network.parameters]
        if network.masks is not None:
            ones = {key: torch.ones_like(x) for key, x in network.parameters.items()}
            values.append({**ones, **network.masks})
        for channel, tensors in enumerate(values):
            module.load_state_dict(tensors)
            alone = builder.transform(from_module(module, torch.zeros(1, *shape)))
            assert graph.spec == alone.spec
            assert graph.layout.placements == alone.layout.placements
            assert graph.layout.computation == alone.layout.computation
            stored = dict(graph.features().tensors())
            for key, x in alone.features().tensors():
                assert torch.equal(stored[key][..., channel : channel + 1], x), key


def test_options_of_no_zoo() -> None:
    with pytest.raises(TypeError, match=r"options of a zoo: CnnZooOptions.*\(got BuildOptions\)"):
        build_zoo(BuildOptions(Path("zoo")))


def test_seed_decides_everything(tmp_path: Path) -> None:
    zoos = [
        open_zoo_folder(build_zoo(small(tmp_path / n, seed=s), source=IMAGES))
        for n, s in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert same_networks(zoos[0], zoos[1])
    assert not same_networks(zoos[0], zoos[2])


def test_sharding_does_not_matter(tmp_path: Path) -> None:
    chosen = {"dtype": "float64", "checkpoints": (0.5, 1.0)}
    one = open_zoo_folder(build_zoo(small(tmp_path / "a", shard_size=100, **chosen), source=IMAGES))
    for part in ("2/3", "3/3", "1/3"):
        build_zoo(small(tmp_path / "b", shard_size=2, shard=part, **chosen), source=IMAGES)
    many = open_zoo_folder(tmp_path / "b")
    assert len({row["shard"] for row in many.rows}) == 5
    assert [r["network"] for r in one.rows] == [r["network"] for r in many.rows]
    for i in range(len(one)):
        for key, value in one.state_dict(i).items():
            torch.testing.assert_close(value, many.state_dict(i)[key], atol=1e-10, rtol=1e-10)
        assert one.rows[i]["seed"] == many.rows[i]["seed"]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from zoo_data import IMAGES, small
from nfn_graph.tasks.zoo import build_zoo
import time
from nfn_graph.tasks.zoo import training
train = training.train_classifiers
def slow(*args, **options):
    time.sleep(0.05)
    for checkpoint in train(*args, **options):
        time.sleep(0.01)
        yield checkpoint
training.train_classifiers = slow
build_zoo(small(Path(sys.argv[1]), networks=24, shard_size=2), source=IMAGES)
"""


def test_killed_and_resumed(tmp_path: Path) -> None:
    whole = open_zoo_folder(
        build_zoo(small(tmp_path / "whole", networks=24, shard_size=2), source=IMAGES)
    )
    folder = tmp_path / "killed"
    for shards in (2, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(Path(__file__).parents[1])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        limit = time.monotonic() + 120
        while len(list(folder.glob("shards/0*.json"))) < shards:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        published = {p.stem for p in folder.glob("shards/0*.json")}
        done = len(published)
        assert shards <= done < 12
        # Shards that a killed process has published can be read.
        assert len(open_zoo_folder(folder)) == 2 * done
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*/0*") if p.stem in published}
    assert len(before) == 3 * done
    build_zoo(small(folder, networks=24, shard_size=2), source=IMAGES)
    resumed = open_zoo_folder(folder)
    assert [row["network"] for row in resumed.rows] == list(range(24))
    assert same_networks(whole, resumed)
    assert all(p.stat().st_mtime_ns == before[p] for p in before)
    assert not list(folder.rglob(".*")), "a killed process's temporary files are removed"


def test_half_a_shard_does_not_count(tmp_path: Path) -> None:
    zoo = open_zoo_folder(build_zoo(small(tmp_path / "zoo"), source=IMAGES))
    (tmp_path / "zoo" / "shards" / "00001.json").unlink()
    (tmp_path / "zoo" / "weights" / "00001.safetensors").write_bytes(b"half")
    (tmp_path / "zoo" / "metadata" / ".00001.0123.parquet").write_bytes(b"half")
    assert len(open_zoo_folder(tmp_path / "zoo")) == 6
    build_zoo(small(tmp_path / "zoo"), source=IMAGES)
    assert same_networks(zoo, open_zoo_folder(tmp_path / "zoo"))
    assert not list((tmp_path / "zoo").rglob(".*"))


def test_two_builders_of_a_shard_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process starts when the first has written the weights, but not yet the table."""
    pytest.importorskip("fcntl")

    def build(number: int) -> None:
        network = {"0.weight": torch.full((2, 3), float(number)), "2.weight": torch.ones(4, 2)}
        row = {"number": number, "group": "a"}
        ZooWriter(tmp_path, "cnn", {}, {}).publish(0, [(row, from_state_dict(network))])

    second = threading.Thread(target=build, args=(2,))
    parquet = store_writer.parquet

    def interrupted() -> Any:
        if second.ident is None:
            second.start()
            second.join(1.0)
        return parquet()

    monkeypatch.setattr(store_writer, "parquet", interrupted)
    build(1)
    second.join()
    store = Store(tmp_path)
    assert list(find_damage(store.folder)) == [] and len(store) == 1
    (number,) = store.table.column("number").to_pylist()
    assert to_state_dict(store.graph(0))["0.weight"].unique().tolist() == [number]


def test_another_zoo_is_not_overwritten(tmp_path: Path) -> None:
    build_zoo(small(tmp_path / "zoo"), source=IMAGES)
    with pytest.raises(ValueError, match=r"learning-rate = .* \(got \[0\.1, 0\.2\]\)"):
        build_zoo(small(tmp_path / "zoo", learning_rate=(0.1, 0.2)), source=IMAGES)
    with pytest.raises(ValueError, match="fingerprint"):
        build_zoo(small(tmp_path / "zoo"), source=tiny_images(55))
    build_zoo(small(tmp_path / "zoo", together=3, data="elsewhere"), source=IMAGES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "4", "2"], "--epochs"),
        (["--widths", "0"], "--widths"),
        (["--shard", "3/2"], "--shard"),
        (["--dropout", "0.5", "1"], "--dropout"),
        (["--test-share", "0.9"], "--test-share of at most 1 together (got 0.15 and 0.9)"),
        (["--test-share", "-0.1"], "--test-share between 0 and 1"),
        (["--arch", "mlp", "--padding", "1"], "no --padding with --arch mlp"),
        (["--checkpoints"], "at least one value of --checkpoints"),
        (["--data", "nowhere"], "nowhere"),
        (["--learning-rate", "0", "1"], "--learning-rate as two numbers above 0, the smaller"),
        (["--depths", "3", "--padding", "0"], "padding of 1"),
    ],
)
def test_bad_options_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["zoo", "cnn", "--out", str(tmp_path / "zoo"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nfn-graph: Expected") and error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "zoo").exists()


def test_a_part_without_shards(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--shard to name at most 3 parts.*got '4/4'"):
        build_zoo(small(tmp_path / "zoo", shard="4/4"), source=IMAGES)


def test_a_folder_with_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are neither a style of the progress bar nor its end."""
    # The bar is only shown in terminals.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")  # There must be room for a long path.
    out = tmp_path / "a[" / "red]"
    build_zoo(small(out, networks=2), source=IMAGES, progress=True)
    assert len(open_zoo_folder(out)) == 2
    assert "a[/red]" in capsys.readouterr().err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "zoo")
    arguments = ["--networks", "4", "--arch", "mlp", "--depths", "1", "--epochs", "1", "1"]
    assert main(["zoo", "cnn", "--out", out, *arguments]) == 0
    assert "4 checkpoints, test accuracy" in capsys.readouterr().out
    zoo = open_zoo_folder(out)
    assert zoo[0].layout.shape.sizes == ((64,), (16,), (10,))
    assert main(["zoo", "render", out, "-o", str(tmp_path / "a.png")]) == 2
    assert "zoo of INRs" in capsys.readouterr().err
    assert main(["zoo", "render", str(tmp_path), "-o", str(tmp_path / "a.png")]) == 2
    assert "store.json" in capsys.readouterr().err

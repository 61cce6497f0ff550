"""The store: everything is read back, damage is noticed, and half a shard does not count."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from comparing import assert_same, assert_same_graph
from stores import graphs, write_store

from nfn_graph import cli
from nfn_graph.converters import ConversionError, from_state_dict, load, save, to_state_dict
from nfn_graph.converters.store import shards
from nfn_graph.converters.store.description import read_description
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.store.writer import StoreWriter

GRAPHS = graphs()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(write_store(tmp_path_factory.mktemp("store"), list(GRAPHS.values())))


@pytest.mark.parametrize("name", GRAPHS)
def test_all_that_a_graph_file_keeps_is_kept(stored: Store, name: str, tmp_path: Path) -> None:
    graph = stored.graph(list(GRAPHS).index(name))
    assert_same_graph(graph, GRAPHS[name])
    for channel in ("weights", *GRAPHS[name].layout.channels):
        assert_same(to_state_dict(graph, channel), to_state_dict(GRAPHS[name], channel))
    save(GRAPHS[name], tmp_path / "g.safetensors", as_graph=True)
    assert_same_graph(graph, load(tmp_path / "g.safetensors"))


def test_networks_of_one_architecture_share_a_layout(tmp_path: Path) -> None:
    chosen = [GRAPHS["mlp"], GRAPHS["wide"], GRAPHS["signalling"], GRAPHS["mlp"], GRAPHS["wide"]]
    store = Store(write_store(tmp_path / "s", chosen, 2))
    assert len(list((tmp_path / "s" / "architectures").iterdir())) == 2
    assert store.graph(0).layout is store.graph(3).layout
    assert store.places.row.tolist() == [0, 0, 0, 1, 0]
    # Changing a graph that was read changes neither the store nor another graph.
    first = store.graph(0)
    first["hidden1"].x.zero_()
    assert_same_graph(store.graph(0), GRAPHS["mlp"])


def test_buffers_of_networks_differ(tmp_path: Path) -> None:
    networks = []
    for i in range(3):
        state_dict = to_state_dict(GRAPHS["buffers"])
        state_dict |= {"extra": torch.full((3,), i, dtype=torch.uint8), "note": f"network {i}"}
        networks.append(from_state_dict(state_dict))
    store = Store(write_store(tmp_path / "s", networks, 2))
    assert len(store.architecture_names) == 1
    for i in range(3):
        assert_same_graph(store.graph(i), networks[i])
    assert to_state_dict(store.graph(2))["note"] == "network 2"


def test_it_is_opened_by_other_readers(stored: Store) -> None:
    assert pq.read_table(stored.folder / "metadata").num_rows == len(GRAPHS)
    from safetensors.torch import load_file

    tensors = load_file(stored.folder / "weights" / "00000.safetensors")
    name = stored.architecture_names[0]
    expected = to_state_dict(GRAPHS["mlp"])
    assert tensors[f"{name}/float32"].shape == (2, sum(x.numel() for x in expected.values()))


def damaged_copy(stored: Store, folder: Path) -> Path:
    return Path(shutil.copytree(stored.folder, folder / "copy"))


@pytest.mark.parametrize("part", ["weights", "metadata", "shards", "architectures"])
@pytest.mark.parametrize("kind", ["flipped", "cut", "missing"])
def test_damage_is_noticed(stored: Store, tmp_path: Path, part: str, kind: str) -> None:
    folder = damaged_copy(stored, tmp_path)
    victim = sorted((folder / part).iterdir())[1]
    content = bytearray(victim.read_bytes())
    victim.unlink()
    if kind == "flipped":
        content[len(content) * 2 // 3] ^= 1
        victim.write_bytes(content)
    elif kind == "cut":
        victim.write_bytes(content[:-1])
    if part == "shards" and kind == "missing":
        assert len(Store(folder)) == len(GRAPHS) - 4  # The shard is ignored.
        return
    assert [damage.path for damage in find_damage(folder)] == [victim]
    if part in ("shards", "metadata") or (part == "weights" and kind != "flipped"):
        with pytest.raises((ConversionError, OSError), match=victim.name):
            Store(folder)
    if part == "architectures":
        store = Store(folder)
        with pytest.raises((ConversionError, OSError), match=victim.name):
            [store.graph(i) for i in range(len(store))]


def test_another_layout_under_a_name_is_noticed(stored: Store, tmp_path: Path) -> None:
    folder = damaged_copy(stored, tmp_path)
    path = folder / "architectures" / f"{stored.architecture_names[0]}.json"
    path.write_text(path.read_text().replace("0.weight", "9.weight"))
    with pytest.raises(ConversionError, match=path.name):
        Store(folder).graph(0)
    assert list(find_damage(folder)) == [(path, "different content")]


def test_all_damage_is_named(
    stored: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file of every kind is damaged, and each is reported on its own line."""
    folder = damaged_copy(stored, tmp_path)
    victims = {
        "shards": "00000.json",
        "metadata": "00004.parquet",
        "weights": "00008.safetensors",
        "architectures": f"{stored.architecture_names[1]}.json",
    }
    paths = [folder / part / name for part, name in victims.items()] + [folder / "store.json"]
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    missing = folder / "weights" / "00012.safetensors"
    missing.unlink()
    assert {damage.path for damage in find_damage(folder)} == {*paths, missing}
    assert cli.main(["store", str(folder), "--verify"]) == 1
    captured = capsys.readouterr()
    assert not captured.err
    lines = captured.out.splitlines()
    for path in (*paths, missing):
        assert len([line for line in lines if line.startswith(f"damaged: {path} (got ")]) == 1
    assert len(lines) == 1 + 6 and "6 files are damaged" in lines[-1]
    assert cli.main(["store", str(folder)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert cli.main(["store", str(tmp_path), "--verify"]) == 2


def test_a_shard_may_be_deleted_while_a_store_is_opened(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does what another process does that has converted all of its networks again."""
    folder = damaged_copy(stored, tmp_path)
    read_table = shards.read_table

    def interrupted(folder: Path, shard: shards.Shard) -> Any:
        shards.remove_shard(folder, "00004")
        return read_table(folder, shard)

    monkeypatch.setattr(shards, "read_table", interrupted)
    opened = Store(folder)
    assert [shard.name for shard in opened.shards] == ["00000", "00008", "00012"]
    monkeypatch.undo()
    # An open store says what to do, and is not called damaged.
    shards.remove_shard(folder, "00008")
    with pytest.raises(ConversionError, match=r"00008.*Open the store again"):
        opened.graph(4)
    (folder / "weights" / "00012.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"00012.*The store is damaged"):
        opened.graph(len(opened) - 1)


def test_a_shard_counts_when_its_record_is_there(stored: Store, tmp_path: Path) -> None:
    folder = damaged_copy(stored, tmp_path)
    (folder / "shards" / "00004.json").unlink()
    (folder / "weights" / ".00004.0123.safetensors").write_bytes(b"half")
    store = Store(folder)
    assert store.table.column("number").to_pylist() == [*range(4), *range(8, len(GRAPHS))]
    assert list(find_damage(folder)) == []
    writer = StoreWriter(folder, {})
    with pytest.raises(ValueError, match="already published"):
        writer.publish("00000", [({}, GRAPHS["mlp"])])
    writer.publish("00004", [({"number": 99, "half": 0.0}, GRAPHS["mlp"])])
    assert not list(folder.rglob(".*"))
    assert 99 in Store(folder).table.column("number").to_pylist()


def test_rows_need_not_have_the_same_columns(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", {})
    rows = [{"a": 1}, {"b": "x"}, {"a": 2, "c": {"d": [3]}}]
    writer.publish("00000", [(row, GRAPHS["mlp"]) for row in rows])
    found = Store(tmp_path / "s").rows
    assert [{k: row[k] for k in "abc" if row[k] is not None} for row in found] == rows


@pytest.mark.parametrize("column", ["shard", "architecture", "row", "notes"])
def test_a_column_that_leads_to_networks_is_not_replaced(column: str, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", {})
    with pytest.raises(ValueError, match=f"columns other.*got '{column}'.*Rename"):
        writer.publish("00000", [({column: "mine"}, GRAPHS["mlp"])])
    assert not [p for p in (tmp_path / "s").rglob("*") if p.is_file() and p.name != "store.json"]


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from stores import graphs
from nfn_graph.converters.store.writer import StoreWriter
networks, replace = list(graphs().values())[:2], os.replace
def run(step):
    def stop(source, target):
        nonlocal step
        step -= 1
        if step < 0:
            os._exit(9)
        replace(source, target)
    folder = Path(f"store{step}")
    os.replace = stop
    writer = StoreWriter(folder, {})
    writer.publish("00000", [({}, g) for g in networks])
    writer.publish("00001", [({}, g) for g in networks])
    os._exit(0)
for step in range(9):
    if not os.fork():
        run(step)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_writer_leaves_the_last_good_state(tmp_path: Path) -> None:
    """Kills before each rename: of the description, of the architecture, and three per shard."""
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1])]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["9"] * 8 + ["0"]
    for step in range(9):
        folder = tmp_path / f"store{step}"
        done = 2 * ((step - 2) // 3) if step >= 2 else 0
        if done:
            assert len(Store(folder)) == done
            assert list(find_damage(folder)) == []
        elif step:
            with pytest.raises(ValueError, match="finished shard"):
                Store(folder)
        writer = StoreWriter(folder, {})
        for name in ("00000", "00001"):
            if not writer.is_done(name):
                writer.publish(name, [({}, GRAPHS["mlp"])] * 2)
        assert len(Store(folder)) == 4 and list(find_damage(folder)) == []


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"store\.json"):
        Store(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"mine\.txt"):
        StoreWriter(tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "zoo.json").write_text(json.dumps({"version": 1, "kind": "cnn"}))
    for action in (Store, read_description, lambda folder: StoreWriter(folder, {})):
        with pytest.raises(ValueError, match="version 1"):
            action(old)
    new = tmp_path / "new"
    write_store(new, [GRAPHS["mlp"]])
    document = json.loads((new / "store.json").read_text())
    (new / "store.json").write_text(json.dumps({**document, "version": 4}))
    with pytest.raises(ValueError, match="version 4"):
        Store(new)


def test_every_flipped_byte_of_the_description_is_noticed(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", {"key": "file", "kind": "cnn"})
    path = tmp_path / "s" / "store.json"
    content = path.read_bytes()
    assert read_description(tmp_path / "s")["kind"] == "cnn"
    for place, bit in itertools.product(range(len(content)), range(8)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"store\.json"):
            read_description(tmp_path / "s")


def test_the_key_of_a_store_is_a_name(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", {"key": 3})
    with pytest.raises(ValueError, match="not the name of a column"):
        read_description(tmp_path / "s")


def test_an_open_store_can_be_sent(stored: Store) -> None:
    stored.graph(0)
    again = pickle.loads(pickle.dumps(stored))
    assert again._mapped == {}
    for i in range(len(stored)):
        assert_same_graph(again.graph(i), stored.graph(i))

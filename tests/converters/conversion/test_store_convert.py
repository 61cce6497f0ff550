"""Converting into a store: killed and resumed, divided between machines, and repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoints
import pyarrow.parquet as pq
import pytest
import torch
from killing import check, kill_and_resume, write_files

from nfn_graph import cli
from nfn_graph.converters import from_module, load, to_state_dict
from nfn_graph.converters.conversion import Options, convert_files, sharding
from nfn_graph.converters.store.description import only_writer
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.store.writer import StoreWriter
from small_disk import is_mounted, small_disk


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The full size is `python tests/converters/killing.py`: 5000 files and 20 kills."""
    published = kill_and_resume(tmp_path, files=200, kills=3, shard_size=8, seed=1)
    assert len(published) == 3 and published == sorted(published)


@pytest.mark.parametrize("parts", [1, 3])
def test_machines_divide_the_files(parts: int, tmp_path: Path) -> None:
    paths, out = write_files(tmp_path / "in", 20), tmp_path / "out"
    counts = []
    for number in reversed(range(1, parts + 1)):
        arguments = ["convert", str(tmp_path / "in"), "--out", str(out)]
        assert cli.main([*arguments, "--shard", f"{number}/{parts}", "--shard-size", "3"]) == 0
        name = "report.json" if parts == 1 else f"report-{number}of{parts}.json"
        counts.append(json.loads((out / name).read_text())["converted"])
    assert sum(counts) == 20 and max(counts) - min(counts) <= 1
    check(paths, out)
    assert cli.main(["convert", str(tmp_path / "in"), "--out", str(out)]) == 0
    assert json.loads((out / "report.json").read_text())["skipped"] == 20


def test_slow_files_are_published_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_MOST_SECONDS", 0)
    paths = write_files(tmp_path / "in", 4)
    convert_files(paths, tmp_path / "out", Options())
    assert len(Store(tmp_path / "out").shards) == 4
    check(paths, tmp_path / "out")


def test_one_process_writes_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "in", 2)
    arguments = ["convert", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    with only_writer(tmp_path / "out" / "convert.lock", "") as works:
        assert works
        assert cli.main(arguments) == 2
        assert "no other process" in capsys.readouterr().err
    assert cli.main(arguments) == 0


def test_what_cannot_be_stored_fails_alone(tmp_path: Path) -> None:
    paths = write_files(tmp_path / "in", 2)
    strange = {**checkpoints.mlp().state_dict(), "extra": torch.zeros(2, dtype=torch.complex128)}
    torch.save(strange, tmp_path / "in" / "strange.pt")
    report = convert_files([*paths, tmp_path / "in" / "strange.pt"], tmp_path / "out", Options())
    assert report.converted == 2
    ((path, reason),) = report.failed.items()
    assert path.endswith("strange.pt") and "complex128" in reason


@pytest.mark.parametrize("format_", ["pt", "safetensors", "npz", "graph"])
def test_export_gives_the_files_back(format_: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    network = {**checkpoints.mlp().state_dict(), "count": torch.tensor(7)}
    torch.save(network, folder / "deep" / "a.pt")
    checkpoints.write_npz(folder / "b.npz", dict(checkpoints.mlp().state_dict()))
    out, store = tmp_path / "out", str(tmp_path / "store")
    assert cli.main(["convert", str(folder), "--out", store]) == 0
    arguments = ["export", store, "--out", str(out), "--format", format_]
    assert cli.main(arguments) == 0
    table = pq.read_table(out / "metadata.parquet")
    names = table.column("file").to_pylist()
    expected = {
        "pt": ["b.npz.pt", "deep/a.pt"],
        "safetensors": ["b.npz.safetensors", "deep/a.pt.safetensors"],
        "npz": ["b.npz", "deep/a.pt.npz"],
        "graph": ["b.npz.safetensors", "deep/a.pt.safetensors"],
    }
    assert names == expected[format_]
    for name, source in zip(names, ("b.npz", "deep/a.pt"), strict=True):
        found, wanted = to_state_dict(load(out / name)), to_state_dict(load(folder / source))
        assert list(found) == list(wanted)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert [found[k].dtype for k in found] == [wanted[k].dtype for k in wanted]
    assert cli.main(arguments) == 2
    assert cli.main([*arguments, "--overwrite"]) == 0
    part = ["--where", "file=b.npz"]
    assert cli.main(["export", store, "--out", str(tmp_path / "part"), *part]) == 0
    assert [p.name for p in sorted((tmp_path / "part").iterdir())] == [
        "b.npz.pt",
        "metadata.parquet",
    ]
    assert cli.main(["export", store, "--out", str(tmp_path / "x"), "--where", "file=x"]) == 2
    assert cli.main(["export", store, "--out", str(tmp_path / "x"), "--where", "file"]) == 2


def test_export_of_channels_and_strange_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = checkpoints.mlp()
    mask = {key: (x > 0).to(x.dtype) for key, x in module.state_dict().items()}
    graph = from_module(module, example_input=torch.empty(1, 3), channels={"mask": mask})
    StoreWriter(tmp_path / "s", {}).publish("0", [({}, graph)])
    arguments = ["export", str(tmp_path / "s"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "channel=" in capsys.readouterr().err
    assert cli.main([*arguments, "--channel", "mask"]) == 0
    found = torch.load(tmp_path / "out" / "000000.pt", weights_only=True)
    assert all(torch.equal(found[key], mask[key]) for key in mask)
    StoreWriter(tmp_path / "t", {}).publish("0", [({"file": "../up"}, graph)])
    assert cli.main(["export", str(tmp_path / "t"), "--out", str(tmp_path / "out")]) == 2
    assert "'../up'" in capsys.readouterr().err


def test_export_refuses_two_networks_of_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "c", tmp_path / "out"
    folder.mkdir()
    for name in ("x.pth", "x.pth.pt"):
        torch.save(checkpoints.mlp().state_dict(), folder / name)
    assert cli.main(["convert", str(folder), "--out", str(tmp_path / "store")]) == 0
    arguments = ["export", str(tmp_path / "store"), "--out", str(out)]
    assert cli.main([*arguments, "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert "'x.pth'" in error and "'x.pth.pt'" in error and not out.exists()
    assert cli.main([*arguments, "--format", "npz"]) == 0
    assert len(list(out.glob("*.npz"))) == 2


def test_the_command_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "in", 6)
    out = tmp_path / "out"
    assert cli.main(["convert", str(tmp_path / "in"), "--out", str(out)]) == 0
    capsys.readouterr()
    assert cli.main(["store", str(out), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "6 networks of 3 architectures in 1 shards" in text and "all right" in text
    assert "hidden1 4" in text and "columns: file, path" in text
    weights = next((out / "weights").iterdir())
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert cli.main(["store", str(out)]) == 0
    assert cli.main(["store", str(out), "--verify"]) == 1
    assert f"damaged: {weights}" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "2"] if is_mounted() else ["1"])
def test_a_full_disk_is_one_line_and_the_rest_is_converted_later(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "many").mkdir()
    for i in range(40):
        torch.save(checkpoints.mlp((30, 40, 20)).state_dict(), tmp_path / "many" / f"{i:02d}.pt")
    command = ["convert", str(tmp_path / "many"), "--workers", workers, "--shard-size", "8"]
    with small_disk(tmp_path / "small", 200 * 1024) as folder:
        assert cli.main([*command, "--out", str(folder / "store")]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith("nfn-graph: Expected enough space") and "(got a full disk)" in line
        assert list(find_damage(folder / "store")) == []
        shutil.copytree(folder / "store", tmp_path / "store")
    assert cli.main([*command, "--out", str(tmp_path / "store")]) == 0
    assert len(Store(tmp_path / "store")) == 40

"""The command line: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

from nfn_graph import WeightGraph, cli
from nfn_graph.converters import conversion
from nfn_graph.converters.conversion import sharding
from nfn_graph.converters.io import load
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.store.writer import StoreWriter


def write(path: Path, count: int = 1) -> list[Path]:
    paths = []
    for i in range(count):
        paths.append(path.with_stem(f"{path.stem}{i}") if count > 1 else path)
        torch.save(checkpoints.mlp().state_dict(), paths[-1])
    return paths


def names(out: Path) -> list[str]:
    """The networks of a store."""
    return Store(out).table.column("file").to_pylist()


def read(out: Path, name: str) -> WeightGraph:
    """A network of a store."""
    return Store(out).graph(names(out).index(name))


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert "nfn-graph inspect model.pt" in text
    assert cli.main([]) == 2
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        assert f"nfn-graph {name} " in capsys.readouterr().out.split("Examples:")[1]


def test_rooms_are_imported_only_when_needed() -> None:
    code = (
        "import sys; from nfn_graph import cli; cli.main(['--help']); "
        "print([m for m in sys.modules if 'nfn_graph.converters' in m or m in ('tyro', 'rich')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_inspect_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write(tmp_path / "x.pt")
    assert cli.main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert str(path) in out
    assert "hidden1 -> hidden2" in out
    assert "NaN" in out and "infinite" not in out


def test_inspect_reports_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = dict(checkpoints.mlp().state_dict())
    tensors["2.weight"][0, :3] = float("nan")
    torch.save(tensors, tmp_path / "x.pt")
    assert cli.main(["inspect", str(tmp_path / "x.pt")]) == 0
    assert "3 entries are NaN and 0 infinite" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "x.pt"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["types"]
    assert [row["nan"] for row in rows if row["type"] == "hidden1 -> hidden2"] == [3]


# This is refused before a cluster is looked for or started.
RAY = ["--engine", "ray"]


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (good,) = write(tmp_path / "good.pt")
    (tmp_path / "bad.pt").write_bytes(b"nonsense" * 9)
    bad = [str(tmp_path / "bad.pt"), str(tmp_path / "missing.pt")]
    assert cli.main(["inspect", bad[0], str(good), bad[1]]) == 1
    captured = capsys.readouterr()
    assert str(good) in captured.out
    lines = captured.err.splitlines()
    assert [path in line for path, line in zip(bad, lines, strict=True)] == [True, True]
    monkeypatch.setitem(sys.modules, "ray", None)
    for arguments in (
        ["draw", bad[0], "-o", str(tmp_path / "x.png")],
        ["draw", str(good), "-o", str(tmp_path / "x.nothing")],
        ["draw", str(good), "-o", str(tmp_path / "no" / "folder.png")],
        ["inspect", str(good), "--arch", "nowhere"],
        ["inspect", str(good), "--arch", "missing_package.models:make"],
        ["inspect"],
        ["nothing"],
        ["convert", str(good), "--out", str(good)],
        ["convert", str(good), "--out", str(tmp_path / "out"), "--workers", "-1"],
        ["convert", str(good), "--out", str(tmp_path / "out"), "--shard", "3/2"],
        ["convert", str(good), "--out", str(tmp_path / "out"), "--shard-size", "0"],
        ["convert", str(good), "--out", str(tmp_path / "out"), "--shard-size", "0", *RAY],
        ["convert", str(good), "--out", str(good), *RAY],
        ["store", str(tmp_path)],
        ["export", str(tmp_path), "--out", str(tmp_path / "out")],
    ):
        assert cli.main(arguments) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert "'ray'" not in line, arguments


HOSTILE = [
    ["convert", "x.pt"],
    ["convert", "--out"],
    ["convert", "x.pt", "--out", "out", "--workers", "many"],
    ["convert", "x.pt", "--out", "out", "--workers", "-3"],
    ["convert", "x.pt", "--out", "out", "--nothing"],
    ["convert", "x.pt", "--out", "x.pt/inside"],
    ["convert", "missing/", "--out", "out/../../\x00"],
    ["inspect"],
    ["inspect", "x.pt", "--flatten", "rows"],
    ["inspect", "x.pt", "--input-shape"],
    ["inspect", "x.pt", "--input-shape", "1", "-3"],
    ["inspect", "x.pt", "--input-shape", "1", "x"],
    ["inspect", "x.pt", "--input-shape", "9" * 40, "3"],
    ["inspect", "x.pt", "--input-shape", "1", "4"],
    ["inspect", "line\nbreak.pt"],
    ["inspect", "\x1b[2Jclear.pt"],
    ["inspect", "\x00"],
    ["inspect", "x" * 5000],
    ["inspect", "."],
    ["inspect", "x.pt", "--arch", ""],
    ["inspect", "x.pt", "--arch", ":"],
    ["inspect", "x.pt", "--arch", "os:"],
    ["inspect", "x.pt", "--arch", "os:path"],
    ["inspect", "x.pt", "--arch", "os:getcwd"],
    ["inspect", "x.pt", "--arch", "../up:x"],
    ["inspect", "x.pt", "--arch", ".up:x"],
    ["draw", "x.pt"],
    ["draw", "x.pt", "y.pt", "-o", "z.png"],
    ["draw", "x.pt", "-o", "x.png", "--max-neurons", "0"],
    ["draw", "x.pt", "-o", "x.png", "--max-neurons", "x"],
    ["draw", "x.pt", "-o", ""],
    ["draw", "x.pt", "-o", "."],
    ["\x00"],
    ["--nothing"],
]


@pytest.mark.parametrize("arguments", HOSTILE, ids=str)
def test_wrong_arguments_give_one_line_and_code_2(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if arguments != ["inspect", "."]:
        write(folder / "x.pt")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("nfn-graph: ")
    assert line.isprintable()
    assert "a bug in nfn-graph" not in line


BROKEN = {
    "raises": "def make():\n    raise RuntimeError('no\\nnetwork')\n",
    "leaves": "import sys\n\ndef make():\n    sys.exit(3)\n",
    "divides": "x = 1 / 0\nmake = None\n",
    "spelled": "def make(:\n",
    "lacks": "import no_such_package_at_all\nmake = None\n",
    "loops": "def make():\n    return make()\n",
    "needs": "def make(width):\n    return width\n",
    "forward": (
        "from torch import nn\n"
        "class Network(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        raise KeyError('where')\n"
        "def make():\n"
        "    return Network(*(nn.Linear(a, b) for a, b in ((3, 5), (5, 4), (4, 2))))\n"
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_code_of_an_arch_that_fails_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"broken_{name}.py").write_text(BROKEN[name])
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.pt")
    assert cli.main(["inspect", "x.pt", "--arch", f"broken_{name}:make"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    if name not in ("lacks", "forward"):
        assert f"broken_{name}:make" in line
        assert f"broken_{name}.py:" in line or name == "needs"
    arguments = ["convert", "x.pt", "--out", "out", "--arch", f"broken_{name}:make"]
    assert cli.main(arguments) == 2
    assert "0 converted, 0 skipped, 1 failed" in capsys.readouterr().out


def test_a_program_sees_one_line_and_no_traceback(tmp_path: Path) -> None:
    result = run(["convert", "x.pt"], tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    result = run(["convert", "--help"], tmp_path)
    assert result.returncode == 0
    assert "--input-shape" in result.stdout and not result.stderr


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nfn_graph.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_bugs_show_where_they_are_and_ask_to_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write(tmp_path / "x.pt")
    for kind, bug in (("KeyError", lambda graph: {}["x"]), ("ValueError", lambda graph: int("x"))):
        monkeypatch.setattr("nfn_graph.converters.commands.summary", bug)
        monkeypatch.setattr("nfn_graph.converters.commands.WeightDataset", bug)
        for arguments, code in (
            (["inspect", str(path)], 2),
            (["export", str(tmp_path), "--out", str(tmp_path / "x")], cli.BUG),
        ):
            assert cli.main(arguments) == code
            lines = capsys.readouterr().err.splitlines()
            assert lines[0] == "Traceback (most recent call last):"
            assert f"This looks like a bug in nfn-graph: {kind} " in lines[-1]
            assert lines[-1].endswith("Please report it with the traceback above.")


def test_the_input_shape_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 2, 3))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    arguments = ["inspect", str(tmp_path / "x.pt"), "--json"]
    assert cli.main(arguments) == 2
    for channels in ("1", "4"):
        assert cli.main([*arguments, "--input-shape", "1", channels, "9", "9"]) == 0
        rows = json.loads(capsys.readouterr().out)["types"]
        assert next(row["neurons"] for row in rows if "input" in row["type"]) == int(channels)
    out = tmp_path / "out"
    arguments = ["convert", str(tmp_path / "x.pt"), "--out", str(out)]
    assert cli.main(arguments) == 2
    assert cli.main([*arguments, "--input-shape", "1", "1", "9", "9"]) == 0


def test_draw_writes_a_picture(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "x.pt")
    assert cli.main(["draw", str(path), "-o", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_arch_is_imported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    )
    torch.save(model.state_dict(), "x.pt")
    assert cli.main(["inspect", "x.pt"]) == 2
    message = capsys.readouterr().err
    assert "Pass an --input-shape, of which" in message
    assert "Pass the network as --arch, if" in message
    assert cli.main(["inspect", "x.pt", "--input-shape", "1", "1", "4", "4"]) == 2
    message = capsys.readouterr().err
    assert "Expected --flatten channels_first or --flatten channels_last (got none)" in message
    assert cli.main(["inspect", "x.pt", "--arch", "my_models:make"]) == 0
    shape = ["--input-shape", "1", "1", "4", "4"]
    assert cli.main(["inspect", "x.pt", "--flatten", "channels_first", *shape]) == 0
    capsys.readouterr()


def test_convert_writes_graphs_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    first = write(tmp_path / "in" / "x.pt")[0]
    second = write(tmp_path / "in" / "deep" / "x.pt")[0]
    (tmp_path / "in" / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "in" / "bad.npz").write_bytes(b"nonsense" * 9)
    arguments = ["convert", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert "2 converted, 0 skipped, 1 failed" in captured.out
    assert "bad.npz" in captured.err
    for path, name in ((first, "x.pt"), (second, "deep/x.pt")):
        graph = read(tmp_path / "out", name)
        expected = load(path)
        assert graph.layout == expected.layout
        for key, tensor in expected.to_tensors().items():
            assert torch.equal(graph.to_tensors()[key], tensor)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["converted"] == 2
    ((name, reason),) = report["failed"].items()
    assert name.endswith("bad.npz") and "Expected" in reason
    (tmp_path / "in" / "bad.npz").unlink()
    # The second time, nothing is left to do. A changed file or option is converted again.
    assert cli.main(arguments) == 0
    assert "0 converted, 2 skipped, 0 failed" in capsys.readouterr().out
    write(first)
    os.utime(first, ns=(1, 1))
    assert cli.main(arguments) == 0
    assert "1 converted, 1 skipped, 0 failed" in capsys.readouterr().out
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert "2 converted, 0 skipped, 0 failed" in capsys.readouterr().out
    # Each network is there once, and no shard stays without current networks.
    assert names(tmp_path / "out") == ["deep/x.pt", "x.pt"]
    assert len(Store(tmp_path / "out").shards) == 1


@pytest.mark.parametrize("out", ["in/graphs", "in/deep/graphs"])
def test_graphs_are_not_converted_again(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store to write to lies in the folder of checkpoints."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write(tmp_path / "in" / "x.pt")
    write(tmp_path / "in" / "deep" / "y.pt")
    monkeypatch.chdir(tmp_path)
    arguments = ["convert", "in", "--out", out]
    for expected in ("2 converted, 0 skipped", "0 converted, 2 skipped", "0 converted, 2 skipped"):
        assert cli.main(arguments) == 0
        assert expected in capsys.readouterr().out
    assert len(names(Path(out))) == 2
    # Another store is skipped with a message; a graph file is a file like any other.
    assert cli.main(["export", out, "--out", "in/files", "--format", "graph"]) == 0
    assert cli.main(["convert", "in", "--out", "again"]) == 0
    assert f"skipped the store {out}" in capsys.readouterr().err
    graphs = sorted(n for n in names(Path("again")) if n.startswith("files/"))
    assert len(graphs) == 2 and len(names(Path("again"))) == 4
    assert all(load(Path("in") / name).layout for name in graphs)
    for command in ("inspect", "convert"):
        assert cli.main([command, out, "--out", "third"][: 2 if command == "inspect" else 4]) == 2
        assert "nfn-graph export" in capsys.readouterr().err


def test_an_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    paths = write(tmp_path / "x.pt", 4)
    done = 0

    def interrupt(count: int) -> None:
        nonlocal done
        done += count
        if done == 2:
            raise KeyboardInterrupt

    options = conversion.Options()
    with pytest.raises(KeyboardInterrupt):
        conversion.convert_files(paths, tmp_path / "out", options, on_done=interrupt)
    assert names(tmp_path / "out") == ["x0.pt", "x1.pt"]
    report = conversion.convert_files(paths, tmp_path / "out", options)
    assert (report.converted, report.skipped) == (2, 2)


def test_many_files_are_converted_in_parallel(tmp_path: Path) -> None:
    paths = write(tmp_path / "x.pt", 40)
    (tmp_path / "bad.pt").write_bytes(b"nonsense" * 9)
    pool = conversion.convert_files(
        [*paths, tmp_path / "bad.pt"], tmp_path / "many", conversion.Options(), workers=2
    )
    here = conversion.convert_files(paths[:3], tmp_path / "few", conversion.Options())
    assert (pool.converted, here.converted) == (40, 3)
    assert list(pool.failed) == [str(tmp_path / "bad.pt")]
    assert names(tmp_path / "many") == sorted(p.name for p in paths)
    many, few = (read(tmp_path / n, "x0.pt") for n in ("many", "few"))
    assert many.layout == few.layout
    for key, tensor in few.to_tensors().items():
        assert torch.equal(many.to_tensors()[key], tensor)


def test_a_file_that_kills_its_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The architecture of one file ends the process, like a crash in a library."""
    (tmp_path / "killer.py").write_text(
        "import os, sys\n"
        "from torch import nn\n"
        "from nfn_graph.converters.conversion import reading\n"
        "load = reading.load\n"
        "def stop(path, **options):\n"
        "    if path.name == 'x3.pt':\n"
        "        os._exit(1)\n"
        "    return load(path)\n"
        "def make():\n"
        "    reading.load = stop\n"
        "    return nn.Linear(1, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sharding, "_PARALLEL_FROM", 2)
    monkeypatch.setattr(sharding, "_JOBS_PER_WORKER", 1)
    paths = write(tmp_path / "x.pt", 6)
    options = conversion.Options(arch="killer:make")
    report = conversion.convert_files(paths, tmp_path / "out", options, workers=2)
    assert report.converted == 5
    assert list(report.failed) == [str(paths[3])]
    assert "kills the process" in report.failed[str(paths[3])]
    assert names(tmp_path / "out") == [p.name for p in paths if p != paths[3]]
    assert list(find_damage(tmp_path / "out")) == []


@pytest.mark.parametrize("folder", ["checkpoints", "zoo", "old zoo"])
def test_convert_never_writes_among_files_of_the_user(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not a store of its own is left alone."""
    (path,) = write(tmp_path / "x.pt")
    out = tmp_path / "out"
    out.mkdir()
    if folder == "checkpoints":
        write(out / "y.pt")
    elif folder == "zoo":
        StoreWriter(out, {"kind": "cnn"}).publish("00000", [({}, load(path))])
    else:
        (out / "zoo.json").write_text('{"version": 1}')
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert cli.main(["convert", str(path), "--out", str(out)]) == 2
    assert "Expected" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """A killed process cannot report anything."""
    write(tmp_path / "x.pt", 40)
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "from torch import nn\n"
        "def make():\n"
        "    open(f'worker.{os.getpid()}', 'w').close()\n"
        "    time.sleep(600)\n"
    )
    command = ["convert", ".", "--out", "out", "--workers", "2", "--arch", "slow:make"]
    main = subprocess.Popen(
        [sys.executable, "-m", "nfn_graph.cli", *command],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        workers = until(lambda: found if len(found := pids(tmp_path)) == 2 else None)
        assert main.pid not in workers and all(map(is_alive, workers))
    finally:
        main.kill()
        main.wait()
    # The server that started them is gone, too.
    until(lambda: (not any(map(is_alive, workers)) and not living_in(tmp_path)) or None)


def pids(folder: Path) -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob("worker.*")]


def living_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == folder and is_alive(int(process.name)):
                found.append(process.name)
        except OSError:
            continue
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], Any], seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while (found := condition()) is None:
        assert time.monotonic() < end, "Nothing happened"
        time.sleep(0.1)
    return found

"""Shards on a Ray cluster where a worker is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn
from zoo_data import IMAGES, same_networks, small

from nfn_graph.cli import main
from nfn_graph.converters import WeightDataset, to_state_dict
from nfn_graph.converters.conversion import jobs as engines
from nfn_graph.converters.conversion.jobs import run_jobs
from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Starts two workers on this machine that are reachable from this machine only."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers must find the modules of the tests in the same place as this process.
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": path},
        # Otherwise, workers would run at a lower priority than all other processes.
        _system_config={"worker_niceness": 0},
    )
    yield
    ray.shutdown()


def build_slowly(marks: Path, kind: Any, options: CnnZooOptions, source: Any, shard: str) -> Path:
    """Tells that a shard has begun, and is slow enough to be killed in the middle of it."""
    (marks / f"{os.getpid()}-{shard.replace('/', '-')}").touch()
    time.sleep(1)
    found: Path = kind(replace(options, shard=shard), source).build()
    return found


def kill_one(folder: Path, marks: Path, killed: list[int]) -> None:
    """Kills a worker that is in the middle of a shard, as soon as another shard is published."""
    limit = time.monotonic() + 100
    while not killed and time.monotonic() < limit:
        time.sleep(0.02)
        if not list(folder.glob("metadata/0*.parquet")):
            continue
        newest = max(marks.iterdir(), key=lambda mark: mark.stat().st_mtime)
        if time.time() - newest.stat().st_mtime < 0.5:
            killed.append(int(newest.name.split("-")[0]))
            os.kill(killed[0], signal.SIGKILL)


def test_killed_worker(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = small(tmp_path / "ray", networks=12, shard_size=2, dtype="float64", engine="ray")
    marks = tmp_path / "marks"
    marks.mkdir()
    # The workers receive a pickled builder; this one is slow.
    slow = partial(build_slowly, marks)
    monkeypatch.setattr("nfn_graph.tasks.zoo.builder._build_part", slow)
    killed: list[int] = []
    watch = threading.Thread(target=kill_one, args=(tmp_path / "ray", marks, killed))
    watch.start()
    build_zoo(options, source=IMAGES)
    watch.join()
    begun: dict[str, set[int]] = {}
    for process, shard, _ in (mark.name.split("-") for mark in marks.iterdir()):
        begun.setdefault(shard, set()).add(int(process))
    # All six shards are there; another worker built the one of the killed worker.
    twice = [processes for processes in begun.values() if len(processes) > 1]
    assert len(begun) == 6 and len(killed) == len(twice) == 1 and killed[0] in twice[0]
    here = replace(options, out=tmp_path / "here", engine="local")
    build_zoo(here, source=IMAGES)
    zoos = [open_zoo_folder(tmp_path / name) for name in ("ray", "here")]
    assert len(zoos[0]) == 12 and same_networks(*zoos)
    names = [
        sorted(p.relative_to(zoo.folder).as_posix() for p in zoo.folder.rglob("*") if p.is_file())
        for zoo in zoos
    ]
    assert names[0] == names[1]
    assert sum(name.startswith("shards/") for name in names[0]) == 6
    # Everything is finished: nothing starts again, and the other engine accepts the result.
    build_zoo(options, source=IMAGES)
    build_zoo(replace(options, engine="local"), source=IMAGES)
    assert len(list(marks.iterdir())) == 7


def fail(job: int) -> int:
    if job == 2:
        raise ValueError("Expected another number (got 2)")
    return job * job


def die(job: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_and_errors(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("processes", "ray"):
        assert sorted(run_jobs(fail, [1, 3, 4], engine)) == [(1, 1), (3, 9), (4, 16)]  # type: ignore[arg-type]
    for engine in ("local", "processes", "ray"):
        with pytest.raises(ValueError, match=r"^Expected another number \(got 2\)$"):
            list(run_jobs(fail, [1, 2, 3], engine))  # type: ignore[arg-type]
    monkeypatch.setattr(engines, "_RETRIES", 1)
    with pytest.raises(ChildProcessError, match=r"after 1 retries, WorkerCrashedError"):
        list(run_jobs(die, [1], "ray"))
    with pytest.raises(ChildProcessError, match=r"one that was killed.* at 1\)"):
        list(run_jobs(die, [1], "processes"))


def test_processes_build_the_same_zoo(tmp_path: Path) -> None:
    zoos = []
    for engine in ("local", "processes"):
        options = small(tmp_path / engine, networks=6, shard_size=2, dtype="float64", engine=engine)
        zoos.append(open_zoo_folder(build_zoo(options, source=IMAGES)))
    assert len(zoos[1]) == 6 and same_networks(*zoos)


def test_local_engine_goes_on_in_turn() -> None:
    assert list(run_jobs(fail, [5, 1])) == [(5, 25), (1, 1)]
    with pytest.raises(ValueError, match=r"local, processes, ray .got 'spark'."):
        list(run_jobs(fail, [1], "spark"))  # type: ignore[arg-type]


def test_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    options = ["zoo", "cnn", "--out", str(tmp_path), "--networks", "1", "--engine", "ray"]
    assert main(options) == 2
    assert "pip install 'nfn-graph[ray]'" in capsys.readouterr().err


def test_convert(cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "files"
    files.mkdir()
    states = {}
    for i in range(10):
        states[f"{i}.pt"] = nn.Sequential(
            nn.Linear(2, 3 + i % 2), nn.Linear(3 + i % 2, 1)
        ).state_dict()
        torch.save(states[f"{i}.pt"], files / f"{i}.pt")
    command = ["convert", str(files), "--out", str(tmp_path / "store"), "--engine", "ray"]
    command += ["--shard-size", "4"]
    assert main(command) == 0
    assert "10 converted, 0 skipped, 0 failed" in capsys.readouterr().out
    found = WeightDataset(tmp_path / "store")
    names = found.table.column("file").to_pylist()
    assert sorted(names) == sorted(states) and len(found.store.shards) == 3
    for name, graph in zip(names, found, strict=True):
        state = to_state_dict(graph)
        assert list(state) == list(states[name])
        assert all(torch.equal(x, states[name][key]) for key, x in state.items())
    assert main(command) == 0
    assert "0 converted, 10 skipped, 0 failed" in capsys.readouterr().out
    assert main([*command, "--shard", "1/2"]) == 2
    assert "neither --shard nor --workers with --engine ray" in capsys.readouterr().err


@pytest.fixture
def token_cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Starts a cluster with `ray start` and a token, and returns the settings to join it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-of-these-tests-and-of-nobody-else",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise, workers would run at a lower priority than all other processes.
        "RAY_worker_niceness": "0",
    }
    # Sockets are in this folder, whose path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
        command += [f"--temp-dir={folder}", f"--object-store-memory={100 * 2**20}"]
        head = subprocess.Popen(
            command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert head.stdout is not None
            assert any("Ray runtime started" in line for line in head.stdout)
            yield {**settings, "RAY_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            # This ends all processes that the command started.
            head.terminate()
            head.communicate(timeout=60)


def test_a_cluster_with_a_token_is_joined(token_cluster: dict[str, str], tmp_path: Path) -> None:
    for i in range(4):
        torch.save(nn.Linear(2, 3 + i).state_dict(), tmp_path / f"{i}.pt")
    command = [sys.executable, "-m", "nfn_graph", "convert", str(tmp_path), "--engine", "ray"]
    command += ["--shard-size", "2", "--out", str(tmp_path / "out")]
    found = subprocess.run(command, env=token_cluster, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert len(WeightDataset(tmp_path / "out")) == 4

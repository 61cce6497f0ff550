"""Shards on a Ray cluster, of which a worker is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
from test_zoo_build import IMAGES, same_networks, small

from nfn_graph.cli import main
from nfn_graph.converters import engines
from nfn_graph.converters.engines import part_of, run_jobs
from nfn_graph.tasks.zoo import build_cnn_zoo, open_zoo_folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers on this machine, which speak to nobody else."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers would give way to all other processes of the machine.
    os.environ["RAY_worker_niceness"] = "0"
    # Workers find the modules of the tests where this process does.
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": path},
    )
    yield
    ray.shutdown()


def busy_workers() -> list[int]:
    """The processes of this test's own cluster that run a job at the moment."""

    def parent(process: int) -> int:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_busy = (folder / "cmdline").read_bytes().startswith(b"ray::_call")
            # The worker's parent is the manager of the machine, whose parent started the cluster.
            if is_busy and parent(parent(int(folder.name))) == os.getpid():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue  # It has ended.
    return found


def build_slowly(marks: Path, options: object, **data: object) -> Path:
    """What a worker does for a shard, slow enough to be killed in the middle of it."""
    (marks / f"{os.getpid()}-{options.shard.replace('/', '-')}").touch()  # type: ignore[attr-defined]
    time.sleep(1)
    return build_cnn_zoo(options, **data)  # type: ignore[arg-type]


def kill_one(folder: Path, killed: list[int]) -> None:
    """Kills a busy worker as soon as the first shard is published."""
    limit = time.monotonic() + 100
    while not killed and time.monotonic() < limit:
        if list(folder.glob("metadata/0*.parquet")) and (busy := busy_workers()):
            os.kill(busy[0], signal.SIGKILL)
            killed.append(busy[0])
        time.sleep(0.02)


def test_killed_worker(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = small(tmp_path / "ray", networks=12, shard_size=2, dtype="float64", engine="ray")
    marks = tmp_path / "marks"
    marks.mkdir()
    # The builder sends itself to the workers; here, a slow one.
    monkeypatch.setattr("nfn_graph.tasks.zoo.cnn.partial", lambda build, **data: slow(data))

    def slow(data: dict[str, object]) -> partial[Path]:
        return partial(build_slowly, marks, **data)

    killed: list[int] = []
    watch = threading.Thread(target=kill_one, args=(tmp_path / "ray", killed))
    watch.start()
    build_cnn_zoo(options, images=IMAGES)
    watch.join()
    begun = [path.name.split("-") for path in marks.iterdir()]
    assert len(killed) == 1 and str(killed[0]) in {process for process, *_ in begun}
    assert len({process for process, *_ in begun}) >= 3
    # One shard was begun twice.
    assert len(begun) == 7 and len({shard for _, shard, _ in begun}) == 6
    here = replace(options, out=tmp_path / "here", engine="local")
    build_cnn_zoo(here, images=IMAGES)
    zoos = [open_zoo_folder(tmp_path / name) for name in ("ray", "here")]
    assert len(zoos[0]) == 12 and same_networks(*zoos)
    names = [
        sorted(p.relative_to(zoo.folder).as_posix() for p in zoo.folder.rglob("*") if p.is_file())
        for zoo in zoos
    ]
    assert names[0] == names[1] and len(names[0]) == 13
    # Finished: nothing is begun again, and the other engine takes it for its own.
    build_cnn_zoo(options, images=IMAGES)
    build_cnn_zoo(replace(options, engine="local"), images=IMAGES)
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
        zoos.append(open_zoo_folder(build_cnn_zoo(options, images=IMAGES)))
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


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/2/3", ""])
def test_bad_shards(shard: str) -> None:
    with pytest.raises(ValueError, match="I/N with 1 <= I <= N"):
        part_of(shard)
    assert part_of("2/3") == (1, 3)

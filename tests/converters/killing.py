"""Kills a conversion at random moments, lets it finish, and checks the result.

python tests/converters/killing.py --files 5000 --kills 20
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkpoints
import torch

from nfn_graph.converters import to_state_dict
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import list_shards
from nfn_graph.converters.store.verification import find_damage


def write_files(folder: Path, count: int) -> list[Path]:
    """Networks of a few widths, written with torch."""
    folder.mkdir()
    paths = [folder / f"{i:05d}.pt" for i in range(count)]
    for i, path in enumerate(paths):
        torch.save(checkpoints.mlp((3, 4 + i % 3, 2)).state_dict(), path)
    return paths


def start(folder: Path, out: Path, shard_size: int, *options: str) -> subprocess.Popen[bytes]:
    """A conversion with two processes, in a group of its own."""
    command = ["convert", str(folder), "--out", str(out), "--shard-size", str(shard_size)]
    return subprocess.Popen(
        [sys.executable, "-m", "nfn_graph.cli", *command, *options, "--workers", "2"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_at_random(process: subprocess.Popen[bytes], out: Path, moments: random.Random) -> bool:
    """Kills it (and at times its workers) soon after it began to write; returns if it ran still."""
    before = {p.name for p in out.glob("weights/*")}
    wanted = moments.randint(0, 2)
    while process.poll() is None and len({p.name for p in out.glob("weights/*")} - before) < wanted:
        time.sleep(0.001)
    time.sleep(moments.uniform(0, 0.2) if wanted else moments.uniform(0, 6))
    is_running = process.poll() is None
    if moments.random() < 0.5:
        process.kill()
    elif is_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return is_running


def check(paths: list[Path], out: Path) -> None:
    """Checks all files, each once, in order and bit for bit, and all checksums; no rest is left."""
    store = Store(out)
    assert store.table.column("file").to_pylist() == [path.name for path in paths]
    assert sum(shard.networks for shard in store.shards) == len(paths), "some are stored twice"
    assert list(find_damage(out)) == []
    for i, path in enumerate(paths):
        found, expected = to_state_dict(store.graph(i)), torch.load(path, weights_only=True)
        assert list(found) == list(expected), path
        assert all(torch.equal(found[key], expected[key]) for key in expected), path
    published = set(list_shards(out))
    for part in ("weights", "metadata", "shards"):
        assert {p.stem for p in (out / part).iterdir()} == published, part


def kill_and_resume(folder: Path, files: int, kills: int, shard_size: int, seed: int) -> list[int]:
    """Counts the networks that were published after each kill."""
    paths, out = write_files(folder / "in", files), folder / "store"
    moments, published = random.Random(seed), []
    while len(published) < kills:
        process = start(folder / "in", out, shard_size)
        try:
            if not kill_at_random(process, out, moments):
                break  # The process ended by itself.
        finally:
            process.kill()
        published.append(sum(s.networks for s in Store(out).shards) if list_shards(out) else 0)
    assert start(folder / "in", out, shard_size).wait() == 0
    check(paths, out)
    return published


def main() -> None:
    """Prints how many networks each kill left behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--shard-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        left = kill_and_resume(Path(folder), **vars(arguments))
    print(f"killed {len(left)} times, with so many networks published: {left}")
    print(f"after the last run: all {arguments.files}, none twice, all checksums right")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

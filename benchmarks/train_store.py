"""Training on a store: memory, time to the first step, and speed against networks in memory.

Random INRs 2-32-32-1 with a class each; `nfn-graph train classify-inr` (preset small unless said)
in a process of its own, which writes down the time of every step and the memory of itself and its
workers. Mapped files are not counted: the system may drop them at any time.

    python benchmarks/train_store.py --networks 100000           # one epoch from the store
    python benchmarks/train_store.py --networks 5000 --compare   # against networks in memory
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.cases import random_tensors
from harness.report import show

from nfn_graph import WeightGraph
from nfn_graph.converters.store.writer import StoreWriter

SHARD = 2000
CLASSES = 10


def build(folder: Path, count: int) -> None:
    """A store of random INRs; eight of ten train, one validates, one tests."""
    writer = StoreWriter(folder, {})
    for first in range(0, count, SHARD):
        networks = []
        for i in range(first, min(first + SHARD, count)):
            split = "validation" if i % 10 == 8 else "test" if i % 10 == 9 else "train"
            row = {"network": i, "split": split, "label": i % CLASSES, "w0": 30.0}
            networks.append((row, WeightGraph.from_tensors(*random_tensors((2, 32, 32, 1)))))
        writer.publish(f"{first:07d}", networks)


def memory(pid: int) -> float:
    """Megabytes of a process that are not mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = ("RssAnon", "RssShmem")
    return sum(int(line.split()[1]) for line in lines if line.startswith(fields)) / 1024


def measured(arguments: list[str], most_steps: int) -> None:
    """Runs the command line; writes times and memory to the last line of the output."""
    import lightning.pytorch as pl

    from nfn_graph.cli import main
    from nfn_graph.tasks.training import run

    times: list[float] = []
    used: list[float] = []

    class Watch(pl.Callback):
        """Notes the end of every step."""

        def on_train_batch_end(self, trainer: pl.Trainer, *given: Any) -> None:
            times.append(time.time())
            if len(times) % 50 == 1:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                used.append(sum(memory(pid) for pid in (os.getpid(), *map(int, children))))
            if most_steps and len(times) >= most_steps:
                print(json.dumps({"times": times, "memory": used}), flush=True)
                os._exit(0)

    trainer_of = run._trainer

    def watched(*given: Any) -> pl.Trainer:
        trainer = trainer_of(*given)
        trainer.callbacks.append(Watch())
        return trainer

    run._trainer = watched
    code = main(arguments)
    print(json.dumps({"times": times, "memory": used, "code": code}))


def run_once(store: Path, steps: int, *options: str) -> dict[str, Any]:
    """One training in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        command = ["train", "classify-inr", "--zoo", str(store), "--out", f"{out}/run"]
        command += ["--epochs", "1", *options]
        started = time.time()
        done = subprocess.run(
            [sys.executable, __file__, "--steps", str(steps), "--child", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    times = found["times"]
    skipped = min(20, len(times) // 2)
    return {
        "first step, s": round(times[0] - started, 1),
        "steps": len(times),
        "steps/s": round((len(times) - 1 - skipped) / (times[-1] - times[skipped]), 2),
        "peak, MB": round(max(found["memory"])),
        "first, MB": round(found["memory"][0]),
        "last, MB": round(found["memory"][-1]),
    }


def main() -> None:
    """Prints the table."""
    if "--child" in sys.argv:
        at = sys.argv.index("--child")
        measured(sys.argv[at + 1 :], int(sys.argv[at - 1]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=100_000)
    parser.add_argument("--store", type=Path, help="a store made before, or where to make it")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many; 0 for an epoch")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--compare", action="store_true", help="in memory and not, in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store = args.store or Path(folder) / "store"
        if not store.exists():
            build(store, args.networks)
        load, rows = os.getloadavg()[0], []
        for workers in args.workers:
            kinds = ("no", "yes") if args.compare else ("no",)
            found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
            for _ in range(args.rounds if args.compare else 1):
                for kind, runs in found.items():
                    options = ["--in-memory", kind, "--workers", str(workers)]
                    runs.append(run_once(store, args.steps, *options, "--preset", args.preset))
            speed = {kind: median(run["steps/s"] for run in runs) for kind, runs in found.items()}
            for kind, runs in found.items():
                ratio = {"store / memory": round(speed["no"] / speed.get("yes", speed["no"]), 3)}
                row = {"workers": workers, "in memory": kind, **runs[-1], "steps/s": speed[kind]}
                rows.append({**row, **(ratio if args.compare else {})})
    show(rows, f"Training on {args.networks} INRs, load {load:.1f}", None)


if __name__ == "__main__":
    main()

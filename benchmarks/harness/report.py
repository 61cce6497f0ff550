"""Arguments and output of the benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import nfn_graph
from harness.timing import THREADS

Row = Mapping[str, Any]
#: Whether this process keeps the memory that it frees.
_KEPT: list[bool] = []
#: The load of the machine when the benchmark started, because other work slows it down.
LOAD = os.getloadavg()


def arguments(description: str | None, *more: str) -> argparse.Namespace:
    """Parses the options that every benchmark has, and sets the number of threads.

    Args:
        description: Description of the benchmark.
        more: Names of other options that this benchmark has: `"device"`, `"compile"`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats, below 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="keep freed memory, as the allocator of a GPU does and `nfn-graph train` too",
    )
    if "device" in more:
        parser.add_argument("--device", default="cpu", type=torch.device)
    if "compile" in more:
        parser.add_argument("--compile", action="store_true", help="also compile the layers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.keep_memory:
        keep_memory()
    torch.manual_seed(0)
    return args


def keep_memory() -> None:
    """Keeps the memory that this process frees, and says so above its tables."""
    _KEPT.append(nfn_graph.keep_memory())


def show(
    rows: Sequence[Row], title: str, file: Path | None, notes: Mapping[str, float] | None = None
) -> None:
    """Prints rows as a Markdown table, and writes them to a file if one is given.

    Args:
        rows: Rows of the table.
        title: Title of the table.
        file: File for the rows as JSON.
        notes: Numbers that concern the whole table.
    """
    found = {
        "title": title,
        "machine": machine(),
        "load": {"at the start": LOAD, "at the end": os.getloadavg()},
        "notes": dict(notes or {}),
        "rows": list(rows),
    }
    print("\n" + "\n".join(markdown(found)), flush=True)
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n")


def markdown(found: Mapping[str, Any]) -> Iterable[str]:
    """Returns the lines of what :func:`show` writes as JSON."""
    yield from (f"### {found['title']}", "", str(found["machine"]))
    for when, load in found["load"].items():
        yield f"Load {when}: " + " ".join(f"{x:.1f}" for x in load) + " (1, 5, 15 minutes)"
    for name, value in found["notes"].items():
        yield f"{name}: {_cell(value)}"
    columns = list(dict.fromkeys(key for row in found["rows"] for key in row))
    yield from ("", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns))
    for row in found["rows"]:
        yield "| " + " | ".join(_cell(row.get(column)) for column in columns) + " |"


def machine() -> str:
    """Describes cores, memory and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GB, "
        f"{torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"nfn_graph {nfn_graph.__version__}, "
        f"freed memory {'kept' if any(_KEPT) else 'returned to the system'}"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return "" if value is None else str(value)

"""Runs every benchmark; writes the numbers as JSON, the tables as Markdown, and the figures.

python benchmarks/all.py           # less than ten minutes on two quiet cores
python benchmarks/all.py --quick --results DIR --figures DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.report import machine, markdown
from plot import draw

HERE = Path(__file__).parent
SCRIPTS = ("nf_layer", "mixed_batch", "memory", "scaling", "train_step", "convert", "loader", "run")
#: Measured once with freed memory returned to the system, and once with freed memory kept.
BOTH_WAYS = ("nf_layer", "train_step")


def main() -> None:
    """Runs all benchmarks, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR")
    parser.add_argument("--figures", type=Path, default=HERE / "figures", metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for name in args.only:
        print(f"== {name}.py (load {os.getloadavg()[0]:.1f})", flush=True)
        before = time.perf_counter()
        for kept in (False, True) if name in BOTH_WAYS else (False,):
            file = args.results / f"{name}{'_kept' * kept}.json"
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
            options = ["--quick"] * args.quick + ["--keep-memory"] * kept
            subprocess.run(command + options, check=True)
        print(f"-- {time.perf_counter() - before:.0f} s", flush=True)
    tables = args.results / "tables.md"
    tables.write_text("\n".join(all_tables(args.results)) + "\n")
    print(f"All together {(time.perf_counter() - start) / 60:.1f} minutes; tables in {tables}")
    if find_spec("matplotlib") is None:
        print("Figures need matplotlib: pip install 'nfn-graph[converters]'")
        return
    for file in draw(args.results, args.figures):
        print(f"figure in {file}")


def all_tables(folder: Path) -> list[str]:
    """Returns the tables of all results in a folder."""
    lines: list[str] = []
    for name in [f"{name}{end}" for name in SCRIPTS for end in ("", "_kept")]:
        file = folder / f"{name}.json"
        if file.exists():
            lines += [*markdown(as_rows(name, json.loads(file.read_text()))), ""]
    return lines


def as_rows(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Converts to the common form; the benchmark of the converters has another one."""
    if "rows" in found:
        return found
    rows = []
    for case, values in found.items():
        plain = {key: x for key, x in values.items() if not isinstance(x, dict)}
        parts = {key: x for key, x in values.items() if isinstance(x, dict)} or {"": {}}
        rows += [{"case": f"{case} {part}".strip(), **x, **plain} for part, x in parts.items()]
    return {"title": name, "machine": machine(), "load": {}, "notes": {}, "rows": rows}


if __name__ == "__main__":
    main()

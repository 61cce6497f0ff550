"""Peak memory of a training step of the classifier, each in a process of its own.

On the CPU it is the largest resident size during a step, without the model, the data and the
optimiser's state, which are the same for both; on CUDA what torch allocated.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from pathlib import Path

import torch
from harness.cases import CASES
from harness.classifier import nfn_step, our_step
from harness.report import arguments, show

WORKER = "--worker"


def main() -> None:
    """Measures all cases."""
    if WORKER in sys.argv:
        name, kind, device = sys.argv[sys.argv.index(WORKER) + 1 :]
        print(peak(name, kind, torch.device(device)))
        return
    args = arguments(__doc__)
    rows = []
    for name in ("inr64",) if args.quick else ("inr512", "mlp784"):
        kinds = ("ours", "recomputing", "nfn")
        megabytes = {kind: measured(name, kind, args) for kind in kinds}
        rows.append(
            {
                "case": name,
                "ours MB": megabytes["ours"],
                "nfn MB": megabytes["nfn"],
                "ours / nfn": megabytes["ours"] / megabytes["nfn"],
                "recomputing / nfn": megabytes["recomputing"] / megabytes["nfn"],
            }
        )
        print(".", end="", flush=True)
    show(rows, "Peak memory of a training step", args.json)


def measured(name: str, kind: str, args: argparse.Namespace) -> float:
    """Runs the measurement in a fresh process."""
    command = [sys.executable, __file__, WORKER, name, kind, str(args.device)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(name: str, kind: str, device: torch.device) -> float:
    """Megabytes that a step needs beyond the model."""
    torch.set_num_threads(2)
    case = CASES[name]
    options = {"recompute": True} if kind == "recomputing" else {}
    make = nfn_step if kind == "nfn" else our_step
    step = make(case, 2 * case.batch, device, **options)
    if device.type == "cuda":
        step()
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return (torch.cuda.max_memory_allocated(device) - base) / 2**20
    gc.collect()
    before = resident("VmRSS")
    step()
    optimizer_state = step.state_bytes() / 2**20
    # From here on the kernel records the largest size anew.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    return resident("VmHWM") - before - optimizer_state


def resident(field: str) -> float:
    """Megabytes of this process in memory: now (`VmRSS`) or at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


if __name__ == "__main__":
    main()

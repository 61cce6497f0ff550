"""Peak memory of a training step of the classifier, each measured in a separate process.

This is the memory that a step needs in addition to what stays between two steps: the model, the
data, the optimiser's state, and the code and the buffers of libraries. On the CPU, it is the growth
of the resident size, with an allocator that returns every tensor to the system when it is freed; on
CUDA, it is the memory that torch allocated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
from harness.cases import CASES
from harness.classifier import nfn_step, our_step
from harness.memory import forget_peak, resident, return_freed
from harness.report import arguments, show

WORKER = "--worker"
# The system's allocator keeps freed tensors below a threshold that it raises over time. With this
# fixed one, the resident size follows the tensors that exist, and repeated runs agree.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}


def main() -> None:
    """Measures all cases."""
    if WORKER in sys.argv:
        name, kind, device, threads = sys.argv[sys.argv.index(WORKER) + 1 :]
        torch.set_num_threads(int(threads))
        print(peak(name, kind, torch.device(device)))
        return
    args = arguments(__doc__, "device")
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
    """Runs the measurement in a new process."""
    command = [sys.executable, __file__, WORKER, name, kind, str(args.device), str(args.threads)]
    environment = {**os.environ, **ALLOCATOR}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(result.stdout)


def peak(name: str, kind: str, device: torch.device) -> float:
    """Returns the megabytes that a step needs in addition to what stays between two steps."""
    case = CASES[name]
    options = {"recompute": True} if kind == "recomputing" else {}
    make = nfn_step if kind == "nfn" else our_step
    step = make(case, 2 * case.batch, device, **options)
    for _ in range(2):
        step()
    if device.type == "cuda":
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return (torch.cuda.max_memory_allocated(device) - base) / 2**20
    return_freed()
    base = resident("VmRSS")
    forget_peak()
    for _ in range(2):
        step()
    return resident("VmHWM") - base


if __name__ == "__main__":
    main()

"""Times several functions in turn, so that the machine is the same for all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

THREADS = 2


def alternate(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    device: torch.device,
    rounds: int = 5,
) -> dict[str, list[float]]:
    """Runs functions in turn and returns the milliseconds of every run.

    Args:
        functions: The functions to time.
        seconds: The time limit of all functions together.
        device: The device that they run on.
        rounds: The smallest number of rounds.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    # Garbage collection in the middle of a run would be charged to that run.
    gc.collect()
    gc.disable()
    try:
        while time.perf_counter() < end or len(next(iter(times.values()))) < rounds:
            for name, function in functions.items():
                times[name].append(_once(function, device))
    finally:
        gc.enable()
    return times


def ratio(times: Mapping[str, list[float]], first: str, second: str) -> float:
    """Returns the median over rounds of the ratio of the first time to the second."""
    return median(a / b for a, b in zip(times[first], times[second], strict=True))


def _once(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        finish.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(finish))
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3

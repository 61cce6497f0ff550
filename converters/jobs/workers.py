"""Jobs run by parallel processes, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")

_QUEUED_PER_WORKER = 4


def run_parallel(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    workers: int,
    preload: str,
) -> Iterator[tuple[Job, Result | None]]:
    """The result of every job as it is done; None for one that kills its process.

    Args:
        function: What to call, importable by its name.
        jobs: Its arguments, hashable.
        workers: How many processes.
        preload: The module that processes start with, imported once for all.
    """
    left = dict.fromkeys(jobs)
    in_order = False
    while left:
        try:
            for job, result in _run_pool(function, list(left), 1 if in_order else workers, preload):
                del left[job]
                yield job, result
        except BrokenProcessPool:
            if in_order:
                # One process takes them in order, so the first one left is to blame.
                job = next(iter(left))
                del left[job]
                yield job, None
            in_order = not in_order


def _run_pool(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, preload: str
) -> Iterator[tuple[Job, Result]]:
    with ProcessPoolExecutor(workers, _context(preload), initializer=_start_worker) as pool:
        running: dict[Future[Result], Job] = {}
        waiting = iter(jobs)
        while True:
            while len(running) < _QUEUED_PER_WORKER * workers:
                job = next(waiting, None)
                if job is None:
                    break
                running[pool.submit(function, job)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in [future for future in running if future in done]:
                yield running[future], future.result()
                del running[future]


def _context(preload: str) -> BaseContext:
    """How processes start: as copies of a server that has imported a module once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


def _start_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the one that gives it work is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)

"""Jobs in this process, in several processes of this machine, or on the user's Ray cluster.

A job is one shard of a conversion or of a zoo. It publishes its result in one step, or not at
all, and leaves alone what is there: it can be run again on another machine if one dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

from nfn_graph.converters.jobs.workers import run_parallel
from nfn_graph.converters.optional import require
from nfn_graph.messages import UserError

Engine = Literal["local", "processes", "ray"]
Job = TypeVar("Job")
Result = TypeVar("Result")
# How often a job is begun again whose worker died.
_RETRIES = 5


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    engine: Engine = "local",
    *,
    gpus: int = 0,
) -> Iterator[tuple[Job, Result]]:
    """Every job with its result, as it is done.

    Args:
        function: What to call; it never returns None. For Ray, it and the jobs are sent to the
            workers, on which this package is installed and which see the same files.
        jobs: Its arguments.
        engine: `local` runs them in turn in this process; `processes` in one process for each
            core; `ray` as tasks on the cluster that `RAY_ADDRESS` names or that runs on this
            machine, or else on this machine's cores.
        gpus: GPUs that a job needs, on Ray.
    """
    if engine == "local":
        yield from ((job, function(job)) for job in jobs)
        return
    if engine == "processes":
        yield from _run_in_processes(function, jobs)
        return
    if engine != "ray":
        raise UserError(f"Expected an engine: {', '.join(get_args(Engine))} (got '{engine}')")
    with _cluster() as ray:
        yield from _run_on(ray, function, jobs, gpus)


def _run_in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job]
) -> Iterator[tuple[Job, Result]]:
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    for job, result in run_parallel(function, jobs, workers, preload=__name__):
        if result is None:
            raise ChildProcessError(
                f"Expected a process to finish its job (got one that was killed, perhaps for want "
                f"of memory, at {job!r}). What is finished is kept: give the same command again to "
                f"go on."
            )
        yield job, result


def _run_on(
    ray: Any, function: Callable[[Job], Result], jobs: Sequence[Job], gpus: int
) -> Iterator[tuple[Job, Result]]:
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES)(_call)
    # Sent once, with the data that it may hold, not once for every job.
    shared = ray.put(function)
    running = {task.remote(shared, job): job for job in jobs}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            yield running[done], _result(ray, done)
            del running[done]
    finally:
        for left in running:
            ray.cancel(left, force=True)


def _call(function: Callable[[Job], Result], job: Job) -> Result:
    return function(job)


def _result(ray: Any, done: Any) -> Any:
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        # What the job itself raised, as it would be without Ray.
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ChildProcessError(
            f"Expected a worker of the Ray cluster to finish its job (got, after {_RETRIES} "
            f"retries, {type(error).__name__}). What is finished is kept: give the same command "
            f"again to go on."
        ) from error


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to a cluster; a connection that was there stays."""
    ray = require("ray", "to run on a Ray cluster", "ray")
    if ray.is_initialized():
        yield ray
        return
    # A cluster that is started here tells nobody.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error")
    try:
        yield ray
    finally:
        ray.shutdown()

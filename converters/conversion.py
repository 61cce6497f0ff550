"""Many files at once: found, loaded and written as graphs by parallel processes."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.graph import write_graph
from nfn_graph.converters.io import load

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".onnx", ".h5", ".hdf5")
_SOURCE = "nfn_graph.source"
# Below this many files, starting processes takes longer than the work.
_PARALLEL_FROM = 32


@dataclass(frozen=True)
class Options:
    """How files are read: see :func:`nfn_graph.converters.load`; `arch` by name."""

    arch: str | None = None
    flatten: Literal["channels_first", "channels_last"] | None = None


@dataclass
class Report:
    """What became of the files."""

    converted: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files among paths, and those with a known suffix in folders, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = (p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES)
            found.update(dict.fromkeys(p for p in inside if p.is_file()))
        else:
            found[path] = None
    if not found:
        names = ", ".join(map(str, paths)) or "no paths"
        raise FileNotFoundError(f"Expected checkpoint files (got {names}, with none inside)")
    return list(found)


def load_file(path: Path, options: Options) -> WeightGraph:
    """The graph of one file."""
    arch = None if options.arch is None else make_arch(options.arch)
    return load(path, arch=arch, flatten=options.flatten)


def make_arch(name: str) -> nn.Module:
    """The module that `package.module:name` is or returns, on the meta device."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"Expected arch as package.module:name (got '{name}')")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    made = getattr(importlib.import_module(module_name), attribute, None)
    if callable(made) and not isinstance(made, nn.Module):
        with torch.device("meta"):
            made = made()
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"Expected '{name}' to be a torch.nn.Module or to return one "
            f"(got {type(made).__name__})"
        )
    return made


def convert_files(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    *,
    workers: int = 0,
    overwrite: bool = False,
    on_done: Callable[[], None] = lambda: None,
) -> Report:
    """Writes the graph of every file into a folder, and `report.json` beside them.

    Args:
        paths: The files.
        out: The folder; below it, files lie as below their common parent.
        options: How to read them.
        workers: Processes; 0 for one per core.
        overwrite: Whether to convert again what was converted before.
        on_done: Called after every file.
    """
    if workers < 0:
        raise ValueError(f"Expected a number of processes of at least 0 (got {workers})")
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"Expected a folder to write to (got '{out}', which is a file)")
    out.mkdir(parents=True, exist_ok=True)
    report = Report()
    jobs = []
    for path, target in _targets(paths, out):
        if not overwrite and _is_done(path, target, options):
            report.skipped += 1
            on_done()
        else:
            jobs.append((path, target))
    count = workers or os.cpu_count() or 1
    run = _run_here if count == 1 or len(jobs) < _PARALLEL_FROM else _run_parallel
    for path, error in run(jobs, options, min(count, max(len(jobs), 1))):
        if error is None:
            report.converted += 1
        else:
            report.failed[str(path)] = error
        on_done()
    with replacing(out / "report.json") as temporary:
        temporary.write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")
    return report


Job = tuple[Path, Path]
Result = tuple[Path, str | None]


def _targets(paths: Sequence[Path], out: Path) -> list[Job]:
    absolute = list(dict.fromkeys(path.absolute() for path in paths))
    common = Path(os.path.commonpath([path.parent for path in absolute]))
    return [
        (path, out / path.relative_to(common).with_name(f"{path.name}.safetensors"))
        for path in absolute
    ]


def _source(path: Path, options: Options) -> str:
    """What a graph was made from; it is made again when this changes."""
    state = path.stat()
    return json.dumps([str(path), state.st_size, state.st_mtime_ns, *asdict(options).values()])


def _is_done(path: Path, target: Path, options: Options) -> bool:
    try:
        metadata = safetensors.read_header(target).get("__metadata__", {})
        return bool(metadata.get(_SOURCE) == _source(path, options))
    except (OSError, ConversionError):
        return False


def _is_ours(target: Path) -> bool:
    try:
        return _SOURCE in safetensors.read_header(target).get("__metadata__", {})
    except (OSError, ConversionError):
        return False


def _convert(path: Path, target: Path, options: Options) -> str | None:
    """Converts one file; returns why it failed."""
    try:
        graph = load_file(path, options)
        if target.exists() and not _is_ours(target):
            raise ConversionError(
                f"Expected '{target}' to be free for the graph of '{path}' (got a file that "
                f"convert did not write). Choose another --out."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        write_graph(target, graph, {_SOURCE: _source(path, options)})
    except (OSError, ValueError, TypeError, ImportError, MemoryError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _run_here(jobs: Sequence[Job], options: Options, workers: int) -> Iterator[Result]:
    for path, target in jobs:
        yield path, _convert(path, target, options)


def _run_parallel(jobs: Sequence[Job], options: Options, workers: int) -> Iterator[Result]:
    """Runs jobs in processes. If a file kills its process, the others are still converted."""
    left = dict(jobs)
    in_order = False
    while left:
        try:
            for path, error in _run_pool(list(left.items()), options, 1 if in_order else workers):
                del left[path]
                yield path, error
        except BrokenProcessPool:
            if in_order:
                # One process takes them in order, so the first one left is to blame.
                path = next(iter(left))
                del left[path]
                yield path, "Expected a file that can be read (got one that kills the process)"
            in_order = not in_order


def _run_pool(jobs: Sequence[Job], options: Options, workers: int) -> Iterator[Result]:
    with ProcessPoolExecutor(workers, _context(), initializer=_start_worker) as pool:
        running: dict[Future[str | None], Path] = {}
        waiting = iter(jobs)
        while True:
            while len(running) < 4 * workers and (job := next(waiting, None)) is not None:
                running[pool.submit(_convert, *job, options)] = job[0]
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda f: list(running).index(f)):
                yield running[future], future.result()
                del running[future]


def _context() -> BaseContext:
    """How processes start: as copies of a server that has imported this module once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker() -> None:
    torch.set_num_threads(1)

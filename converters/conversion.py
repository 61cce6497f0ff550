"""Many files at once: found, loaded and written as graphs by parallel processes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.graph import write_graph
from nfn_graph.converters.io import load
from nfn_graph.converters.named_arch import make_arch, running_arch
from nfn_graph.converters.workers import run_parallel

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".onnx", ".h5", ".hdf5")
_SOURCE = "nfn_graph.source"
# Whether to show where a mistake of ours is, as for all commands.
_TRACEBACK = "NFN_GRAPH_TRACEBACK"
# Below this many files, starting processes takes longer than the work.
_PARALLEL_FROM = 32


@dataclass(frozen=True)
class Options:
    """How files are read: see :func:`nfn_graph.converters.load`; `arch` by name."""

    arch: str | None = None
    flatten: Literal["channels_first", "channels_last"] | None = None
    input_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = (1,) if self.input_shape is None else self.input_shape
        if min(shape, default=0) < 1 or math.prod(shape) >= 2**60:
            raise ValueError(f"Expected an input shape of positive sizes (got {list(shape)})")


@dataclass
class Report:
    """What became of the files."""

    converted: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def find_files(paths: Sequence[Path], out: Path | None = None) -> list[Path]:
    """The files among paths, and those with a known suffix in folders, each once.

    Args:
        paths: Files and folders.
        out: The folder that graphs are written to. What was written there is passed over in
            folders; so is all of it, if it lies inside one.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = (p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES)
            found.update(
                dict.fromkeys(p for p in inside if p.is_file() and not _is_output(p, path, out))
            )
        else:
            found[path] = None
    if not found:
        names = ", ".join(map(str, paths)) or "no paths"
        raise FileNotFoundError(f"Expected checkpoint files (got {names}, with none inside)")
    return list(found)


def _is_output(path: Path, folder: Path, out: Path | None) -> bool:
    if out is None or not path.resolve().is_relative_to(out.resolve()):
        return False
    is_inside = folder.resolve() in out.resolve().parents
    return is_inside or _is_ours(path)


def load_file(path: Path, options: Options) -> WeightGraph:
    """The graph of one file."""
    shape = options.input_shape
    example = None if shape is None else torch.empty(shape, device="meta")
    if options.arch is None:
        return load(path, flatten=options.flatten, example_input=example)
    arch = make_arch(options.arch)
    with running_arch(options.arch, OSError, ImportError, MemoryError):
        return load(path, arch=arch, flatten=options.flatten, example_input=example)


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
        overwrite: Whether to convert again what was converted before, and to replace graphs
            of other files; what `convert` did not write is never replaced.
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
    convert = partial(_convert, options=options, overwrite=overwrite)
    for path, error in _run(convert, jobs, workers or os.cpu_count() or 1):
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
        return _noted_source(target) == _source(path, options)
    except OSError:
        return False


def _is_ours(target: Path) -> bool:
    return _noted_source(target) is not None


def _noted_source(target: Path) -> str | None:
    """What a graph says that it was made from; None if `convert` did not write it."""
    try:
        noted = safetensors.read_header(target).get("__metadata__", {}).get(_SOURCE)
    except (OSError, ConversionError):
        return None
    return None if noted is None else str(noted)


def _made_from(target: Path) -> Path | None:
    """The file that a graph was made from; None if it does not say."""
    try:
        path, *_ = json.loads(_noted_source(target) or "[]")
        return Path(path)
    except (ValueError, TypeError):
        return None


def _check_free(path: Path, target: Path, overwrite: bool) -> None:
    """Refuses to replace a file that the graph of another file lies in, or no graph at all."""
    if not target.exists():
        return
    if not _is_ours(target):
        raise ConversionError(
            f"Expected '{target}' to be free for the graph of '{path}' (got a file that "
            f"convert did not write). Choose another --out."
        )
    if not overwrite and not _is_graph_of(path, target):
        raise ConversionError(
            f"Expected '{target}' to be free for the graph of '{path}' (got the graph of "
            f"'{_made_from(target)}'). Choose another --out, convert both at once, or replace it "
            f"with --overwrite."
        )


def _is_graph_of(path: Path, target: Path) -> bool:
    made_from = _made_from(target)
    return made_from is not None and os.path.realpath(made_from) == os.path.realpath(path)


def _convert(job: Job, options: Options, overwrite: bool) -> str:
    """Converts one file; returns why it failed, nothing if it did not."""
    path, target = job
    try:
        graph = load_file(path, options)
        _check_free(path, target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_graph(target, graph, {_SOURCE: _source(path, options)})
    except Exception as error:
        reason = reason_of(error)
        if _is_graph_of(path, target):
            reason += f" The graph of an earlier content is still in '{target}'."
        return reason
    return ""


def _run(convert: Callable[[Job], str], jobs: Sequence[Job], workers: int) -> Iterator[Result]:
    if workers == 1 or len(jobs) < _PARALLEL_FROM:
        for job in jobs:
            yield job[0], convert(job) or None
        return
    for job, error in run_parallel(convert, jobs, min(workers, len(jobs)), __name__):
        if error is None:
            error = "Expected a file that can be read (got one that kills the process)"
        yield job[0], error or None


def reason_of(error: Exception) -> str:
    """Why a file failed, in one line; a mistake of ours is called that."""
    if isinstance(error, (OSError, ValueError, TypeError, ImportError, MemoryError)):
        return one_line(error)
    if os.environ.get(_TRACEBACK):
        raise error
    return one_line(
        f"Expected no mistake in nfn-graph (got {type(error).__name__}: {error}). Set "
        f"{_TRACEBACK}=1 to see where"
    )


def one_line(error: BaseException | str) -> str:
    """What an error says, without line breaks and other signs that a terminal would obey."""
    line = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)

"""Many files at once: their networks are added to a store, those that are not there yet."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nfn_graph.converters import engines
from nfn_graph.converters.conversion_jobs import Conversion, Source, run_jobs
from nfn_graph.converters.engines import Engine
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.parts import Part
from nfn_graph.converters.reading import Options
from nfn_graph.converters.store.description import is_store, read_description
from nfn_graph.converters.store.lock import none_publishing, only_writer
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import METADATA, SHARDS, WEIGHTS, list_shards, remove_shard
from nfn_graph.converters.store.writer import StoreWriter

# The column that names a network: if it is converted again, the newer one counts.
KEY = "file"
_DESCRIPTION = {"key": KEY}
# A file of a shard, or what a killed process left of one: its name, and the part.
_FILE = re.compile(r"(\.?)(\d{6}(-\d+of\d+)?(_\d+)?)(\.\w+)+")


@dataclass
class Report:
    """What became of the files."""

    converted: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def convert_files(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    *,
    workers: int = 0,
    overwrite: bool = False,
    shard: str = "1/1",
    shard_size: int = 1024,
    on_done: Callable[[], None] = lambda: None,
) -> Report:
    """Adds the networks of files to a store, and writes `report.json` beside them.

    Args:
        paths: The files.
        out: The store's folder, made if need be; networks are named as their files lie below
            their common parent.
        options: How to read them.
        workers: Processes; 0 for one per core.
        overwrite: Whether to convert again what was converted before, and to replace networks
            of other files that have the same name.
        shard: The part of the files to convert, such as 2/4 for the second of four machines.
        shard_size: Networks per shard at most.
        on_done: Called after every file.
    """
    if workers < 0 or shard_size < 1:
        raise ValueError(
            f"Expected at least 0 processes and 1 network per shard (got {workers} and "
            f"{shard_size})"
        )
    part = Part.parse(shard)
    if is_store(out) and read_description(out).get("key") != KEY:
        raise ValueError(
            f"Expected a store that convert made (got the zoo '{out}'). Choose another --out."
        )
    StoreWriter(out, _DESCRIPTION)
    report = Report()
    with only_writer(out / f"convert{part.suffix}.lock", f"this part of '{out}'") as is_alone:
        if is_alone:
            _clean(out, part)
        known = _known(out)
        work = []
        for source in _sources(paths, options)[part.number :: part.total]:
            refusal = None if overwrite else _refusal(source, known.get(source.file))
            if not overwrite and known.get(source.file) == source:
                report.skipped += 1
            elif refusal is not None:
                report.failed[source.path] = refusal
            else:
                work.append(source)
                continue
            on_done()
        numbers = [int(name[:6]) for name in list_shards(out)]
        jobs = run_jobs(
            Conversion(out, options, shard_size),
            work,
            workers or os.cpu_count() or 1,
            first=max(numbers, default=-1) + 1,
            suffix=part.suffix,
        )
        with closing(jobs) as results:
            for source, error in results:
                if error is None:
                    report.converted += 1
                else:
                    report.failed[source.path] = error + _earlier(source, known.get(source.file))
                on_done()
        if is_alone:
            _clean(out, part)
        if any(source.file in known for source in work):
            _remove_superseded(out)
    _write_report(out / f"report{part.suffix}.json", report)
    return report


def convert_in_parts(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    engine: Engine,
    *,
    overwrite: bool = False,
    shard_size: int = 1024,
    on_done: Callable[[int], None] = lambda count: None,
) -> Report:
    """As :func:`convert_files`, each shard a job of an engine; see :mod:`engines`.

    A job that is begun again, since its worker died, skips what was converted.

    Args:
        paths: The files.
        out: The store's folder.
        options: How to read them.
        engine: Where to run the jobs.
        overwrite: As of :func:`convert_files`.
        shard_size: Networks per shard at most.
        on_done: Called after every job with the number of its files.
    """
    total = max(1, math.ceil(len(paths) / max(1, shard_size)))
    job = _OnePart([p.absolute() for p in paths], out.absolute(), options, overwrite, shard_size)
    report = Report()
    for _, part in engines.run_jobs(job, [f"{i + 1}/{total}" for i in range(total)], engine):
        report.converted += part.converted
        report.skipped += part.skipped
        report.failed |= part.failed
        on_done(part.converted + part.skipped + len(part.failed))
    _write_report(out / "report.json", report)
    return report


@dataclass(frozen=True)
class _OnePart:
    """Converts one part of the files, wherever it is called."""

    paths: Sequence[Path]
    out: Path
    options: Options
    overwrite: bool
    shard_size: int

    def __call__(self, shard: str) -> Report:
        return convert_files(
            self.paths,
            self.out,
            self.options,
            workers=1,
            overwrite=self.overwrite,
            shard=shard,
            shard_size=self.shard_size,
        )


def _write_report(path: Path, report: Report) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")


def _sources(paths: Sequence[Path], options: Options) -> list[Source]:
    """The files in the order of their names, by which machines divide them."""
    absolute = list(dict.fromkeys(path.absolute() for path in paths))
    common = Path(os.path.commonpath([path.parent for path in absolute]))
    how = json.dumps(list(asdict(options).values()))
    found = []
    for path in absolute:
        name = path.relative_to(common).as_posix()
        try:
            state = path.stat()
            found.append(Source(name, str(path), state.st_size, state.st_mtime_ns, how))
        except (OSError, ValueError):  # what is wrong with it is said when it is read
            found.append(Source(name, str(path), -1, 0, how))
    return sorted(found)


def _known(out: Path) -> Mapping[str, Source]:
    """What the networks of a store were made from."""
    if not list_shards(out):
        return {}
    table = Store(out).table.select(list(Source._fields))
    columns = (column.to_pylist() for column in table.columns)
    return {source[0]: Source(*source) for source in zip(*columns, strict=True)}


def _is_same_file(source: Source, before: Source) -> bool:
    return os.path.realpath(source.path) == os.path.realpath(before.path)


def _refusal(source: Source, before: Source | None) -> str | None:
    """Why a file is not converted: its name is that of another file's network."""
    if before is None or _is_same_file(source, before):
        return None
    return (
        f"Expected the name '{source.file}' to be free for the network of '{source.path}' (got "
        f"the network of '{before.path}'). Choose another --out, convert both at once, or replace "
        f"it with --overwrite."
    )


def _earlier(source: Source, before: Source | None) -> str:
    """That a store still has the network of a file which cannot be read any more."""
    if before is None or not _is_same_file(source, before):
        return ""
    return f" The network of an earlier content is still in the store as '{source.file}'."


def _clean(out: Path, part: Part) -> None:
    """Deletes what killed processes left of this part, which nobody else writes now."""
    with none_publishing(out):
        published = set(list_shards(out))
        for path in (p for folder in (SHARDS, METADATA, WEIGHTS) for p in (out / folder).iterdir()):
            match = _FILE.fullmatch(path.name)
            is_ours = match is not None and (match[3] or "") == part.suffix
            if match and is_ours and (match[1] or match[2] not in published):
                path.unlink(missing_ok=True)


def _remove_superseded(out: Path) -> None:
    """Deletes the shards of which no network counts any more."""
    store = Store(out)
    counting = set(store.table.column("shard").unique().to_pylist())
    for shard in store.shards:
        if shard.name not in counting:
            remove_shard(out, shard.name)

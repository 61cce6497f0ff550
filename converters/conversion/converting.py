"""Adds the networks of many files to a store, unless they are already there."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nfn_graph import WeightGraph
from nfn_graph.converters.conversion.jobs import Engine, JobPart, run_jobs
from nfn_graph.converters.conversion.labels import Fractions, Labels, Matched, labels_of
from nfn_graph.converters.conversion.reading import Options
from nfn_graph.converters.conversion.sharding import (
    Conversion,
    Source,
    convert_sources,
    divide,
    earlier,
    find_sources,
    known_sources,
    label_columns,
    located_file,
    real_path,
    source_of,
)
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.store.description import (
    is_store,
    none_publishing,
    only_writer,
    read_description,
)
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import METADATA, SHARDS, WEIGHTS, list_shards, remove_shard
from nfn_graph.converters.store.table import COLUMN as SPLIT
from nfn_graph.converters.store.table import SPLITS, arrow
from nfn_graph.converters.store.writer import StoreWriter
from nfn_graph.messages import UserError

# The column that names a network. If a network is converted again, the newer one is used.
KEY = "file"
_DESCRIPTION = {"key": KEY}
# A file of a shard, also one that a killed process left behind: its name, and the part.
_FILE = re.compile(r"(\.?)(\d{6}(-\d+of\d+)?(_\d+)?)(\.\w+)+")


@dataclass
class Report:
    """The outcome of a conversion: counts, and the reason for every file that failed."""

    converted: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    rows_without_file: Sequence[str] = ()


def convert_files(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    *,
    given: Sequence[Path] = (),
    labels: Labels | None = None,
    workers: int = 0,
    overwrite: bool = False,
    shard: str = "1/1",
    shard_size: int = 1024,
    engine: Engine = "local",
    on_done: Callable[[int], None] = lambda count: None,
) -> Report:
    """Adds the networks of files to a store, and writes `report.json` beside them.

    Args:
        paths: The files.
        out: The folder of the store, which is created if necessary.
        options: The options for reading the files.
        given: The folders and files in which `paths` were found; by default `paths`. A network is
            named by the path of its file below their common parent. A file that is already in the
            store keeps its name there.
        labels: The labels of the networks. A file without labels is not converted.
        workers: The number of processes; 0 for one per core.
        overwrite: Whether to convert files again, and to replace networks of other files that have
            the same name.
        shard: The part of the files to convert, such as 2/4 for the second of four machines.
        shard_size: The largest number of networks per shard.
        engine: Where to convert: in this process, or each shard as a job elsewhere; see
            :func:`run_jobs`.
        on_done: A function that is called with the number of files finished since the last call.
    """
    sources = find_sources(paths, given or paths, options)
    matched = None if labels is None else labels.match([source[:2] for source in sources])
    if engine != "local":
        _prepare(out, 1, shard_size, matched)
        folders = [path.absolute() for path in given]
        how = {"given": folders, "overwrite": overwrite}
        return _add_parts(paths, out, options, engine, on_done, labels, shard_size, **how)
    return _add(sources, matched, out, options, workers, overwrite, shard, shard_size, on_done)


def build_store(
    networks: Iterable[tuple[str | Path | WeightGraph, Mapping[str, Any]]],
    out: str | Path,
    *,
    split: tuple[float, float, float] | None = None,
    seed: int = 0,
    overwrite: bool = False,
    workers: int = 0,
    shard_size: int = 1024,
    **options: Any,
) -> Report:
    """Adds networks with their labels to a store, as `nfn-graph convert --labels` does.

    Networks that are already in the store are skipped.

    Args:
        networks: Checkpoint files or graphs, each with its labels: numbers, booleans or text by
            name. The label `split` assigns a network to train, validation or test. The label `file`
            of a graph is its name in the store; by default graphs are numbered.
        out: The folder of the store, which is created if necessary.
        split: The shares of train, validation and test if there is no label `split`; by default
            0.8, 0.1 and 0.1.
        seed: The seed of the random split.
        overwrite: Whether to convert networks again if they are already in the store.
        workers: The number of processes that read files; 0 for one per core.
        shard_size: The largest number of networks per shard.
        options: The options of :func:`load`, with `arch` as text such as `package.module:name`.

    Returns:
        A report of the conversion, in which `failed` has the reason for every file that could not
        be converted.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.converters import WeightDataset, build_store
        >>> folder = Path(tempfile.mkdtemp())
        >>> graphs = [WeightGraph.from_tensors([torch.randn(1, n)]) for n in (2, 3, 2, 3)]
        >>> rows = [{"inputs": 2 + i % 2, "kind": "odd" if i % 2 else "even"} for i in range(4)]
        >>> build_store(zip(graphs, rows), folder / "store").converted
        4
        >>> WeightDataset(folder / "store", attributes={"y": "inputs"})[1].y
        tensor([3])
    """
    how = Options(**options)
    graphs: dict[str, WeightGraph] = {}
    files: list[Path] = []
    rows: list[dict[str, Any]] = []
    for number, (network, row) in enumerate(networks):
        if isinstance(network, WeightGraph):
            name = str(row.get(KEY, f"{number:06d}"))
            if name in graphs:
                raise UserError(f"Expected graphs with different names (got '{name}' twice)")
            graphs[name] = network
            rows.append({**row, KEY: name})
        else:
            files.append(Path(network))
            rows.append({**row, KEY: str(located_file(files[-1]))})
    sources = [source_of(name, graph) for name, graph in graphs.items()]
    sources += find_sources(files, files, how) if files else []
    labels = labels_of(rows, "the labels", Fractions(split, seed))
    matched = labels.match([source[:2] for source in sources])
    workers = 1 if graphs else workers
    return _add(
        sources, matched, Path(out), how, workers, overwrite, "1/1", shard_size, graphs=graphs
    )


def _add(
    sources: Sequence[Source],
    matched: Matched | None,
    out: Path,
    options: Options,
    workers: int,
    overwrite: bool,
    shard: str,
    shard_size: int,
    on_done: Callable[[int], None] = lambda count: None,
    graphs: Mapping[str, WeightGraph] | None = None,
) -> Report:
    part = JobPart.parse(shard)
    _prepare(out, workers, shard_size, matched)
    types: Mapping[str, Any] = {} if matched is None else matched.types
    report = Report(rows_without_file=() if matched is None else matched.unused)
    with only_writer(out / f"convert{part.suffix}.lock", f"this part of '{out}'") as is_alone:
        if is_alone:
            _clean(out, part)
        known = known_sources(out, list(types), repair=overwrite)
        if matched is not None:
            sources = _labelled(sources, matched, {} if overwrite else known)
        plan = divide(sources, known, part, overwrite)
        report.skipped = len(plan.skipped)
        report.failed = {source.path: reason for source, reason in plan.refused}
        on_done(len(plan.skipped) + len(plan.refused))
        numbers = [int(name[:6]) for name in list_shards(out)]
        jobs = convert_sources(
            Conversion(out, options, shard_size, types, graphs or {}),
            plan.work,
            workers or os.cpu_count() or 1,
            first=max(numbers, default=-1) + 1,
            suffix=part.suffix,
        )
        with closing(jobs) as results:
            for source, error in results:
                if error is None:
                    report.converted += 1
                else:
                    report.failed[source.path] = error + earlier(source, known.get(source.file))
                on_done(1)
        if is_alone:
            _clean(out, part)
        if any(source.file in known for source in plan.work):
            _remove_superseded(out)
    _write_report(report_file(out, part), report)
    return report


def _add_parts(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    engine: Engine,
    on_done: Callable[[int], None],
    labels: Labels | None,
    shard_size: int,
    **how: Any,
) -> Report:
    """Adds the networks with each shard as a job of an engine.

    A job that is restarted because its worker died skips what was already converted.
    """
    total = max(1, math.ceil(len(paths) / shard_size))
    files = [path.absolute() for path in paths]
    convert = partial(
        _one_part, files, out.absolute(), options, labels=labels, shard_size=shard_size, **how
    )
    report = Report()
    for _, part in run_jobs(convert, [f"{i + 1}/{total}" for i in range(total)], engine):
        report.converted += part.converted
        report.skipped += part.skipped
        report.failed |= part.failed
        report.rows_without_file = part.rows_without_file
        on_done(part.converted + part.skipped + len(part.failed))
    _write_report(report_file(out, JobPart(0, 1)), report)
    return report


def _one_part(paths: Sequence[Path], out: Path, options: Options, shard: str, **how: Any) -> Report:
    return convert_files(paths, out, options, workers=1, shard=shard, **how)


def _labelled(
    sources: Sequence[Source], matched: Matched, known: Mapping[str, Source]
) -> list[Source]:
    """Adds labels to the files; networks that are in the store keep their split."""
    at = list(matched.types).index(SPLIT)
    kept = {name: before.labels[at] for name, before in known.items() if before.labels}
    names = {real_path(before): name for name, before in known.items()}
    values = matched.divided(
        [names.get(real_path(source), source.file) for source in sources],
        {name: split for name, split in kept.items() if split in SPLITS},
    )
    return [s._replace(labels=own) for s, own in zip(sources, values, strict=True)]


def _prepare(out: Path, workers: int, shard_size: int, matched: Matched | None) -> None:
    """Creates the store, or raises before any work is done if it cannot be used."""
    if workers < 0 or shard_size < 1:
        raise UserError(
            f"Expected at least 0 processes and 1 network per shard (got {workers} and "
            f"{shard_size})"
        )
    if is_store(out) and read_description(out).get("key") != KEY:
        raise UserError(
            f"Expected a store made by convert (got the zoo '{out}'). Choose another --out."
        )
    if is_store(out) and list_shards(out):
        _check_columns(out, Store(out).table, matched)
    StoreWriter(out, _DESCRIPTION)


def _check_columns(out: Path, table: Any, matched: Matched | None) -> None:
    """Raises unless networks with these labels can be added to a store."""
    there = label_columns(table)
    if matched is None:
        if there:
            raise UserError(
                f"Expected labels for '{out}', whose networks have them: {', '.join(there)} (got "
                f"none). Pass a table of labels with --labels, or choose another --out."
            )
        return
    for name in (name for name in matched.types if name in there):
        before, now = table.schema.field(name).type, matched.types[name]
        schemas = [arrow().schema({name: type_}) for type_ in (before, now)]
        try:
            arrow().unify_schemas(schemas, promote_options="permissive")
        except arrow().ArrowException as error:
            raise UserError(
                f"Expected {before} in column '{name}' of {matched.labels.name}, as in '{out}' "
                f"(got {now}). Choose another --out."
            ) from error


def report_file(out: Path, part: JobPart) -> Path:
    """Returns the path of the report on a part of the files."""
    return out / f"report{part.suffix}.json"


def _write_report(path: Path, report: Report) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")


def _clean(out: Path, part: JobPart) -> None:
    """Deletes files that killed processes left of this part, which nobody else writes now."""
    with none_publishing(out):
        published = set(list_shards(out))
        for path in (p for folder in (SHARDS, METADATA, WEIGHTS) for p in (out / folder).iterdir()):
            match = _FILE.fullmatch(path.name)
            is_ours = match is not None and (match[3] or "") == part.suffix
            if match and is_ours and (match[1] or match[2] not in published):
                path.unlink(missing_ok=True)


def _remove_superseded(out: Path) -> None:
    """Deletes the shards whose networks were all replaced by newer ones."""
    store = Store(out)
    counting = set(store.table.column("shard").unique().to_pylist())
    for shard in store.shards:
        if shard.name not in counting:
            remove_shard(out, shard.name)

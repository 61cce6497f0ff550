"""Damaged and hostile files, thousands of them, for every reader of the package.

    python tests/fuzz.py --cases 20000 --seconds 600

Every case is read in a process of limited memory, within limited time. It must come out as a
success, or as an error of a known type that says in one line what was expected. The cases of a
seed are always the same: a failure is repeated with `--kind "images, npz" --first 17 --cases 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    _TESTS = Path(__file__).parent
    sys.path[:0] = [str(_TESTS / name) for name in ("", "converters", "tasks", "..")]
from corpus import Kind, corpus, suffix_of
from resealing import forge, reseal

#: The limits of one case: seconds, and bytes of memory in addition to the libraries.
SECONDS = 20
MEMORY = 2**30
_RESIDENT = 300 * 2**20
_HUGE = (2**31 - 1, 2**32 - 1, 2**63 - 1, 10**12, 10**30, -1, -(2**63))
_WILD = (*map(str, _HUGE), "1e999", "NaN", "null", '"x"', "[]", "{}")
_OUT_OF_MEMORY = re.compile(r"MemoryError|allocate|bad_alloc|[Oo]ut of memory|realloc|malloc")


class Outcome(NamedTuple):
    """How a case ended: `read`, `refused`, or what went wrong.

    Attributes:
        verdict: The outcome in one word.
        detail: The message of the error.
        resident: The largest resident size of the process, in bytes.
    """

    verdict: str
    detail: str
    resident: int


def damage(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Changes, cuts out or doubles bytes of a file, cuts its end off, or writes extreme numbers."""
    damaged = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 2, 8))):
        start = draw.randrange(len(damaged) or 1)
        length = draw.randrange(1, 1 + min(64, max(1, len(damaged) - start)))
        match draw.randrange(11):
            case 0:
                damaged[start : start + 1] = bytes(
                    [(damaged or b"\0")[start] ^ 1 << draw.randrange(8)]
                )
            case 1:
                damaged[start : start + length] = draw.randbytes(length)
            case 2:
                del damaged[start : start + length]
            case 3:
                damaged[start:start] = damaged[start : start + length]
            case 4:
                damaged[start : start + length] = bytes(length)
            case 5:
                damaged[start : start + length] = b"\xff" * length
            case 6:
                del damaged[start:]
            case 7:  # a size in binary
                width = draw.choice((2, 4, 8))
                size = draw.choice(_HUGE) % 2 ** (8 * width)
                order = draw.choice(("little", "big"))
                damaged[start : start + width] = size.to_bytes(width, order)  # type: ignore[arg-type]
            case 8:  # a number in text
                numbers = list(re.finditer(rb"-?\d+", damaged))
                if numbers:
                    found = draw.choice(numbers)
                    damaged[found.start() : found.end()] = draw.choice(_WILD).encode()
            case 9:  # another file's beginning
                damaged[:length] = draw.choice(others)[:length]
            case 10:  # nested without end
                damaged[start:start] = draw.choice((b"[", b"{", b"(", b'{"a":')) * 20000
    return bytes(damaged)


def damage_path(path: Path, draw: random.Random, others: list[bytes]) -> None:
    """Damages a file, or some files of a folder, or replaces one of them by something else."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in draw.sample(files, min(len(files), draw.choice((1, 1, 1, 3)))):
        choice = draw.randrange(24)
        if choice > 3:
            file.write_bytes(damage(file.read_bytes(), draw, others))
            continue
        file.unlink()
        if choice == 0:
            file.write_bytes(draw.choice(others))
        elif choice == 1:
            file.mkdir()
        elif choice == 2:
            file.symlink_to(draw.choice(("/dev/zero", "/etc/passwd", file.name, ".")))
        elif draw.random() < 0.5:
            os.mkfifo(file)


def damage_sealed(path: Path, draw: random.Random, others: list[bytes]) -> None:
    """Damages the contents of a store, or bytes of a file, and computes all checksums again."""
    if draw.randrange(3):
        forge(path, draw)
    else:
        file = draw.choice(sorted(p for p in path.rglob("*") if p.is_file()))
        file.write_bytes(damage(file.read_bytes(), draw, others))
    reseal(path)


def judge(kind: Kind, path: Path) -> tuple[str, str]:
    """Reads a path; returns the verdict and the error."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(nowhere):
                kind.read(path)
    except TimeoutError as error:
        return "hang", str(error)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
            return "memory", text
        if not isinstance(error, (ValueError, OSError)):
            return "type", text
        is_plain = type(error) is ValueError or not type(error).__module__.startswith("builtins")
        if (is_plain and "Expected" not in text) or "\n" in str(error):
            return "unclear", text
        return "refused", text
    finally:
        signal.alarm(0)
    return "read", ""


def run_cases(
    kinds: Mapping[str, Kind], name: str, cases: range, folder: Path
) -> Iterator[tuple[int, Outcome]]:
    """Returns the outcomes of some cases, read in processes that end with the first crash."""
    good = folder / f"good{suffix_of(name)}"
    _remove(good)
    kinds[name].build(good)
    others = [p.read_bytes() for p in sorted(folder.glob("other.*"))]
    at = cases.start
    while at < cases.stop:
        for number, outcome in _in_child(kinds[name], name, range(at, cases.stop), good, others):
            yield number, outcome
            at = number + 1


def _in_child(
    kind: Kind, name: str, cases: range, good: Path, others: list[bytes]
) -> Iterator[tuple[int, Outcome]]:
    """Runs in a process: announces every case, and then its outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with contextlib.suppress(BaseException):
            _work(kind, name, cases, good, others, writing)
        os._exit(0)
    os.close(writing)
    begun: int | None = None
    buffer = b""
    while True:
        is_ready, _, _ = select.select([reading], [], [], SECONDS + 20)
        received = os.read(reading, 2**16) if is_ready else b""
        if not received:
            break
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            begun = message["case"] if "verdict" not in message else None
            if begun is None:
                outcome = Outcome(message["verdict"], message["detail"], message["resident"])
                yield message["case"], outcome
    if begun is not None or not is_ready:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if begun is not None:
        how = "hang" if not is_ready else "crash"
        yield begun, Outcome(how, f"the process ended with {status}", 0)


def _work(
    kind: Kind, name: str, cases: range, good: Path, others: list[bytes], writing: int
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))

    def say(**message: Any) -> None:
        os.write(writing, json.dumps(message).encode() + b"\n")

    for number in cases:
        path = good.with_name(f"case{good.suffix}")
        _remove(path)
        shutil.copytree(good, path) if good.is_dir() else shutil.copy(good, path)
        draw = random.Random(f"{name} {number}")
        if kind.is_sealed:
            damage_sealed(path, draw, others)
        else:
            damage_path(path, draw, others)
        say(case=number)
        before = _resident()
        verdict, detail = judge(kind, path)
        after = _resident()
        if after - before > _RESIDENT and verdict in ("read", "refused"):
            verdict, detail = "memory", f"{(after - before) >> 20} MB for a small file; {detail}"
        say(case=number, verdict=verdict, detail=detail[:400], resident=after)


def _resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def prepared(world: Path | None = None) -> Iterator[tuple[Mapping[str, Kind], Path]]:
    """All kinds, and a folder to work in."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if world is None:
            from world import make_world

            world = folder / "world"
            world.mkdir()
            make_world(world)
        kinds = corpus(world)
        for number, name in enumerate(("pt", "npz", "h5", "onnx", "safetensors")):
            kinds[name].build(folder / f"other.{number}")
        yield kinds, folder


def main() -> int:
    """The long run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="in all, over all kinds")
    parser.add_argument("--seconds", type=float, default=600, help="when to stop at the latest")
    parser.add_argument("--kind", action="append", help="only this kind; may be given again")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    chosen = parser.parse_args()
    started = time.monotonic()
    with prepared() as (kinds, folder):
        names = chosen.kind or list(kinds)
        counts: Counter[str] = Counter()
        failures: list[str] = []
        peak, step, first = 0, 100, chosen.first
        last = chosen.first + -(-chosen.cases // len(names))
        while first < last and time.monotonic() - started < chosen.seconds:
            for name in names:
                cases = range(first, min(first + step, last))
                for number, outcome in run_cases(kinds, name, cases, folder):
                    counts[outcome.verdict] += 1
                    peak = max(peak, outcome.resident)
                    if outcome.verdict not in ("read", "refused"):
                        failures.append(f"{name}, {number}: {outcome.verdict}: {outcome.detail}")
                        print(failures[-1], flush=True)
                if time.monotonic() - started > chosen.seconds:
                    break
            first += step
    print(
        f"{sum(counts.values())} cases of {len(names)} kinds in "
        f"{time.monotonic() - started:.0f} s: {dict(counts)}; peak memory {peak >> 20} MB; "
        f"{len(failures)} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

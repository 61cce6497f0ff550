"""Valid files with random damage give a graph or a typed error, and quickly."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from file_writers import WRITERS

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.graph import write_graph
from nfn_graph.converters.io import load
from nfn_graph.converters.summary import summary

SEEDS = 400
SECONDS = 20


def write_our_graph(path: Path) -> None:
    torch.save(checkpoints.mlp().state_dict(), path)
    write_graph(path, load(path))


KINDS: dict[str, Callable[[Path], Any]] = {**WRITERS, "graph": write_our_graph}


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"Took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Some bytes changed, a part cut out, doubled, zeroed or cut off."""
    damaged = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 8))):
        start = generator.randrange(len(damaged))
        length = generator.randrange(1, 1 + min(64, len(damaged) - start))
        part = damaged[start : start + length]
        match generator.randrange(7):
            case 0:
                damaged[start] ^= 1 << generator.randrange(8)
            case 1:
                damaged[start : start + length] = generator.randbytes(length)
            case 2:
                del damaged[start : start + length]
            case 3:
                damaged[start:start] = part
            case 4:
                damaged[start : start + length] = bytes(length)
            case 5:
                damaged[start : start + length] = b"\xff" * length
            case _ if start > 16:
                del damaged[start:]
    return bytes(damaged) or b"\x00"


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs signals")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_raise_typed_errors(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    data = path.read_bytes()
    refused = 0
    for seed in range(SEEDS):
        path.write_bytes(mutated(data, random.Random(f"{kind} {seed}")))
        try:
            with time_limit(SECONDS):
                graph = load(path)
        except ConversionError as error:
            refused += 1
            assert str(path) in str(error), f"seed {seed}: {error}"
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}: {error!r}") from error
        else:
            assert isinstance(graph, WeightGraph)
            assert summary(graph).rows, f"seed {seed}"
    # Damage in the numbers themselves goes unnoticed; damage in the structure does not.
    assert refused > SEEDS // 10

"""HDF5 files are opened in a separate process, which a damaged file may crash."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import h5py
import pytest
import torch

from nfn_graph import cli
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import hdf5, keras
from nfn_graph.converters.io import load, save

ROOT = Path(__file__).parent
# `save` wrote this file, and one byte was changed: reading an attribute crashes the process.
DEADLY = ROOT / "damaged.h5"


def write_good(path: Path) -> None:
    checkpoints.write_keras(path, checkpoints.keras_mlp(checkpoints.mlp()))


def test_a_deadly_file_is_deadly() -> None:
    code = (
        f"import h5py; file = h5py.File({str(DEADLY)!r}); "
        "[list(file[n].attrs['weight_names']) for n in file.attrs['layer_names']]"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0


def test_a_deadly_file_is_refused(tmp_path: Path) -> None:
    write_good(tmp_path / "good.h5")
    for _ in range(2):
        with pytest.raises(ConversionError, match=r"(?s)damaged\.h5.*crashes the process"):
            load(DEADLY)
        assert load(tmp_path / "good.h5").spec.neurons


def test_commands_go_on_after_a_deadly_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_good(tmp_path / "good.h5")
    files = [str(DEADLY), str(tmp_path / "good.h5")]
    assert cli.main(["inspect", *files]) == 1
    captured = capsys.readouterr()
    assert str(DEADLY) in captured.err and files[1] in captured.out
    assert cli.main(["convert", *files, "--out", str(tmp_path / "out")]) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["converted"] == 1
    assert list(report["failed"]) == [str(DEADLY)]


def test_a_deadly_template_is_refused(tmp_path: Path) -> None:
    write_good(tmp_path / "good.h5")
    graph = load(tmp_path / "good.h5")
    with pytest.raises(ConversionError, match=r"damaged\.h5"):
        save(graph, tmp_path / "new.h5", template=DEADLY)
    assert not (tmp_path / "new.h5").exists()


def test_one_process_reads_many_files(tmp_path: Path) -> None:
    for i in range(3):
        write_good(tmp_path / f"{i}.h5")
    keras.read(tmp_path / "0.h5")
    first = hdf5.reader().pid
    for i in range(3):
        keras.read(tmp_path / f"{i}.h5")
        with pytest.raises(ConversionError):
            (tmp_path / "bad.h5").write_bytes((tmp_path / "0.h5").read_bytes()[:900])
            keras.read(tmp_path / "bad.h5")
    assert hdf5.reader().pid == first
    # A file is closed after it was read.
    with h5py.File(tmp_path / "0.h5", "r+") as file:
        assert file["dense_0"]


def test_a_large_array_comes_through(tmp_path: Path) -> None:
    kernel = torch.randn(700, 900)
    checkpoints.write_keras(tmp_path / "x.h5", {"dense": {"kernel": kernel.numpy()}})
    (tensor,) = keras.read(tmp_path / "x.h5").tensors.values()
    assert torch.equal(tensor, kernel)
    tensor.add_(1.0)  # The array owns its memory.


def test_relative_paths_are_those_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was started in another folder."""
    hdf5.reader()
    monkeypatch.chdir(tmp_path)
    write_good(Path("x.h5"))
    assert load("x.h5").spec.neurons


def test_a_reading_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_good(tmp_path / "x.h5")
    monkeypatch.setattr(hdf5, "SECONDS", 0.5)
    reader = hdf5.reader()
    os.kill(reader.pid, signal.SIGSTOP)
    with pytest.raises(ConversionError, match=r"x\.h5.*more than"):
        load(tmp_path / "x.h5")
    monkeypatch.undo()
    assert load(tmp_path / "x.h5").spec.neurons


def test_an_interrupted_reading_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late reply must not be taken for the reply about the next file."""
    write_good(tmp_path / "x.h5")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hdf5.Reader, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path / "x.h5")
    monkeypatch.undo()
    assert load(tmp_path / "x.h5").spec.neurons


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_copy_of_this_process_starts_its_own(tmp_path: Path) -> None:
    write_good(tmp_path / "x.h5")
    own = hdf5.reader().pid
    results = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: results.put((len(keras.read(tmp_path / "x.h5").tensors), hdf5.reader().pid))
    )
    process.start()
    count, other = results.get()
    process.join()
    assert count == 6 and other != own
    assert hdf5.reader().pid == own and load(tmp_path / "x.h5").spec.neurons


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os; from nfn_graph.converters.files import hdf5; "
        "print(hdf5.reader().pid, flush=True); os._exit(1)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    process, end = Path(f"/proc/{int(result.stdout)}/stat"), time.monotonic() + 30
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)

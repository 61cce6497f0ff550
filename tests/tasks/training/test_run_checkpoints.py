"""Checkpoints of runs are complete, even if a run is killed, diverges or fills its disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nfn_graph.cli import main
from nfn_graph.tasks.edit_inr import EditInr, EditInrOptions
from nfn_graph.tasks.training import train
from nfn_graph.tasks.training.checkpoints import AtomicCheckpointIO, read_run_checkpoint
from nfn_graph.tasks.training.task_module import TaskModule
from small_disk import small_disk


def command(zoo: Path, out: Path, *further: str) -> list[str]:
    """A training of the smallest editor."""
    fixed = ["--preset", "tiny", "--accelerator", "cpu"]
    return ["train", "edit-inr", "--zoo", str(zoo), "--out", str(out), *fixed, *further]


def epoch_of(out: Path) -> int:
    found: int = read_run_checkpoint(out / "checkpoints" / "last.ckpt")["epoch"]
    return found


def test_the_folder_of_temporary_files_is_not_used(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    assert main(command(world / "inr", tmp_path / "run", "--epochs", "2")) == 0
    assert epoch_of(tmp_path / "run") == 1


def test_a_full_folder_of_temporary_files_is_no_obstacle(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", 4096) as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert main(command(world / "inr", tmp_path / "run", "--epochs", "1")) == 0
        assert not list(folder.iterdir())
    assert epoch_of(tmp_path / "run") == 0


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    content = {"epoch": 0, "state_dict": {"model.w": torch.rand(20_000)}}
    with small_disk(tmp_path / "small", 100_000) as folder:
        path = folder / "checkpoints" / "last.ckpt"
        AtomicCheckpointIO().save_checkpoint(content, path)
        for _ in range(2):
            with pytest.raises(OSError, match=r"Expected enough space.*last\.ckpt.*full disk"):
                AtomicCheckpointIO().save_checkpoint({**content, "epoch": 1}, path)
            assert read_run_checkpoint(path)["epoch"] == 0
            assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_a_run_on_a_full_disk_says_so(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    assert main(command(world / "inr", whole, "--epochs", "1")) == 0
    size = (whole / "checkpoints" / "last.ckpt").stat().st_size
    capsys.readouterr()
    # Two checkpoints of an epoch and the logs fit, but not a third that replaces one of them.
    with small_disk(tmp_path / "small", 2 * size + 24 * 1024) as folder:
        assert main(command(world / "inr", folder / "run", "--epochs", "3")) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "(got a full disk)" in lines[0]
        for path in (folder / "run" / "checkpoints").glob("*.ckpt"):
            assert read_run_checkpoint(path)["epoch"] == 0


KILLED = """
import os, sys
from pathlib import Path
from nfn_graph.cli import main
write, calls = Path.write_bytes, 0
def half(self, content):
    global calls
    if self.suffix == ".ckpt":
        calls += 1
        if calls == int(sys.argv[1]):
            write(self, bytes(content)[: len(content) // 2])
            os._exit(9)
    return write(self, content)
Path.write_bytes = half
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("call", [3, 4], ids=["best", "last"])
def test_a_run_killed_while_it_writes_goes_on(call: int, world: Path, tmp_path: Path) -> None:
    """It is killed in the second epoch; the resumed run gives the numbers of a whole one."""
    further = ("--epochs", "5", "--learning-rate", "1e-3")
    assert main(command(world / "inr", tmp_path / "whole", *further)) == 0
    out = tmp_path / "killed"
    arguments = command(world / "inr", out, *further)
    script = [sys.executable, "-c", KILLED, str(call), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(script, capture_output=True, env=environment, check=False)
    assert killed.returncode == 9, killed.stderr
    assert len(list((out / "checkpoints").glob(".*"))) == 1
    assert epoch_of(out) == 0
    assert main(arguments) == 0
    assert not list((out / "checkpoints").glob(".*"))
    found = [json.loads((tmp_path / n / "metrics.json").read_text()) for n in ("whole", "killed")]
    assert found[0]["test"] == found[1]["test"]


def test_training_that_diverges_fails(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(command(world / "inr", out, "--epochs", "9", "--learning-rate", "1e30")) == 1
    captured = capsys.readouterr()
    assert "test networks" not in captured.out
    (line,) = captured.err.splitlines()
    assert "Expected training to stay finite (got a loss of" in line and "--learning-rate" in line
    assert "No epoch was finished" in line
    assert not (out / "metrics.json").exists()


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        ("on_train_batch_start", "a loss of nan in step 0 of epoch 2"),
        ("on_train_batch_end", "parameters without a value at the end of epoch 2"),
    ],
)
def test_the_last_good_checkpoint_is_kept(
    hook: str, got: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters without a value before the first step of an epoch, or after its last one."""

    def spoil(self: TaskModule, *_: Any) -> None:
        is_last = hook.endswith("start") or self.trainer.is_last_batch
        if self.current_epoch == 2 and is_last:
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)

    monkeypatch.setattr(TaskModule, hook, spoil)
    out = tmp_path / "run"
    options = EditInrOptions(world / "inr", out, preset="tiny", epochs=4)
    with pytest.raises(FloatingPointError, match=got):
        train(EditInr(options.resolved()))
    assert epoch_of(out) == 1
    state = read_run_checkpoint(out / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(bool(x.isfinite().all()) for x in state.values())

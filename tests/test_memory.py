"""Keeping freed memory: fewer page faults in commands that train, and nowhere else."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from nfn_graph import cli

FAULTS = """
import resource, sys, torch
from nfn_graph import keep_memory
if sys.argv[1] == "keep":
    assert keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**24)
before = faults()
for _ in range(10):
    torch.ones(2**24)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="Other allocators are left alone")
def test_memory_that_is_kept_is_not_cleared_again():
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", FAULTS, mode]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    # 64 MB are 16,384 pages, or 32 large ones.
    assert faults("keep") < 30
    assert faults("return") > 200


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(cli, "keep_memory", lambda: found.append("kept"))
    monkeypatch.setattr(cli, "_run", lambda command, arguments: 0)
    return found


@pytest.mark.parametrize(("command", "kept"), [("train", ["kept"]), ("inspect", [])])
def test_commands_that_train_keep_memory(command, kept, calls, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nfn-graph", command])
    assert cli.main() == 0
    assert calls == kept


def test_a_caller_keeps_its_own_settings(calls):
    assert cli.main(["train"]) == 0
    assert calls == []


def test_nothing_happens_elsewhere(monkeypatch):
    from nfn_graph import keep_memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_memory()

"""Builds a release and tries it in an empty environment: `python tests/release.py dist`.

The wheel and the source archive are built from a copy of the tree. The wheel is installed into an
empty environment, alone and then with the extra `tasks`, and `smoke.py` runs there. It also runs
under every other supported version of Python whose interpreter is on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def copy_tree(target: Path) -> Path:
    """Copies the tree without hidden folders, links and files that git ignores."""
    lines = (ROOT / ".gitignore").read_text("utf-8").split()
    ignored = shutil.ignore_patterns(".git", *(line.strip("/").split("/")[-1] for line in lines))

    def skipped(folder: str, names: list[str]) -> set[str]:
        links = {name for name in names if Path(folder, name).is_symlink()}
        return links | ignored(folder, names)

    shutil.copytree(ROOT, target, ignore=skipped)
    return target


def build(source: Path, out: Path, *options: str) -> None:
    """Runs `python -m build` with the tools that are installed."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source]
    run(*command)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Returns the output of a command that must succeed."""
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    out = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if out.returncode:
        raise SystemExit(f"Expected success of {' '.join(map(str, command))} (got {out.stdout})")
    return out.stdout


def other_pythons() -> list[str]:
    """Returns working interpreters of the other versions of Python that the package names."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = [shutil.which(f"python{version}") for version in versions if version != own]
    return [
        path
        for path in found
        # A launcher of pyenv may belong to a version that is not active.
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode
    ]


def main(dist: Path) -> None:
    """Builds into a folder and tries the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.rmtree(dist, ignore_errors=True)
        # The wheel is built from the source archive.
        build(copy_tree(folder / "source"), dist)
        (wheel,) = dist.glob("*.whl")
        smoke = shutil.copy(ROOT / "tests" / "smoke.py", folder)
        constraints = ROOT / "constraints.txt"
        for interpreter in (sys.executable, *other_pythons()):
            empty = folder / f"empty-{Path(interpreter).name}"
            run(interpreter, "-m", "venv", empty)
            python = empty / "bin" / "python"
            for kind, extra in (("core", ""), ("tasks", "[tasks]")):
                run(python, "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}{extra}")
                found = run(python, "-W", "ignore", smoke, kind, cwd=folder)
                print(f"{wheel.name}{extra}, {interpreter}: {found.strip()}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

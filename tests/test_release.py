"""Releases: the tree and the source archive give the same wheel, with all that it needs."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import nfn_graph
from nfn_graph import cli
from release import ROOT, build, copy_tree

ROOMS = {"nfn_graph": "nfn_graph", "converters": "nfn_graph/converters", "tasks": "nfn_graph/tasks"}
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)[1]


class Built:
    """A wheel from the tree, a source archive, and the wheel that is made of that."""

    def __init__(self, folder: Path) -> None:
        self.source = copy_tree(folder / "source")
        build(copy_tree(folder / "tree"), folder / "tree-wheel", "--wheel")
        build(self.source, folder / "dist")
        (self.tree_wheel,) = (folder / "tree-wheel").glob("*.whl")
        (self.wheel,) = (folder / "dist").glob("*.whl")
        (self.archive,) = (folder / "dist").glob("*.tar.gz")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("release"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_python_versions_are_those_that_ci_tests() -> None:
    """The workflow tests the oldest and the newest; all code has the syntax of the oldest."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8"))
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == [f"3.{named[0]}", f"3.{named[-1]}"]
    assert f'requires-python = ">=3.{named[0]}"' in project
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            ast.parse(path.read_text("utf-8"), feature_version=(3, int(named[0])))


def test_the_version_is_said_once() -> None:
    assert nfn_graph.__version__ == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_wheel_of_the_archive_is_that_of_the_tree(built: Built) -> None:
    assert contents(built.wheel) == contents(built.tree_wheel)


def test_the_wheel_holds_the_rooms_and_nothing_else(built: Built) -> None:
    found = contents(built.wheel)
    expected = {"nfn_graph/py.typed", "nfn_graph/tasks/reports/page.html.j2"} | {
        f"{package}/{path.relative_to(ROOT / room).as_posix()}"
        for room, package in ROOMS.items()
        for path in (ROOT / room).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    info = f"nfn_graph-{VERSION}.dist-info"
    assert {name for name in found if not name.startswith(info)} == expected
    assert found[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"nfn-graph = nfn_graph.cli:main" in found[f"{info}/entry_points.txt"]


RELATIVE_LINK = re.compile(r"\]\((?!https?://)[^)]*\)")


def test_the_description_has_no_relative_links(built: Built) -> None:
    """A package index shows the README without the files around it."""
    metadata = contents(built.wheel)[f"nfn_graph-{VERSION}.dist-info/METADATA"].decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "\n## Two commands\n" in metadata
    assert not RELATIVE_LINK.search(metadata)


def test_links_of_the_description_become_absolute() -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert RELATIVE_LINK.search(readme)
    text = description(readme, "https://host/me/nfn_graph/")
    assert not RELATIVE_LINK.search(text)
    assert "](https://host/me/nfn_graph/raw/main/docs/figures/three_levels.png)" in text
    assert "[tutorial](https://host/me/nfn_graph/blob/main/docs/tutorial.md)" in text
    assert description("![a](b.png) [c](d.md) [e](https://f.org)", "") == " c [e](https://f.org)"


def test_the_citation_follows_the_citation_file_format() -> None:
    """The file follows version 1.2.0 of the format, and cites the paper like the README."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert {"message", "title", "authors"} <= cited.keys()
    optional = {"keywords", "license", "references", "version"}
    assert cited.keys() - optional == {"cff-version", "type", "message", "title", "authors"}
    assert all(author.keys() == {"name"} for author in cited["authors"])
    (paper,) = cited["references"]
    assert paper["type"] == "conference-paper" and paper["year"] == 2023
    names = [f"{person['family-names']}, {person['given-names']}" for person in paper["authors"]]
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"author = {{{' and '.join(names)}}}" in readme
    assert f"title = {{{paper['title']}}}" in readme


def test_the_archive_holds_the_whole_tree(built: Built) -> None:
    with tarfile.open(built.archive) as file:
        members = file.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    found = {m.name.partition("/")[2] for m in members if m.isfile()}
    tree = {p.relative_to(built.source).as_posix() for p in built.source.rglob("*") if p.is_file()}
    # Products of the build itself, and files that only matter to the host of the repository.
    made = {name for name in tree | found if ".egg-info/" in name or name.startswith("build/")}
    assert found - tree - made == {"PKG-INFO", "setup.cfg"}
    assert {name for name in tree - found - made if not name.startswith(".github/")} == set()


@pytest.mark.parametrize(("command", "extra"), [("inspect", "converters"), ("train", "tasks")])
def test_a_command_says_which_extra_it_needs(
    command: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, cli.COMMANDS[command].function.split(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, "tyro.conf", None)
    assert cli.main([command, "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"Install them with: pip install 'nfn-graph[{extra}]'")


def test_the_wheel_works_outside_the_repository(built: Built, tmp_path: Path) -> None:
    """It uses the packages of this environment; `make release` uses an empty one and does more."""
    with zipfile.ZipFile(built.wheel) as file:
        file.extractall(tmp_path / "site")
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "smoke.py"), "library"]
    settings = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    out = subprocess.run(
        command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.split() == [VERSION, str(tmp_path / "site" / "nfn_graph")]

"""Every link on every page leads to an existing file and to a heading in it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["benchmarks", "docs", "examples", "tasks"]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]

FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
REFERENCE = re.compile(r"^\[[^\]^]+\]:\s+<?([^\s>]+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
HTML_ID = re.compile(r"(?:id|name)=\"([^\"]+)\"")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def links(text: str) -> list[str]:
    """The targets of a page's links and images, without those in code."""
    prose = FENCE.sub("", text)
    # The text of a link may contain code, its target may not.
    prose = CODE.sub(lambda match: match[0].replace("](", "  "), prose)
    return LINK.findall(prose) + REFERENCE.findall(prose)


def anchors(text: str) -> set[str]:
    """The names that GitHub and MkDocs give to the headings of a page."""
    prose = FENCE.sub("", text)
    found: set[str] = set(HTML_ID.findall(prose))
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(prose):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        found.add(slug if not seen[slug] else f"{slug}-{seen[slug]}")
        # Python-Markdown joins hyphens and numbers its repetitions with an underscore.
        found.add(re.sub(r"-+", "-", slug))
        seen[slug] += 1
    return found


def broken(page: Path) -> list[str]:
    """Returns the links of a page without a target."""
    missing = []
    for link in links(page.read_text("utf-8")):
        if SCHEME.match(link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and target.is_relative_to(ROOT)
        if found and anchor:
            found = target.suffix == ".md" and anchor in anchors(target.read_text("utf-8"))
        if not found:
            missing.append(link)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_the_readme_names_files_that_are_there() -> None:
    """The README names existing tests and benchmarks for its claims."""
    text = (ROOT / "README.md").read_text("utf-8")
    named = set(re.findall(r"(?:[\w/]+/)?[\w]+\.py\b", text))
    there = {
        path.name for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in named if "/" in name and not (ROOT / name).is_file()} == set()
    assert {name for name in named if "/" not in name and name not in there} == set()
    assert len(named) > 8


def test_every_page_is_read() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert names >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/store.md"}
    assert names >= {"tasks/README.md", "benchmarks/README.md", "examples/README.md"}


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A `b` c: d\n\n## Twice\n\n## Twice\n", "utf-8")
    page = tmp_path / "page.md"
    good = '[a](other.md) [`b`](other.md#a-b-c-d) ![c](#here) [d](https://x.org) <a id="e"></a>'
    good += " [e](#e) [f](other.md#twice-1)"
    page.write_text(f"# Here\n{good}\n```\n[code](nowhere)\n```\nand `[code](nowhere)`\n", "utf-8")
    assert broken(page) == []
    bad = ["none.md", "other.md#none", "#nowhere", "../outside.md", "page.md#here-1"]
    page.write_text("# Here\n" + " ".join(f"[x]({link})" for link in bad), "utf-8")
    assert broken(page) == bad

"""Reports in headless Chromium, controlled through its debugging pipe, which needs no package."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from finished_run import make_run

from nfn_graph.tasks.reports import (
    Section,
    Shown,
    compare,
    confusion,
    curves,
    run_report,
    write_report,
)

CHROMIUM = shutil.which("chromium")
TIMEOUT = 60
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,1400",
    "--remote-debugging-pipe",
]
# Chromium reads commands from file 3 and writes answers to file 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
# The natural size, the box, the visibility and the caption of every figure.
LOOK = """
Promise.all([...document.images].map(image => image.decode().catch(() => null))).then(() =>
  [...document.images].map(image => {
    image.scrollIntoView();
    const box = image.getBoundingClientRect();
    const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    return {
      natural: [image.naturalWidth, image.naturalHeight],
      box: [box.width, box.height],
      inside: box.left >= 0 && box.right <= document.documentElement.clientWidth,
      seen: top === image && image.checkVisibility(
        {opacityProperty: true, visibilityProperty: true}),
      caption: image.parentElement.querySelector("figcaption").innerText,
    };
  }))
"""

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="reports are not tried in a browser: install Debian's chromium"
)


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have chromium")
def test_ci_does_not_skip_chromium() -> None:
    assert CHROMIUM


class Browser:
    """One tab of Chromium."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.buffer = b""
        self.count = 0
        self.events: list[dict[str, Any]] = []
        self.session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters, **self.session}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self.answers, 1 << 20) if ready else b""
            assert data, "Chromium ended or does not answer"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, scheme: str = "light", width: int = 1100) -> None:
        """Loads a page and waits until it is complete; `events` are those since then."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        size = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        assert "errorText" not in self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def evaluate(self, script: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def complaints(self) -> list[object]:
        """Returns all console messages, and all requests except for the page and data URIs."""
        # An answer comes after all events that happened before its question.
        self.evaluate("new Promise(done => setTimeout(() => done(0), 100))")
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        found: list[object] = [e["params"] for e in self.events if e["method"] in kinds]
        for event in self.events:
            if event["method"] == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(url)
        return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    pipes = [os.pipe(), os.pipe()]
    # These must not be 3 and 4, to which they are copied.
    (theirs_in, ours_out), (ours_in, theirs_out) = [
        [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe] for pipe in pipes
    ]
    for end in (*pipes[0], *pipes[1]):
        os.close(end)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            browser = Browser(ours_out, ours_in)
            yield browser
            browser.session = {}
            browser.call("Browser.close")
            process.wait(TIMEOUT)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(ours_out)
            os.close(ours_in)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


def assert_figures_are_seen(browser: Browser, count: int) -> None:
    figures = browser.evaluate(LOOK)
    assert len(figures) == count
    for figure in figures:
        assert min(figure["natural"]) > 0, figure
        assert min(figure["box"]) > 100, figure
        assert figure["inside"] and figure["seen"], figure
        assert figure["caption"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    logged = {"train/loss": ([0, 1], [1.0, 0.5]), "validation/tau": ([0, 1], [0.1, 0.5])}
    curves(run / "figures" / "curves.png", logged, title="Curves")
    confusion(run / "figures" / "confusion-test.png", [[3, 1], [0, 2]], ["<b>", "dog"])
    return run_report(run)


@needs_chromium
@pytest.mark.parametrize("width", [1100, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_in_chromium(browser: Browser, report: Path, scheme: str, width: int) -> None:
    browser.open(report, scheme, width)
    assert_figures_are_seen(browser, count=6)
    assert browser.complaints() == []
    # The page itself never scrolls sideways, and text has enough contrast to its background.
    # `innerWidth` does not work: on a phone it grows with content that is too wide.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = browser.evaluate("getComputedStyle(document.body).color")
    brightness = [sum(map(int, c[4:-1].split(","))) / 3 for c in (ground, ink)]
    assert (brightness[0] - brightness[1]) * (1 if scheme == "light" else -1) > 120


@needs_chromium
def test_a_comparison_in_chromium(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    compare([tmp_path], tmp_path / "out")
    browser.open(tmp_path / "out" / "compare.html")
    assert_figures_are_seen(browser, count=1)
    assert browser.complaints() == []


@needs_chromium
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data:image/png;base64,iVBOR", "data:image/png;base64,AAAAA"),
        ("figure { margin: 0; }", "figure { display: none; }"),
        ("figure { margin: 0; }", "figure { opacity: 0; }"),
    ],
    ids=["broken", "hidden", "transparent"],
)
def test_a_figure_that_cannot_be_seen_is_noticed(
    browser: Browser, report: Path, tmp_path: Path, old: str, new: str
) -> None:
    text = report.read_text("utf-8")
    assert old in text
    (tmp_path / "r.html").write_text(text.replace(old, new), "utf-8")
    browser.open(tmp_path / "r.html")
    with pytest.raises(AssertionError):
        assert_figures_are_seen(browser, count=6)


@needs_chromium
@pytest.mark.parametrize(
    "element",
    [
        "<script>1</script>",
        "<img alt='' src='https://example.invalid/x.png'>",
        "<b style='background: url(https://example.invalid/x.png)'>x</b>",
    ],
    ids=["script", "image", "style"],
)
def test_what_would_act_or_load_is_stopped_and_noticed(
    browser: Browser, report: Path, tmp_path: Path, element: str
) -> None:
    text = report.read_text("utf-8").replace("</main>", f"{element}</main>")
    (tmp_path / "r.html").write_text(text, "utf-8")
    browser.open(tmp_path / "r.html")
    complaints = browser.complaints()
    assert complaints
    assert "Content Security Policy" in str(complaints)


@needs_chromium
def test_hostile_text_does_not_act(browser: Browser, tmp_path: Path) -> None:
    hostile = "<script>document.title = 'acted'</script><img src=x onerror=alert(1)>"
    confusion(tmp_path / "m.png", [[1]], ["x"])
    section = Section(hostile, hostile, figures=[Shown(tmp_path / "m.png", hostile, hostile)])
    browser.open(write_report(tmp_path / "r.html", hostile, [section]))
    assert browser.evaluate("document.title") == hostile
    assert browser.evaluate("document.querySelector('h2').innerText") == hostile
    assert_figures_are_seen(browser, count=1)
    assert browser.complaints() == []

"""Means and standard errors over seeds, compared with numbers computed by hand."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PathCollection

from nfn_graph import UserError, cli
from nfn_graph.tasks.reports import bars, compare, failed_runs, find_runs, print_table, progress

compare_module = sys.modules[compare.__module__]
# For 0.7, 0.8, 0.9: the variance is (0.01 + 0 + 0.01) / 2, and the error sqrt(0.01 / 3).
TAUS = (0.7, 0.8, 0.9)
ERROR = 0.1 / math.sqrt(3)


def make_run(
    folder: Path,
    tau: float | None,
    *,
    seed: int = 0,
    task: str = "predict-generalization",
    fingerprint: str = "f1",
    **options: object,
) -> Path:
    folder.mkdir(parents=True)
    chosen = {"zoo": "zoos/z", "model": "nfn-np", "preset": "paper", "out": str(folder), **options}
    config = {
        "task": task,
        "options": {**chosen, "seed": seed},
        "zoo": {"fingerprint": fingerprint},
    }
    metrics = {
        "test": {"tau": tau, "networks": 120, "classes": ["a"]},
        "validation": {"tau": 0.1},
        "evaluations": {"wide": {"tau": None if tau is None else tau / 2}},
        "seconds": 10.0 * (seed + 1),
        "parameters": 1234,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "metrics.json").write_text(json.dumps(metrics), "utf-8")
    return folder


def three_seeds(root: Path) -> Path:
    for seed, tau in enumerate(TAUS):
        make_run(root / f"np-{seed}", tau, seed=seed, devices=seed)
    make_run(root / "deeper" / "statnn", 0.5, model="statnn")
    return root


def find(rows: list[dict[str, Any]], label: str, part: str, metric: str) -> dict[str, Any]:
    (row,) = [r for r in rows if (r["label"], r["part"], r["metric"]) == (label, part, metric)]
    return row


def test_means_and_standard_errors(tmp_path: Path) -> None:
    rows = compare([three_seeds(tmp_path)])
    test = find(rows, "nfn-np", "test", "tau")
    assert test["mean"] == pytest.approx(0.8)
    assert test["standard_error"] == pytest.approx(ERROR)
    assert (test["seeds"], test["values"]) == (3, list(TAUS))
    assert (test["zoo"], test["model"], test["preset"]) == ("z", "nfn-np", "paper")
    wide = find(rows, "nfn-np", "wide", "tau")
    assert (wide["mean"], wide["standard_error"]) == pytest.approx((0.4, ERROR / 2))
    assert find(rows, "nfn-np", "run", "seconds")["mean"] == pytest.approx(20)
    assert find(rows, "nfn-np", "test", "networks")["standard_error"] == 0
    single = find(rows, "statnn", "test", "tau")
    assert (single["mean"], single["standard_error"], single["seeds"]) == (0.5, None, 1)
    assert {row["part"] for row in rows} == {"test", "wide", "run"}
    assert {row["metric"] for row in rows} == {"tau", "networks", "seconds", "parameters"}


def test_options_that_differ_part_the_groups(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 0.1, channels=[16, 5], lr=0.1)
    make_run(tmp_path / "b", 0.2, channels=[32, 5], lr=0.1)
    make_run(tmp_path / "c", 0.3, channels=[32, 5], lr=0.1, preset="small")
    make_run(tmp_path / "d", 0.4, model="statnn", lr=0.1)
    rows = [row for row in compare([tmp_path]) if row["part"] == "test" and row["metric"] == "tau"]
    assert {row["label"]: row["mean"] for row in rows} == {
        "nfn-np, paper, channels [16, 5]": 0.1,
        "nfn-np, paper, channels [32, 5]": 0.2,
        "nfn-np, small, channels [32, 5]": 0.3,
        "statnn": 0.4,
    }
    assert [row["options"]["channels"] for row in rows] == [
        "[16, 5]",
        "[32, 5]",
        "[32, 5]",
        "(none)",
    ]
    assert all(set(row["options"]) == {"channels"} for row in rows)


def test_labels_do_not_repeat_what_follows_from_the_probes(tmp_path: Path) -> None:
    for probes in (0, 64):
        options = {"operation": "dilate", "probes": probes}
        make_run(tmp_path / f"{probes}", 0.1, task="edit-inr", **options)
    rows = compare([tmp_path])
    assert {row["label"]: row["options"]["reads"] for row in rows} == {
        "nfn-np, probes 0": "weights",
        "nfn-np, probes 64": "evaluates the network",
    }


def test_a_zoo_is_known_by_its_content(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 0.1)
    make_run(tmp_path / "b", 0.3, seed=1, zoo="/elsewhere/moved")
    make_run(tmp_path / "c", 0.9, fingerprint="0123456789abcdef")
    rows = [row for row in compare([tmp_path]) if row["part"] == "test" and row["metric"] == "tau"]
    assert {row["zoo"]: row["values"] for row in rows} == {
        "z (f1)": [0.1, 0.3],
        "z (01234567)": [0.9],
    }
    assert len({row["label"] for row in rows}) == 2


def test_missing_and_undefined_values_are_not_hidden(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 0.5)
    make_run(tmp_path / "b", None, seed=1)
    row = find(compare([tmp_path], tmp_path / "out"), "nfn-np", "test", "tau")
    assert math.isnan(row["mean"]) and math.isnan(row["standard_error"])
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text("utf-8"))
    metrics["evaluations"] = {}
    (tmp_path / "a" / "metrics.json").write_text(json.dumps(metrics), "utf-8")
    assert find(compare([tmp_path]), "nfn-np", "wide", "tau")["seeds"] == 1


def test_different_tasks_are_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", 0.1)
    second = make_run(tmp_path / "b", 0.1, task="classify-inr")
    with pytest.raises(ValueError, match="one task") as error:
        compare([first, second])
    for name in ("predict-generalization", "classify-inr", str(first), str(second)):
        assert f"'{name}'" in str(error.value)


def test_a_seed_twice_is_refused_and_a_folder_twice_is_one_run(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", 0.1, seed=7)
    assert find_runs([first, tmp_path, first]) == [first]
    second = make_run(tmp_path / "b", 0.2, seed=7)
    with pytest.raises(ValueError, match="got seed 7") as error:
        compare([tmp_path])
    assert f"'{first}'" in str(error.value) and f"'{second}'" in str(error.value)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Expected the folder of a run"):
        compare([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"at least one run in .*empty"):
        compare([tmp_path / "empty"])
    with pytest.raises(ValueError, match="at least one run to compare"):
        compare([])
    run = make_run(tmp_path / "run", 0.1)
    (run / "metrics.json").unlink()
    with pytest.raises(UserError, match=rf"finished run in '{run}' \(got no metrics"):
        compare([tmp_path])


def test_failed_runs_are_listed_and_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = three_seeds(tmp_path / "runs"), tmp_path / "out"
    before = compare([runs])
    (make_run(runs / "unfinished", 0.1, seed=9) / "metrics.json").unlink()
    (make_run(runs / "damaged", 0.1, seed=8) / "metrics.json").write_text('{"test": 3}')
    assert compare([runs], out) == before
    assert {folder.name for folder in failed_runs([runs])} == {"unfinished", "damaged"}
    assert cli.main(["compare", str(runs)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Failed or not finished: 2" in printed
    page = (out / "compare.html").read_text("utf-8")
    assert str(runs / "unfinished") in page and str(runs / "damaged") in page


def test_the_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = compare([three_seeds(tmp_path / "runs")], out)
    assert sorted(p.name for p in out.iterdir()) == ["compare.csv", "compare.html", "compare.png"]
    with open(out / "compare.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    test = [line for line in lines if line["part"] == "test" and line["metric"] == "tau"]
    by_model = {line["model"]: line for line in test}
    assert float(by_model["nfn-np"]["mean"]) == pytest.approx(0.8)
    assert float(by_model["nfn-np"]["standard_error"]) == pytest.approx(ERROR)
    assert by_model["nfn-np"]["values"] == "0.7 0.8 0.9"
    assert by_model["statnn"]["standard_error"] == ""
    html = (out / "compare.html").read_text("utf-8")
    for cell in ("0.800 ± 0.058", "0.400 ± 0.029", ">0.500<", ">1,234<", "over 1 or 3 seeds"):
        assert cell in html
    assert "0.500 ±" not in html
    assert (
        "On the test networks, nfn-np (0.800) has the best Kendall tau, before statnn (0.500); a "
        "single seed does not show how much of this is chance."
    ) in html
    assert "statnn is an MLP on the mean, variance and quantiles of every weight tensor." in html
    assert html.count("data:image/png;base64,") == 1


def test_bars_stand_at_the_means_with_every_seed(tmp_path: Path) -> None:
    rows = compare([three_seeds(tmp_path / "runs")])
    figure = bars(tmp_path / "b.png", rows)
    (axes,) = figure.axes
    assert axes.get_title() == "Kendall tau"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["test", "wide"]
    heights = sorted(bar.get_height() for bar in axes.patches)
    assert heights == pytest.approx([0.25, 0.4, 0.5, 0.8])
    points = [c for c in axes.collections if isinstance(c, PathCollection)]
    dots = sorted(tuple(p.get_offsets()[:, 1].tolist()) for p in points)
    assert dots == [(0.25,), (0.35, 0.4, 0.45), (0.5,), TAUS]
    whiskers = [c.get_segments() for c in axes.collections if hasattr(c, "get_segments")]
    # Two groups have a standard error; the one with a single seed has none.
    ends = sorted(segment[:, 1].tolist() for (segment,) in whiskers)
    assert ends[1] == pytest.approx([0.8 - ERROR, 0.8 + ERROR])
    assert len(ends) == 2
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"nfn-np", "statnn"}


def test_the_printed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "x", 0.3, model="[bold]x")
    print_table(compare([three_seeds(tmp_path)]))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nfn-np", "3", "0.800", "±", "0.058"] in printed
    assert ["statnn", "1", "0.500"] in printed
    assert ["[bold]x", "1", "0.300"] in printed
    assert ["nfn-np", "3", "1,234", "20.000", "±", "5.774"] in printed


@pytest.mark.parametrize(("taus", "verdict"), [((0.5, 0.52), "more"), ((0.7, 0.79), "less")])
def test_the_conclusion_weighs_the_difference_by_its_error(
    taus: tuple[float, float], verdict: str, tmp_path: Path
) -> None:
    for seed, (ahead, behind) in enumerate(zip((0.8, 0.82), taus, strict=True)):
        make_run(tmp_path / f"np-{seed}", ahead, seed=seed)
        make_run(tmp_path / f"stat-{seed}", behind, seed=seed, model="statnn")
    compare([tmp_path], tmp_path / "out")
    page = (tmp_path / "out" / "compare.html").read_text("utf-8")
    gap = 0.81 - sum(taus) / 2
    assert f"the difference of {gap:.3f} is {verdict} than twice its standard error" in page


def test_progress_is_drawn_against_seconds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "np", 0.8)
    metrics = json.loads((run / "metrics.json").read_text("utf-8")) | {"epochs": 4}
    (run / "metrics.json").write_text(json.dumps(metrics), "utf-8")
    (run / "logs").mkdir()
    log = "epoch,validation/r2,validation/tau\n0,0.1,0.2\n1,0.3,0.5\n3,0.6,0.7\n"
    (run / "logs" / "metrics.csv").write_text(log, "utf-8")
    make_run(tmp_path / "runs" / "statnn", 0.5, model="statnn")  # This run has no log.
    out = tmp_path / "out"
    compare([tmp_path / "runs"], out)
    assert (out / "progress.png").is_file()
    assert "progress" in (out / "compare.html").read_text("utf-8").lower()
    name, found = compare_module._progress(compare_module._groups(compare_module._read([run])[0]))
    # Four epochs in 10 seconds are 2.5 seconds each.
    assert (name, found) == ("tau", {"nfn-np": [([2.5, 5.0, 10.0], [0.2, 0.5, 0.7])]})
    (axes,) = progress(tmp_path / "p.png", found, name).axes
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[2.5, 0.2], [5.0, 0.5], [10.0, 0.7]]
    with pytest.raises(UserError, match="at least one model"):
        progress(tmp_path / "p.png", {}, "tau")


def give_course(run: Path, values: list[float], seconds: float) -> Path:
    """Adds the log of an accuracy on validation networks to a run."""
    metrics = json.loads((run / "metrics.json").read_text("utf-8"))
    metrics |= {"epochs": len(values), "seconds": seconds}
    (run / "metrics.json").write_text(json.dumps(metrics), "utf-8")
    (run / "logs").mkdir()
    rows = [f"{epoch},{value}\n" for epoch, value in enumerate(values)]
    log = "".join(["epoch,validation/accuracy\n", *rows])
    (run / "logs" / "metrics.csv").write_text(log, "utf-8")
    return run


def test_progress_tells_models_and_seeds_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that evaluate the network are dashed, and the mean over seeds is the bold line."""
    root = tmp_path / "runs"
    give_course(make_run(root / "np-0", 0.5, task="classify-inr"), [0.1, 0.3, 0.6], 30.0)
    give_course(make_run(root / "np-1", 0.5, task="classify-inr", seed=1), [0.3, 0.5], 40.0)
    probe = make_run(root / "probe", 0.5, task="classify-inr", model="probe")
    give_course(probe, [0.9, 0.95], 4.0)
    drawn = []
    monkeypatch.setattr(
        compare_module, "progress", lambda *args, **more: drawn.append(progress(*args, **more))
    )
    compare([root], tmp_path / "out")
    assert "Dashed: models that evaluate" in (tmp_path / "out" / "compare.html").read_text("utf-8")
    (figure,) = drawn
    (axes,) = figure.axes
    lines = {"thin": [], "bold": []}
    for line in axes.get_lines():
        lines["bold" if line.get_linewidth() > 1 else "thin"].append(line)
    first, second = lines["thin"]
    assert first.get_xydata().tolist() == [[10, 0.1], [20, 0.3], [30, 0.6]]
    assert second.get_xydata().tolist() == [[20, 0.3], [40, 0.5]]
    mean, probe_line = lines["bold"]
    assert mean.get_xydata().tolist() == [[15, 0.2], [30, 0.4]]
    assert probe_line.get_xydata().tolist() == [[2, 0.9], [4, 0.95]]
    assert {x.get_color() for x in (first, second)} == {mean.get_color()} != probe_line.get_color()
    assert [x.get_linestyle() for x in (first, second, mean, probe_line)] == ["-", "-", "-", "--"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "nfn-np",
        "probe",
        "reads weights",
        "evaluates the network",
    ]
    figure.canvas.draw()
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert {"2", "5", "10", "20"} <= set(ticks)


def test_long_labels_in_progress_stay_apart(tmp_path: Path) -> None:
    """Labels of 100 characters that differ at their end."""
    labels = [f"nfn-np, {', '.join(['an_option 1.0'] * 6)}, noise {x}" for x in (0.1, 0.2)]
    figure = progress(tmp_path / "p.png", {x: [([1.0], [0.5])] for x in labels}, "tau")
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert [text.replace("\n", " ") for text in shown] == labels
    assert max(len(line) for text in shown for line in text.split("\n")) <= 80

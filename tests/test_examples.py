"""Every example runs, and the numbers that it prints support what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NUMBER = r"(-?\d[\d.]*(?:e-?\d+)?)"


def numbers(text: str, *patterns: str) -> list[float]:
    """Returns the number that each pattern marks with `#`."""
    found = []
    for pattern in patterns:
        match = re.search(re.escape(pattern).replace(r"\#", NUMBER), text)
        assert match, f"no '{pattern}' in:\n{text}"
        found.append(float(match[1]))
    return found


def check_convert_folder(out: str) -> None:
    assert numbers(out, "# converted", "# failed", "# of 6 came back") == [6, 1, 6]
    assert numbers(out, "a batch of #") == [3]


def check_pyg_models(out: str) -> None:
    nfn, gine = numbers(out, "NFN:  R2 #", "GINE: R2 #")
    assert min(nfn, gine) > 0.5


def check_mixed_sizes(out: str) -> None:
    kinds = "one type per depth, unseen widths", "one type for all, unseen widths"
    widths = numbers(out, *(f"{kind}: correlation #" for kind in kinds))
    assert min(widths) > 0.8
    assert numbers(out, "unseen depth: correlation #")[0] > 0.6


def check_hnp_against_np(out: str) -> None:
    nothing, encoded, hnp = numbers(out, "NP: found #", "IO-encoding: found #", "HNP: found #")
    assert nothing < 0.2 < encoded < hnp  # By chance, one class of ten is right.
    assert hnp > 0.7


def check_edit_inr(out: str) -> None:
    before, after = numbers(out, "# before the edit", "# after it")
    assert after < before / 2


def check_learned_optimizer(out: str) -> None:
    none, descent, learned = numbers(
        out, "no step: loss #", "rates: loss #", "learned step: loss #"
    )
    # Several times the gain of the best gradient step.
    assert learned < descent < none
    assert none - learned > 3 * (none - descent)


def check_from_nfn(out: str) -> None:
    difference, same = numbers(out, "of a prediction: #", "the same width: R2 #")
    assert difference < 1e-5
    assert same > 0.5
    came, trained = numbers(out, "as it came: R2 #", "trained on: R2 #")
    assert trained > max(came, 0.5)


CHECKS = {
    "convert_folder": check_convert_folder,
    "pyg_models": check_pyg_models,
    "mixed_sizes": check_mixed_sizes,
    "hnp_against_np": check_hnp_against_np,
    "edit_inr": check_edit_inr,
    "learned_optimizer": check_learned_optimizer,
    "from_nfn": check_from_nfn,
}


@pytest.mark.parametrize("name", CHECKS)
def test_examples_find_what_they_say(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    CHECKS[name](capsys.readouterr().out)


def test_every_example_is_checked_short_and_listed() -> None:
    files = {path.stem: path.read_text("utf-8") for path in EXAMPLES.glob("*.py")}
    assert files.keys() == CHECKS.keys()
    assert [name for name, text in files.items() if len(text.splitlines()) >= 100] == []
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert [name for name in files if f"({name}.py)" not in listed] == []


def test_numbers_are_read() -> None:
    text = "loss -1.5 and 2.0e-07 (3 of 4)"
    assert numbers(text, "loss #", "and #", "(# of") == [-1.5, 2e-7, 3]
    with pytest.raises(AssertionError, match="gain"):
        numbers(text, "gain #")

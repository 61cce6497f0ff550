"""Messages that name options as the caller knows them."""

from __future__ import annotations

import pytest

from nfn_graph.converters.errors import in_command_line


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("flatten='channels_first' or flatten='channels_last'",
         "--flatten channels_first or --flatten channels_last"),
        ("Give orientation='in_out'", "Give --orientation in_out"),
        ("Choose one with key='nets.0'", "Choose one with --key nets.0"),
        ("give safe_globals=['numpy.dtype', 'a.B'], or", "give --safe-globals numpy.dtype a.B, or"),
        ("Give the network as arch, on the meta device if it is large",
         "Give the network as --arch"),
        ("Give it as a PyTorch module: arch=...", "Give it as a PyTorch module: --arch"),
        ("Give an example_input.", "Give an --input-shape."),
        ("Give example_input=...", "Give --input-shape"),
        ("'/home/arch/x.pt': as arch", "'/home/arch/x.pt': as --arch"),
        ("'arch': 'my arch/x.arch.pt', 'example_input.weight'",
         "'arch': 'my arch/x.arch.pt', 'example_input.weight'"),
    ],
)  # fmt: skip
def test_options_of_the_command_line(message: str, expected: str) -> None:
    assert in_command_line(message) == expected

"""Messages use the names of options that the caller knows."""

from __future__ import annotations

import pytest

from nfn_graph.converters.errors import in_command_line


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("flatten='channels_first' or flatten='channels_last'",
         "--flatten channels_first or --flatten channels_last"),
        ("Pass orientation='in_out'", "Pass --orientation in_out"),
        ("Choose one with key='nets.0'", "Choose one with --key nets.0"),
        ("give safe_globals=['numpy.dtype', 'a.B'], or", "give --safe-globals numpy.dtype a.B, or"),
        ("Pass the network as arch, on the meta device if it is large",
         "Pass the network as --arch"),
        ("Pass it as a PyTorch module: arch=...", "Pass it as a PyTorch module: --arch"),
        ("Pass an example_input.", "Pass an --input-shape."),
        ("Pass example_input=...", "Pass --input-shape"),
        ("'/home/arch/x.pt': as arch", "'/home/arch/x.pt': as --arch"),
        ("'arch': 'my arch/x.arch.pt', 'example_input.weight'",
         "'arch': 'my arch/x.arch.pt', 'example_input.weight'"),
    ],
)  # fmt: skip
def test_options_of_the_command_line(message: str, expected: str) -> None:
    assert in_command_line(message) == expected

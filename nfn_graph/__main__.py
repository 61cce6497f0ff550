"""Runs the command line as `python -m nfn_graph`."""

import sys

from nfn_graph.cli import main

sys.exit(main())

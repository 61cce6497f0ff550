"""What the benchmarks share: cases, timing, and how results are shown."""

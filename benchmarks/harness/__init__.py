"""Shared code of the benchmarks: cases, timing, and tables."""

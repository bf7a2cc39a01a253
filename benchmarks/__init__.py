"""Benchmarks: ratios measured in one run, each engine checked for correctness first."""

"""Benchmarks: each prints one JSON line with its parameters, medians and spread."""

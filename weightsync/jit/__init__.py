"""Loops that numba compiles when a process begins, for what no library does."""

"""Benchmarks of this package against peers."""

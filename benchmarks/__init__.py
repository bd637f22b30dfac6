"""Benchmarks: each writes JSON lines under its ``results/``; ``report`` turns them into docs."""

"""Benchmarks: ratios of CPU per message against peers, side by side in one run on a real broker.

`make bench` runs them; `bench/results/latest.json` has the figures. Next: run.py.
"""

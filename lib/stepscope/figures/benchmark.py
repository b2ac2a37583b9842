"""Figures of the benchmark study."""

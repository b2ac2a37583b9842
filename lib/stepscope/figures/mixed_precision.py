"""Figures of the mixed_precision study."""

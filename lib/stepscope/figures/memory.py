"""Figures of the memory study."""

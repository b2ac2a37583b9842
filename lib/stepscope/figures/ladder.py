"""Figures of the ladder study."""

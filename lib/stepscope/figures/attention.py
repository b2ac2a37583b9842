"""Figures of the attention study."""

"""Figures of the nsys study."""

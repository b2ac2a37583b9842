"""Views of mixed_precision."""

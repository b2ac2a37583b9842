"""Views of attention."""

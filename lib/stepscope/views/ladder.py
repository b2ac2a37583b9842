"""Views of the ladder."""

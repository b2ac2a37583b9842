"""Views of benchmark."""

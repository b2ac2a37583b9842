"""Views of nsys."""

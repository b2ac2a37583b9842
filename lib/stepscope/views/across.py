"""Views of across."""

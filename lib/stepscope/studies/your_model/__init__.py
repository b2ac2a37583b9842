"""The ladder on your own model: a file with a function ``build`` instead of the built-in Transformer."""

"""Measure a training step after each optimization; the studies of the built-in and of your own model use it."""

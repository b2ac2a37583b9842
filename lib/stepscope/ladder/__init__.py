"""Measure a training step after each optimization, for the studies of the built-in model and of your own model."""

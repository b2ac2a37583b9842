"""Measure a training step after each optimization, for the built-in Transformer and for users' models."""

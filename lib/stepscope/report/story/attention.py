"""Attention."""
from stepscope.report.story.part import Part

PART = Part('Attention')

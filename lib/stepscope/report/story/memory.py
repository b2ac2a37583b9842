"""Memory, and what fits."""
from stepscope.report.story.part import Part

PART = Part('Memory, and what fits')

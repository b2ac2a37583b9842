"""The first screen."""
from stepscope.report.story.part import Part

PART = Part('')

"""The assignment's questions, answered."""
from stepscope.report.story.part import Part

PART = Part("The assignment's questions, answered")

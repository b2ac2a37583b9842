"""Where a step's time goes."""
from stepscope.report.story.part import Part

PART = Part("Where a step's time goes")

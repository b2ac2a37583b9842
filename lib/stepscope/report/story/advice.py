"""What to do."""
from stepscope.report.story.part import Part

PART = Part('What to do')

"""How far to trust a timing."""
from stepscope.report.story.part import Part

PART = Part('How far to trust a timing')

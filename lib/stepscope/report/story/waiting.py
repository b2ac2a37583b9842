"""When the GPU waits for the host."""
from stepscope.report.story.part import Part

PART = Part('When the GPU waits for the host')

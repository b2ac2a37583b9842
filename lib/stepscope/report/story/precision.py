"""What precision buys and costs."""
from stepscope.report.story.part import Part

PART = Part('What precision buys and costs')

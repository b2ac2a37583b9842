"""What the study of waiting brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Question
from stepscope.studies.waits import facts, printed
from stepscope.studies.waits.tables import load

CHAPTER = Chapter(
    Path(__file__).parent, "Who waits for whom", load,
    questions=(Question("waits-follow", facts.verdicts, ("waits.phases",), printed={"arms": printed.arms}),),
)

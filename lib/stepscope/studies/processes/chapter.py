"""What the study of processes brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Question
from stepscope.studies.processes import facts, printed
from stepscope.studies.processes.tables import load

CHAPTER = Chapter(
    Path(__file__).parent, "Between processes", load,
    questions=(
        Question("between-processes", facts.between, ("processes.spread", "processes.samples"),
                 ("nsys.phases",), printed={"spreads": printed.spreads}),
    ),
)

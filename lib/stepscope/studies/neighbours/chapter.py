"""What the comparison of runs side by side brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture
from stepscope.studies.neighbours import answers, figures, measure


def load(store, records):
    return measure.load(store.root)


CHAPTER = Chapter(
    Path(__file__).parent, "Sweeps side by side", load,
    old=(
        lambda t: answers.sooner(t["neighbours.sweeps"]),
        lambda t: answers.agree(t["neighbours.timings"], t["neighbours.sweeps"]),
        lambda t: answers.repeated(t["neighbours.experiment"]),
    ),
    pictures=(Picture("workers_agree", figures.agree, ("neighbours.timings",)),),
)

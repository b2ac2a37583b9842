"""What the study of the compiled model brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture
from stepscope.studies.compile import answers, figures
from stepscope.studies.compile.measure import all_times


def load(store, records):
    return {"times": all_times(store, records)}


CHAPTER = Chapter(
    Path(__file__).parent, "The compiled model", load,
    old=(
        lambda t: answers.whole_model(t["compile.times"]),
        lambda t: answers.launches(t["compile.times"]),
        lambda t: answers.peak_memory(t["compile.times"]),
        lambda t: answers.cost(t["compile.times"]),
        lambda t: answers.sdpa(t["compile.times"]),
    ),
    pictures=(Picture("compile_model", figures.whole_model, ("compile.times",)),),
)

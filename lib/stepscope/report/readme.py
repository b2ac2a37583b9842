"""What the README says of the records, made from them: how fast a step can be made, and a table."""
from stepscope.report.load import Data
from stepscope.report.story import first
from stepscope.report.story.part import tell
from stepscope.say.selections import matrix
from stepscope.say.tables import markdown_table
from stepscope.studies.benchmark.printed import wall_table

STORY_BEGIN, STORY_END = "<!-- story -->\n", "<!-- /story -->"
TABLE_BEGIN, TABLE_END = "<!-- h200-table -->\n", "<!-- /h200-table -->"


def between(text: str, begin: str, end: str, made: str) -> str:
    """The text with what is between two marks made anew; as it is, where the first is not in it."""
    if begin not in text:
        return text
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{made}{end}{rest.partition(end)[2]}"


def with_story(readme: str, data: Data) -> str:
    """A README that opens as the report does: the story of its first screen, with the picture."""
    answers = tell(first.PART, data.tables)
    parts = [part for answer in answers for part in (
        answer.text, *(f"![{caption}](figures/{stem}.png)" for stem, caption in answer.figures))]
    if not parts:
        return readme
    text = "\n\n".join(parts).replace("](#", "](writeup.md#")
    return between(readme, STORY_BEGIN, STORY_END, text + "\n")


def with_table(readme: str, data: Data) -> str:
    """A README with what is between its two marks made anew: wall times at context 512. Without marks it
    stays as it is.
    """
    times = matrix(data.tables["benchmark.times"])
    if TABLE_BEGIN not in readme or times.empty:
        return readme
    table = wall_table(times[times["context_length"] == 512]).drop(columns="context")
    row = times.iloc[0]
    caption = (f"*{data.where}, fp32, context 512, batch {row.batch_size}: host wall time in ms,"
               f" mean ± standard deviation of {row.timed_steps} steps after {row.warmup_steps}"
               " warm-up steps.*")
    return between(readme, TABLE_BEGIN, TABLE_END, f"{caption}\n\n{markdown_table(table)}\n")

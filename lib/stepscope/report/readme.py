"""What the README says of the records, made from them: how fast a step can be made, and a table."""
from stepscope.report.load import Data
from stepscope.say.chapter import answer
from stepscope.say.selections import matrix
from stepscope.say.tables import markdown_table
from stepscope.studies.benchmark.printed import wall_table
from stepscope.studies.ladder.chapter import CHAPTER as LADDER

LADDER_BEGIN, LADDER_END = "<!-- ladder -->\n", "<!-- /ladder -->"
TABLE_BEGIN, TABLE_END = "<!-- h200-table -->\n", "<!-- /h200-table -->"


def between(text: str, begin: str, end: str, made: str) -> str:
    """The text with what is between two marks made anew; as it is, where the first is not in it."""
    if begin not in text:
        return text
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{made}{end}{rest.partition(end)[2]}"


def with_ladder(readme: str, data: Data) -> str:
    """A README that opens with the ladder: what was found, its picture, and what helps whom."""
    found = [answer(LADDER, question, data.tables) for question in LADDER.questions[:2]]
    if not found[0].finding:
        return readme
    [(stem, caption)] = found[0].figures
    parts = [f"## From the assignment's step to the hardware's floor\n\n{found[0].finding}",
             f"![{caption}](figures/{stem}.png)", *[one.finding for one in found[1:] if one.finding]]
    return between(readme, LADDER_BEGIN, LADDER_END, "\n\n".join(parts) + "\n")


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

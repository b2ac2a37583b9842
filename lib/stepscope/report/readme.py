"""The README's table, made from the records."""
from stepscope.report.load import Data
from stepscope.say.selections import matrix
from stepscope.say.tables import markdown_table
from stepscope.studies.benchmark.printed import wall_table

TABLE_BEGIN, TABLE_END = "<!-- h200-table -->\n", "<!-- /h200-table -->"


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
    before, _, rest = readme.partition(TABLE_BEGIN)
    after = rest.partition(TABLE_END)[2]
    return f"{before}{TABLE_BEGIN}{caption}\n\n{markdown_table(table)}\n{TABLE_END}{after}"

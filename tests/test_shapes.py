"""Which rows of a table over all runs are compared."""
import pandas as pd
import pytest

from stepscope.report.shapes import PLAIN, largest, preferred, reference, select, steps_timed

ROWS = pd.DataFrame(
    [("tiny", 64, 4, "naive", 1.0), ("2.7B", 1024, 4, "naive", 5.0), ("2.7B", 512, 4, "naive", 4.0),
     ("small", 512, 4, "naive", 2.0), ("small", 512, 1, "naive", 3.0), ("2.7B", 512, 4, "sdpa", None),
     ("d64 f4 l1 h1", 512, 4, "naive", 6.0)],
    columns=["size", "context_length", "batch_size", "attention", "gpu_ms"])


def found(*program, **wanted):
    return select(ROWS, *program, **wanted).index.tolist()


def test_rows_come_by_size_then_context_and_a_shape_without_a_name_last():
    assert found() == [0, 4, 3, 2, 5, 1, 6]


def test_the_plain_program_is_of_the_common_batch_and_may_be_replaced():
    assert found(PLAIN) == [0, 3, 2, 1, 6], "columns that the table has not are not asked for"
    assert found(PLAIN, batch_size=1) == [4] and found(PLAIN, attention="sdpa") == [5]


def test_a_condition_is_a_value_a_list_or_a_function_of_what_is_left():
    assert found(attention=["sdpa"], size="2.7B") == [5]
    assert found(gpu_ms=pd.Series.notna, context_length=max) == [1]
    assert found(PLAIN, size=largest, context_length=reference) == [2]
    assert [reference(pd.Series(contexts)) for contexts in ([64, 512, 1024], [128, 1024, 64])] == [512, 1024], "else the longest"
    assert found(attention=preferred("flash"), gpu_ms=lambda ms: ms > 4) == [1, 6]


def test_the_steps_of_a_time_are_those_timed_and_where_unknown_those_asked_for():
    rows = pd.DataFrame({"run_id": ["a", "a", "b"], "steps": [3, None, None]})
    tables = {"runs": pd.DataFrame({"run_id": ["a"], "timed_steps": [10]})}
    assert steps_timed(tables, rows).fillna(-1).tolist() == [3, 10, -1]


def test_where_no_row_is_there_is_no_data():
    for wanted in ({"size": "xl"}, {"batch_size": 1, "context_length": 64}, {"nothing": 1}):
        with pytest.raises(LookupError):
            select(ROWS, **wanted)
    with pytest.raises(LookupError):
        select(ROWS.head(0))

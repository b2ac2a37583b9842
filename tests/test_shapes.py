"""Which rows of a table over all runs are compared."""

import pandas as pd
import pytest

from stepscope.report.shapes import (
    PLAIN,
    SHAPE,
    by_size,
    largest,
    most_common,
    preferred,
    reference,
    select,
)

ROWS = pd.DataFrame(
    [
        ("tiny", 64, 4, "naive", 1.0),
        ("2.7B", 1024, 4, "naive", 5.0),
        ("2.7B", 512, 4, "naive", 4.0),
        ("small", 512, 4, "naive", 2.0),
        ("small", 512, 1, "naive", 3.0),
        ("2.7B", 512, 4, "sdpa", None),
        ("d64 f4 l1 h1", 512, 4, "naive", 6.0),
    ],
    columns=["size", "context_length", "batch_size", "attention", "gpu_ms"],
)


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
    assert [reference(pd.Series(contexts)) for contexts in ([64, 512, 1024], [128, 1024, 64])] == [
        512,
        1024,
    ], "else the longest"
    assert found(attention=preferred("flash"), gpu_ms=lambda ms: ms > 4) == [1, 6]


def test_where_no_row_is_there_is_no_data():
    for wanted in ({"size": "xl"}, {"batch_size": 1, "context_length": 64}, {"nothing": 1}):
        with pytest.raises(LookupError):
            select(ROWS, **wanted)
    with pytest.raises(LookupError):
        select(ROWS.head(0))


def test_of_two_as_common_the_greater_and_of_sizes_the_largest_with_a_name():
    assert [most_common(pd.Series(values)) for values in ([8, 4, 8, 4, 1], [1, 1, 8], [2])] == [8, 1, 2]
    assert [
        largest(pd.Series(sizes))
        for sizes in (["xl", "2.7B", "small", "d9 f9 l9 h9"], ["medium", "xl", "large"], ["d9 f9 l9 h9"])
    ] == ["2.7B", "xl", "d9 f9 l9 h9"]
    assert {"batch_size": most_common, "vocab_size": most_common} == SHAPE


def test_a_pivots_rows_keep_their_order_and_its_columns_that_of_their_names():
    rows = pd.DataFrame(
        [("xl", 1024, "step", 1.0), ("small", 512, "step", 2.0), ("xl", 512, "step", 3.0)],
        columns=["size", "context_length", "mode", "ms"],
    )
    found = by_size(rows, "context_length", "ms")
    assert (
        found.index.tolist() == ["xl", "small"]
        and found.columns.tolist() == ["512", "1,024"]
        and found.columns.name is None
    )
    assert found.loc["xl"].tolist() == [3.0, 1.0] and found.loc["small", "512"] == 2.0
    modes = rows.assign(mode=["step", "forward", "forward"])
    assert by_size(modes, "mode", "ms", {"step": "full step", "never": "none", "forward": "first"}).loc[
        "xl"
    ].to_dict() == {"full step": 1.0, "first": 3.0}
    assert [*by_size(modes, "mode", "ms", {"step": "full step", "forward": "first"})] == [
        "full step",
        "first",
    ]

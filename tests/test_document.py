"""Test templates that print views: lookups, filters, errors with line numbers, and false sentences."""

from pathlib import Path

import pandas as pd
import pytest

from stepscope.report.document import EACH, Document, DocumentError, row, rows, table, wide

KEY = ["size", "mode"]


@pytest.fixture
def view() -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "size": ["small", "small", "large"],
            "mode": ["forward", "step", "step"],
            "wall_ms": [20.0, 58.95, 300.0],
            "busy": [0.5, 0.951, None],
            "launch_bound": [True, False, False],
        }
    )
    frame.attrs = {"key": KEY, "unnamed": KEY}
    return frame


@pytest.fixture
def rendered(tmp_path, view):
    """Return a function that renders a template over the view ``times`` and returns its text or its error."""

    def render(text: str, **names: object) -> str:
        folder = tmp_path / "writeup"
        folder.mkdir(exist_ok=True)
        (folder / "01-chapter.md.j2").write_text(text)
        document = Document(
            folder, {"times": view, **names}, {"bars": lambda title, *frames: f"<svg {title}>"}
        )
        made = document.render("01-chapter.md.j2")
        try:
            document.check()
        except DocumentError as error:
            return str(error)
        return made

    return render


# -- lookups --------------------------------------------------------------------------------------------------


def test_rows_match_the_lookup_values(view):
    assert [*rows(view, mode="step")["wall_ms"]] == [58.95, 300.0]
    assert [*rows(view, size=["small", "2.7B"], mode=EACH)["wall_ms"]] == [20.0, 58.95]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"siz": "small"}, "no column 'siz'; available columns include size"),
        ({"size": "2.7B"}, "no row has size='2.7B'; the rows selected so far have 'small', 'large'"),
        (
            {"size": "large", "mode": "forward"},
            "no row has mode='forward'; the rows selected so far have 'step'",
        ),
    ],
)
def test_lookup_error_lists_the_known_values(view, values, words):
    with pytest.raises(LookupError) as error:
        rows(view, **values)
    assert str(error.value) == words


def test_row_rejects_several_matching_rows(view):
    with pytest.raises(
        LookupError, match=r"2 rows have .*, but expected one row; they differ in size, wall_ms, busy$"
    ):
        row(view, mode="step")


def test_wide_table_keeps_the_order_of_the_view(view):
    turned = wide(view, "mode", "size", "wall_ms")
    assert [*turned.columns] == ["small", "large"] and [*turned.index] == ["forward", "step"]
    assert turned.loc["step", "large"] == 300.0


def test_wide_table_rejects_two_rows_per_cell(view):
    with pytest.raises(
        LookupError, match="several rows have the same size and launch_bound; they differ in mode"
    ):
        wide(view.assign(launch_bound=True), "size", "launch_bound", "wall_ms")


def test_table_prints_headings_with_units_and_dashes(view):
    assert table(view, "size", "wall_ms", "busy: busy, %").splitlines() == [
        "| size | wall, ms | busy |",
        "| :-- | --: | --: |",
        "| small | 20.0 | 50% |",
        "| small | 59.0 | 95% |",
        "| large | 300 | – |",
    ]


@pytest.mark.parametrize(
    ("change", "columns", "words"),
    [
        ({}, ["wall"], "no column 'wall'"),
        ({"busy": None}, ["size", "busy"], "the table's column 'busy' is empty"),
    ],
)
def test_table_rejects_missing_or_empty_columns(view, change, columns, words):
    with pytest.raises(LookupError, match=words):
        table(view.assign(**change), *columns)


def test_table_rejects_views_without_rows(view):
    with pytest.raises(LookupError, match="no rows"):
        table(view.iloc[:0], "size")


# -- in templates ---------------------------------------------------------------------------------------------


def test_column_takes_precedence_over_a_pandas_attribute(rendered):
    """Otherwise, ``row.size`` would silently be the number of columns, and ``row.mode`` would be a method."""
    text = (
        '{% set step = row(times, size="large") %}{{ step.size }}, {{ step.mode }}; {{ times.size|listed }}'
    )
    assert rendered(text) == "large, step; small, small and large"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("58.95|ms", "59.0 ms"),
        ("0.951|percent", "95%"),
        ("1.037|more", "3.7%"),
        ("0.5|less", "50%"),
        ('times.wall_ms|span("ms")', "20.0 ms to 300 ms"),
        ('rows(times, size="large", mode=each).wall_ms|span("ms")', "300 ms"),
        ('["a", "b", "c"]|listed', "a, b and c"),
        ('"a*b"|escaped', "a\\*b"),
        ("3413607680|billion", "3.41 billion"),
    ],
)
def test_filters_print_numbers_with_units(rendered, expression, text):
    setup = "{% set times = rows(times, size=each, mode=each) %}"
    assert rendered(f"{setup}{{{{ {expression} }}}}") == text


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("times.wall_ms|ms", "LookupError: got 3 numbers, but expected one"),
        ("(0.5 - 0.6)|percent", "ValueError: got -10%, but a number in a sentence must be at least 0"),
        ('row(times, size="large").busy|percent', "LookupError: the number is missing"),
        (
            'row(times, size="large").bussy|percent',
            "LookupError: no column 'bussy'; available columns include busy",
        ),
        ("times.wal_ms|ms", "LookupError: no column 'wal_ms'; available columns include wall_ms"),
        ("timez.wall_ms|ms", "UndefinedError: 'timez' is undefined"),
        ("times.wall_ms.max()|ms", "this reduces rows that differ in size, mode to one number"),
        ('times.wall_ms|span("ms")', "this reduces rows that differ in size, mode to one number"),
        ('rows(times, size="small").wall_ms.min()|ms', "write mode=each"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_template_error_names_line_and_sentence(rendered, expression, words):
    sentence = f"It takes {{{{ {expression} }}}} here."
    error = rendered(f"A sentence.\nAnother one.\n{sentence}\n")
    first, second = error.splitlines()
    assert first.startswith("writeup/01-chapter.md.j2:3: ") and words in first
    assert second == f"    {sentence}"


def test_syntax_error_names_its_line(rendered):
    assert rendered("A sentence.\n{{ 1 + }}\n").startswith("writeup/01-chapter.md.j2:2: ")


def test_true_condition_prints_nothing(rendered):
    assert rendered("It is fast.{{ holds(20 < 30) }}\n") == "It is fast.\n"


def test_false_sentences_are_listed_with_their_numbers(rendered):
    step = '{% set step = row(times, size="small", mode="step") %}'
    error = rendered(
        f"{step}\nIt takes {{{{ step.wall_ms|ms }}}}, too long.{{{{ holds(step.wall_ms > 60) }}}}\n"
        "This is true.{{ holds(step.busy < 1) }}\n"
        "It waits.{{ holds(step.launch_bound) }}\n"
        "Both.{{ holds(step.busy > 0.9 and step.wall_ms < 50) }}\n"
    )
    assert error.split("\n\n") == [
        "writeup/01-chapter.md.j2:2: no longer true (59.0 vs. 60)\n    It takes 59.0 ms, too long.",
        "writeup/01-chapter.md.j2:4: no longer true\n    It waits.",
        "writeup/01-chapter.md.j2:5: no longer true (0.951 vs. 0.900; 59.0 vs. 50)\n    Both.",
    ]


def test_failing_lookup_stops_only_its_template(tmp_path, view):
    (tmp_path / "1.md.j2").write_text("{{ times.nothing }}\n{{ holds(false) }}\n")
    (tmp_path / "2.md.j2").write_text("False.{{ holds(1 > 2) }}\n")
    document = Document(tmp_path, {"times": view}, {})
    assert document.render("1.md.j2") == ""
    document.render("2.md.j2")
    with pytest.raises(DocumentError) as error:
        document.check()
    assert [part.partition(":")[0] for part in str(error.value).split("\n\n")] == [
        f"{tmp_path.name}/1.md.j2",
        f"{tmp_path.name}/2.md.j2",
    ]


def test_figure_is_stored_under_its_name(tmp_path, view):
    (tmp_path / "1.md.j2").write_text(
        '{{ figure("bars", "Two bars", times) }} {{ figure("bars", "B", name="b") }}'
    )
    document = Document(tmp_path, {"times": view}, {"bars": lambda title, *frames: f"{title}{len(frames)}"})
    assert document.render("1.md.j2") == "![Two bars](figures/bars.svg) ![B](figures/b.svg)"
    assert document.figures == {"bars": "Two bars1", "b": "B0"}


def test_views_are_computed_only_when_a_template_uses_them(tmp_path: Path):
    class Lazy(dict):
        made: list[str]

        def __getitem__(self, name: str) -> object:
            self.made.append(name)
            return super().__getitem__(name)

    views = Lazy(used=1, unused=2)
    views.made = []
    (tmp_path / "1.md.j2").write_text("{{ used }}")
    assert Document(tmp_path, views, {}).render("1.md.j2") == "1"
    assert views.made == ["used"]

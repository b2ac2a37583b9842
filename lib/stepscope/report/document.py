"""Render a document from Jinja2 templates, whose numbers are cells of views.

    {% set big = rows(steps, size="2.7B", context_length=512) %}
    A step takes {{ row(big, optimization="fp32").wall_ms|ms }}.{{ holds(big.wall_ms.max() < 2000) }}

A sentence that new data could make false ends with ``holds(condition)``. Templates have one sentence per line, so
that an error can name the sentence by its template and line.
"""

import difflib
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from jinja2 import nodes

from stepscope import StepscopeError
from stepscope.report import tables as printing
from stepscope.views import Names, varying

# Methods of a column that reduce its rows to one value.
AGGREGATES = {
    "min",
    "max",
    "mean",
    "median",
    "sum",
    "std",
    "all",
    "any",
    "nunique",
    "idxmin",
    "idxmax",
    "count",
}
EACH = object()  # rows(view, size=each) names a field but keeps all of its values


class DocumentError(StepscopeError):
    """Raised when a document can't be rendered; the message names each faulty template, line and sentence."""

    has_lines = True


# -- lookups --------------------------------------------------------------------------------------------------


def rows(view: pd.DataFrame, **values: object) -> pd.DataFrame:
    """Return the rows with the given values, and check that there is at least one.

    Args:
        values: for each column, a value, a list of allowed values, or ``each`` to allow all values.

    Raises:
        LookupError: If a column doesn't exist, or no row matches.
    """
    chosen = pd.Series(True, view.index)
    for column, value in values.items():
        if column not in view:
            raise LookupError(_no_column(column, view.columns))
        if value is EACH:
            continue
        before = chosen
        chosen = before & view[column].isin(value if isinstance(value, list) else [value])
        if not chosen.any():
            present = ", ".join(map(repr, dict.fromkeys(view.loc[before, column].tolist())))
            raise LookupError(f"no row has {column}={value!r}; the rows selected so far have {present}")
    selected = view[chosen]
    unnamed = varying(selected, [name for name in view.attrs.get("unnamed", []) if name not in values])
    selected.attrs = view.attrs | {"unnamed": Names(unnamed)}
    return selected


def row(view: pd.DataFrame, **values: object) -> pd.Series:
    """Return the only row with the given values.

    Raises:
        LookupError: If no row matches, or several rows match.
    """
    selected = rows(view, **values)
    if len(selected) > 1:
        differ = [name for name in selected if selected[name].astype(str).nunique(dropna=False) > 1]
        raise LookupError(
            f"{len(selected)} rows have {values}, but expected one row; they differ in {', '.join(differ[:8])}"
        )
    return selected.iloc[0]


def wide(view: pd.DataFrame, index: str, columns: str, values: str) -> pd.DataFrame:
    """Return a table with one column per value of ``columns``, in the view's order.

    Raises:
        LookupError: If two rows belong in the same cell.
    """
    if view.duplicated([index, columns]).any():
        other_columns = varying(
            view, [name for name in view.attrs.get("key", []) if name not in (index, columns)]
        )
        raise LookupError(
            f"several rows have the same {index} and {columns}; they differ in {', '.join(other_columns)}"
        )
    turned = view.pivot(index=index, columns=columns, values=values)
    turned = turned.reindex(index=view[index].unique(), columns=view[columns].unique())
    return turned.rename_axis(columns=None)


def table(
    view: pd.DataFrame,
    *columns: str,
    unit: str = "",
    rows: int = 60,
    drop_empty: bool = False,
) -> str:
    """Format a table as markdown.

    Args:
        columns: "name" or "name: heading, unit"; if none are given, all columns are included.
        unit: the unit of numbers whose heading doesn't contain a unit.
        rows: the maximum number of rows to include.
        drop_empty: omit columns without values instead of raising an error.

    Raises:
        LookupError: If a column doesn't exist or is empty, or if the table has no rows.
    """
    headings = {}
    for column in columns:
        name, _, heading = column.partition(": ")
        headings[name] = heading
    indexed = view.reset_index() if any(view.index.names) else view
    unknown = [name for name in headings if name not in indexed]
    if unknown:
        raise LookupError(_no_column(unknown[0], indexed.columns))
    if indexed.empty:
        raise LookupError("the table has no rows")
    printed = indexed[[*headings]] if headings else indexed
    empty = [name for name in printed if printed[name].isna().all()]
    if empty and not drop_empty:
        raise LookupError(f"the table's column {empty[0]!r} is empty")
    printed = printed.drop(columns=empty)
    printed = printing.headed(printed.rename(columns={name: text for name, text in headings.items() if text}))
    return printing.markdown(printed, unit, rows)


def _no_column(name: str, columns: Iterable[object]) -> str:
    names = [str(column) for column in columns]
    near = difflib.get_close_matches(name, names, 3, 0.5) or names
    return f"no column {name!r}; available columns include {', '.join(near)}"


# -- filters --------------------------------------------------------------------------------------------------


def _formatter(unit: str) -> Callable[[Any], str]:
    def formatted(value: Any) -> str:
        if isinstance(value, (pd.Series, pd.DataFrame)):
            raise LookupError(f"got {len(value)} numbers, but expected one; use row(...), .min() or |span")
        if printing.missing(value):
            raise LookupError("the number is missing (not measured, or too small to report)")
        if value < 0:
            raise ValueError(
                f"got {printing.number(value, unit)}, but a number in a sentence must be at least 0"
            )
        return printing.number(value, unit)

    return formatted


def span(values: pd.Series, name: str) -> str:
    """Format the smallest and the largest value with the named filter, for example as "0.98x to 1.00x"."""
    _require_named(values)
    ends = [FILTERS[name](end) for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))


UNIT_FILTERS = {
    "ms": "ms",
    "s": "s",
    "h": "h",
    "us": "us",
    "B": "B",
    "MiB": "MiB",
    "GiB": "GiB",
    "MHz": "MHz",
    "W": "W",
    "J": "J",
    "kWh": "kWh",
    "nats": "nats",
    "n": "n",
    "x": "x",
    "percent": "%",
    "billion": "billion",
    "tokens_s": "tokens/s",
    "tflops": "TFLOP/s",
    "gb_s": "GB/s",
    "tb_s": "TB/s",
}
FILTERS: dict[str, Callable[..., str]] = {name: _formatter(unit) for name, unit in UNIT_FILTERS.items()}
FILTERS |= {
    "more": lambda ratio: FILTERS["percent"](ratio - 1),  # 1.037 is "3.7%" more
    "less": lambda ratio: FILTERS["percent"](1 - ratio),
    "span": span,
    "listed": lambda words: printing.listed([*words]),
    "escaped": printing.escape,
}


# -- rendering ------------------------------------------------------------------------------------------------


def _require_named(values: pd.Series) -> None:
    """Raise a LookupError if values to be reduced to one number differ in a key field that no lookup names."""
    if unnamed := values.attrs.get("unnamed"):
        raise LookupError(
            f"this reduces rows that differ in {', '.join(unnamed)} to one number, but the lookup doesn't name"
            f" {unnamed[0]}; choose its values, or write {unnamed[0]}=each"
        )


class _Context(jinja2.runtime.Context):
    """The names that a template can use; a view is computed only when the template uses its name."""

    def resolve_or_missing(self, key: str) -> Any:
        value = super().resolve_or_missing(key)
        views = self.environment.views  # type: ignore[attr-defined]
        return views[key] if value is jinja2.runtime.missing and key in views else value


class _Environment(jinja2.Environment):
    """A Jinja2 environment for templates over views.

    A column takes precedence over a pandas attribute with the same name (``row.size``, ``row.mode``). A call to
    ``holds`` also receives its line number, and the numbers that its condition compares.
    """

    context_class = _Context
    views: Mapping[str, Any]

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, pd.DataFrame) and attribute in obj.columns:
            return obj[attribute]
        if isinstance(obj, pd.Series) and attribute in obj.index:
            return obj[attribute]
        if isinstance(obj, pd.Series) and attribute in AGGREGATES:
            _require_named(obj)
        value = super().getattr(obj, attribute)
        if isinstance(value, jinja2.Undefined) and isinstance(obj, (pd.DataFrame, pd.Series)):
            raise LookupError(
                _no_column(attribute, obj.columns if isinstance(obj, pd.DataFrame) else obj.index)
            )
        return value

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for call in [*source.find_all(nodes.Call)]:
            if getattr(call.node, "name", "") == "holds":
                call.args += [
                    nodes.List(_comparisons(call.args[0])),
                    nodes.Const(name),
                    nodes.Const(call.lineno),
                ]
        return super()._generate(source, name, filename, defer_init=defer_init)


def _comparisons(condition: nodes.Expr) -> list[nodes.Expr]:
    """Return both sides of each comparison in a condition."""
    compared = [*condition.find_all(nodes.Compare)]
    if isinstance(condition, nodes.Compare):
        compared.insert(0, condition)
    return [
        nodes.List([comparison.expr, *(operand.expr for operand in comparison.ops)])
        for comparison in compared
    ]


class Document:
    """A folder's templates, the views in which they look up numbers, and the errors and figures from rendering."""

    def __init__(
        self, folder: Path, views: Mapping[str, Any], figures: Mapping[str, Callable[..., str]]
    ) -> None:
        """Prepare the templates.

        Args:
            folder: the folder that contains the templates, ``*.md.j2``.
            views: views, facts and texts that templates look up by name.
            figures: functions, by name, that take a title and frames and return an SVG.
        """
        self.folder = folder
        self.figures: dict[str, str] = {}
        self._drawings = figures
        self._false: list[str] = []
        self._errors: list[str] = []
        self._environment = _Environment(
            loader=jinja2.FileSystemLoader(folder),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self._environment.filters |= FILTERS
        self._environment.views = views
        self._environment.globals |= {
            "holds": self._holds,
            "row": row,
            "rows": rows,
            "each": EACH,
            "wide": wide,
            "table": table,
            "figure": self._figure,
            "number": printing.number,
        }

    def render(self, name: str) -> str:
        """Return a template's text; errors are collected for :meth:`check`."""
        try:
            text = self._environment.get_template(name).render()
        except jinja2.TemplateSyntaxError as error:
            self._errors.append(self._at(name, error.lineno, error.message or "syntax error"))
            return ""
        except Exception as error:  # noqa: BLE001 any expression may fail; the deepest .j2 frame has its line
            frames = [
                frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".j2")
            ]
            line = frames[-1].lineno if frames else 1
            self._errors.append(self._at(name, line or 1, f"{type(error).__name__}: {error}"))
            return ""
        for rendered in text.splitlines():
            for mark in re.findall("\0(\\d+)\0", rendered):
                sentence = re.sub("\0\\d+\0", "", rendered).strip()
                self._false[int(mark)] += f"\n    {sentence}"
        return text

    def check(self) -> None:
        """Check that no template has failed so far.

        Raises:
            DocumentError: If a template failed or a sentence no longer holds; the message names each such
                sentence, and the first failure of each template.
        """
        if self._errors or self._false:
            raise DocumentError("\n\n".join([*self._errors, *self._false]))

    def _holds(self, condition: Any, sides: list, name: str, line: int) -> str:
        """Return "" if the condition is true, and otherwise a mark by which the rendered sentence is found."""
        if bool(condition):
            return ""
        compared = "; ".join(" vs. ".join(_shown(value) for value in side) for side in sides)
        why = f"no longer true ({compared})" if compared else "no longer true"
        self._false.append(f"{self.folder.name}/{name}:{line}: {why}")
        return f"\0{len(self._false) - 1}\0"

    def _figure(
        self, kind: str, title: str, *frames: pd.DataFrame, name: str = "", folder: str = "figures"
    ) -> str:
        drawn_title = title.replace("\\_", "_")  # the title is markdown, in which a field's name is escaped
        self.figures[name or kind] = self._drawings[kind](drawn_title, *frames)
        return f"![{title}]({folder}/{name or kind}.svg)"

    def _at(self, name: str, line: int, why: str) -> str:
        lines = (self.folder / name).read_text("utf-8").splitlines()
        sentence = lines[line - 1].strip() if line <= len(lines) else ""
        return f"{self.folder.name}/{name}:{line}: {why}\n    {sentence}"


def _shown(value: Any) -> str:
    if isinstance(value, pd.Series):
        return ", ".join(_shown(item) for item in value)
    return printing.digits(value) if isinstance(value, float) else str(value)

"""Test that the writeup's templates follow the rules and print the correct units."""

import re
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes

from stepscope import PROJECT
from stepscope.report.document import UNIT_FILTERS
from stepscope.views import all_views, unit_of

if PROJECT is None:
    pytest.skip("not in a checkout", allow_module_level=True)
TEMPLATES = sorted(Path(str(PROJECT), "writeup").rglob("*.md.j2"))
FORBIDDEN = (nodes.If, nodes.For, nodes.Macro, nodes.CondExpr, nodes.CallBlock)
ARITHMETIC = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.Pow, nodes.Mod, nodes.FloorDiv)
MAX_SETS = 16
NO_UNIT = {"n", "billion", "x"}  # filters for counts and for ratios computed in templates


def expressions(tree: nodes.Template) -> list[nodes.Expr]:
    """Return the expressions that a template prints, excluding ``holds`` calls."""
    printed = []
    for output in tree.find_all(nodes.Output):
        for expression in output.nodes:
            is_holds = isinstance(expression, nodes.Call) and getattr(expression.node, "name", "") == "holds"
            if not isinstance(expression, nodes.TemplateData) and not is_holds:
                printed.append(expression)
    return printed


def operators(expression: nodes.Expr) -> int:
    inner = [*expression.find_all(ARITHMETIC)]
    return len(inner) + isinstance(expression, ARITHMETIC)


def broken_rules(text: str) -> list[tuple[int, str]]:
    """Return the line number of each rule violation in a template, and the reason for the violation."""
    tree = jinja2.Environment().parse(text)
    found = [
        (node.lineno, f"a {type(node).__name__}, which belongs into a view")
        for node in tree.find_all(FORBIDDEN)
    ]
    sets = [node.lineno for node in tree.find_all((nodes.Assign, nodes.AssignBlock))]
    if len(sets) > MAX_SETS:
        found.append((sets[-1], f"{len(sets)} set lines, but expected at most {MAX_SETS}"))
    for expression in expressions(tree):
        if operators(expression) > 1:
            found.append((expression.lineno, "two operators, which belong into a column of a view or a fact"))
    return found + crowded_lines(text)


def crowded_lines(text: str) -> list[tuple[int, str]]:
    """Return the line number of each prose line with more than one sentence, and the reason."""
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        prose = re.sub(r"\{[{%].*?[%}]\}|`[^`]*`|\([^()]*\)|\*\*[^*]+\*\*", "x", line)
        is_prose = not fenced and not line.startswith(("{%", "|", ">", "<"))
        if is_prose and re.search(r"(?<!\d)[.?!] +[A-Z\"]", prose):
            found.append((number, "two sentences on one line"))
    return found


def wrong_units(text: str) -> list[tuple[int, str]]:
    """Return the line number and a description of each column that is printed in a unit other than its own."""
    found = []
    for node in jinja2.Environment().parse(text).find_all(nodes.Filter):
        name = node.name
        if name == "span" and node.args and isinstance(node.args[0], nodes.Const):
            name = node.args[0].value
        column = printed_column(node.node)
        if not column or name not in UNIT_FILTERS or name in NO_UNIT:
            continue
        unit = unit_of(column)
        if unit != UNIT_FILTERS[name]:
            found.append(
                (node.lineno, f"column {column} has the unit {unit or 'none'!r}, but is printed by |{name}")
            )
    return found


def printed_column(node: nodes.Expr | None) -> str:
    """Return the column that an expression prints, directly or with a call such as ``.min()``.

    If the expression doesn't print a column, return "".
    """
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        return printed_column(node.node.node)
    return node.attr if isinstance(node, nodes.Getattr) else ""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_template_follows_the_rules(path: Path):
    text = path.read_text(encoding="utf-8")
    problems = broken_rules(text) + wrong_units(text)
    assert not [f"{path.name}:{line}: {why}" for line, why in sorted(problems)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% if a %}x{% endif %}", "a If"),
        ("{% for a in b %}x{% endfor %}", "a For"),
        ("{{ 1 if a else 2 }}", "a CondExpr"),
        ("{{ (a + b - c)|ms }}", "two operators"),
        ("One sentence. Another one.", "two sentences"),
        ("{{ a.wall_ms|GiB }}", "the unit 'ms'"),
        ("{{ a.wall_ms|span('us') }}", "the unit 'ms'"),
        ("{{ a.wall_ms.max()|s }}", "the unit 'ms'"),
        ("{% set a = 1 %}" * 17, "17 set lines"),
    ],
)
def test_planted_rule_violation_is_reported(text: str, why: str):
    assert [reason for _, reason in broken_rules(text) + wrong_units(text) if why in reason]


def test_view_key_contains_every_configuration_field():
    """The key may lack only fields that the view joins or omits; the view declares them in ``over``."""
    lacking = {
        name: [field for field in view.config if field not in (*view.key, *view.over)]
        for name, view in all_views().items()
    }
    assert not {name: fields for name, fields in lacking.items() if fields}

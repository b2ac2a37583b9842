"""Test that reports never render text from untrusted records as markup, and that no table makes a report fail."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from pandera.errors import SchemaError, SchemaErrors

from stepscope.report import machine
from stepscope.report.load import read
from stepscope.report.output import Report
from stepscope.report.runs_list import runs_page
from stepscope.report.schemas import number_column, table_schema, text_column
from stepscope.report.tables import escape
from stepscope.runs.store import Store
from test_machine_report import FOLDERS, copy_runs

MARKUP = [
    "<script>alert(1)</script>",
    "<a href=//x style=position:fixed;inset:0 onclick=alert(1)>x</a>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    "| a | b |\n|--|--|\n| <b>c</b> | d |",
    "https://evil.example www.evil.example a@evil.example mailto:a@evil.example",
    "`<b>` **bold** ~~gone~~ $x$ &lt;b&gt; &#60;b&#62;",
    "</details></table><h1>x",
    "{{ 7 * 7 }}{% set x = 1 %}{size}${title}",
    "<!-- /story -->",
    "\u202eevil\x00\x01\x02\x1b[31m",
    "# heading\n\n> quote\n\n1. list",
    "x" * 5000,
    "\\",
    "-",
    "",
]
CONTEXTS = ("{}", "| {} |\n| -- |\n| {} |", "# {}", "A {} goes on.", "![{}](figures/x.svg)", "* {}")
TAGS = re.compile(
    "html|head|meta|title|style|body|header|main|footer|nav|ul|ol|li|a|section|details|summary|h[123]|p|strong|em"
    "|code|pre|img|figure|div|table|thead|tbody|tr|th|td|hr|br|blockquote"
)
ATTRIBUTES = re.compile(
    "lang|charset|http-equiv|content|name|aria-label|class|id|href|src|alt|width|height|role|tabindex|scope|start"
)
LINK = re.compile(
    r"#[\w-]*$|[\w./+-]+(#[\w-]+)?$|data:image/svg\+xml,"
    r"|https://(pytorch|docs\.|github\.com|arxiv\.org/abs/|cs336\.stanford\.edu$)"
)
# folds are the only HTML in our Markdown
OUR_HTML = re.compile(r"<details><summary>[^<]*</summary>\n*|</details>\n*")
TEXTS = ("name", "reason", "line", "source", "tensor", "region", "kernel")
GITHUB = MarkdownIt("gfm-like", {"html": True, "linkify": False}).enable("table")


class Foreign(HTMLParser):
    """An HTML parser that collects elements, attributes and links that our own pages never contain."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not TAGS.fullmatch(tag):
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            leads_out = name in ("href", "src") and not LINK.match(value or "")
            if not ATTRIBUTES.fullmatch(name) or leads_out:
                self.found.append(f"<{tag} {name}={(value or '')[:60]!r}>")

    def handle_comment(self, data: str) -> None:
        self.found.append(f"<!--{data}")


def rendered_markup(report: Report) -> list[str]:
    """Return the planted markup that a browser or GitHub would render or load."""
    found = []
    for name, text in report.texts.items():
        if name.endswith(".html"):
            found += Foreign(text).found
        elif name.endswith(".md"):
            found += [f"{name}: {one}" for one in markup_on_github(text)]
    return found


def markup_on_github(text: str) -> list[str]:
    tokens = [inner for token in GITHUB.parse(text) for inner in [token, *(token.children or [])]]
    html = [one.content for one in tokens if one.type in ("html_block", "html_inline")]
    targets = [str(one.attrGet("href") or one.attrGet("src") or "") for one in tokens]
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [
        *(one[:80] for one in html if not OUR_HTML.fullmatch(one)),
        *(one for one in targets if one and not LINK.match(one)),
        *re.findall(r"(?i)(?:https?://|\bwww\.|@)evil\.example", prose),
    ]


@pytest.fixture
def runs(tmp_path) -> Path:
    """Return a runs folder with a copy of one run of each study; tests may change the copies."""
    return copy_runs(tmp_path / "runs", *FOLDERS["tour"])


def folders(runs: Path) -> list[Path]:
    return sorted(path.parent for path in runs.glob("*/*/record.json"))


def change_record(run: Path, change: Callable[[dict], object]) -> None:
    record = json.loads((run / "record.json").read_text())
    change(record)
    (run / "record.json").write_text(json.dumps(record))


def change_table(run: Path, table: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change a run's table, and update the table's digest in the run's record."""
    file = run / f"{table}.parquet"
    change(pd.read_parquet(file)).to_parquet(file, index=False)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    change_record(run, lambda record: record["tables"][table].update(sha256=digest))


def reported(runs: Path) -> Report:
    """Return a folder's report, including the list of runs as an additional page."""
    found = read(Store(runs))
    report = machine.compose(found, runs, runs / "out")
    report.texts["evidence/runs.md"] = runs_page(found, runs, runs / "out" / "evidence")
    return report


@pytest.mark.parametrize("text", MARKUP)
def test_escape_returns_one_line_without_markup(text):
    escaped = escape(text)
    assert "\n" not in escaped and len(escaped) < 500
    for context in CONTEXTS:
        types = []
        for inner in (escaped, "word"):
            tokens = GITHUB.parse(context.replace("{}", inner))
            types.append({one.type for token in tokens for one in [token, *(token.children or [])]})
        assert types[0] - {"text_special", "softbreak"} <= types[1] | {"text"}, context


def test_rendered_markup_finds_planted_markup():
    """If ``rendered_markup`` missed planted markup, the tests below could never fail."""
    for text in (*MARKUP[:3], MARKUP[4]):
        assert rendered_markup(Report({"report.md": text})), text
    assert rendered_markup(Report({"report.html": MARKUP[1]}))


def test_record_texts_are_not_rendered_as_markup(runs):
    for place, run in enumerate(folders(runs)):

        def spoil(record: dict, place: int = place) -> None:
            record["results"]["finding"] = MARKUP[place]
            record["machine"] |= {"device_name": MARKUP[1], "cpu": MARKUP[1]}
            record["software"] |= {"torch": MARKUP[1], "driver": MARKUP[2]}
            if place == 2:
                record |= {"status": "failed", "cause": MARKUP[1], "tables": {}}

        change_record(run, spoil)
    report = reported(runs)
    assert not report.errors and not rendered_markup(report)
    assert "onclick" in report.texts["report.md"] and "onclick" in report.texts["evidence/runs.md"]


def test_hostile_device_names_are_not_rendered_as_markup(runs):
    for run, name in zip(folders(runs), MARKUP):
        change_record(run, lambda record, name=name: record["machine"].update(device_name=name))
    assert not rendered_markup(reported(runs))


@pytest.mark.parametrize("first", [0, 8])
def test_table_texts_are_not_rendered_as_markup(runs, first):
    for file in sorted(runs.glob("*/*/*.parquet")):

        def spoil(table: pd.DataFrame) -> pd.DataFrame:
            texts = [f"{MARKUP[(first + n) % len(MARKUP)]}{n}" for n in range(len(table))]
            return table.assign(**dict.fromkeys({*TEXTS} & {*table}, texts))

        change_table(file.parent, file.stem, spoil)
    assert not rendered_markup(reported(runs))


def test_errors_do_not_render_markup_from_unusable_runs(runs):
    first, *others = sorted(folders(runs), key=lambda run: run.parent.name != "benchmark")
    hostile = first.parent / "<b onclick=alert(1)>"
    hostile.mkdir()
    (hostile / "record.json").write_text("{")
    changes = [
        lambda record: record["config"].update(size=MARKUP[1]),
        lambda record: record.update(beside=[MARKUP[1]]),
        lambda record: record["results"].update({MARKUP[2]: [1]}),
        lambda record: record.update(study=MARKUP[0]),
    ]
    for run, change in zip(others[1:], changes):  # one run remains unchanged
        change_record(run, change)
    change_table(first, "times", lambda table: table.rename(columns={"wall_ms": MARKUP[1]}))
    report = reported(runs)
    assert len(report.errors) == 2 + len(changes)
    assert all("\n" not in error for error in report.errors)
    assert not rendered_markup(report)
    assert "## Omitted" in report.texts["evidence/runs.md"]


def changed_columns(table: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield copies of the table with one changed column, as pairs of the change's name and the copy."""
    yield "text", table.assign(**{column: "<b>x</b>"})
    yield "nothing", table.assign(**{column: None})
    yield "no number", table.assign(**{column: np.nan})
    yield "lists", table.assign(**{column: [[1, 2]] * len(table)})
    yield "missing", table.drop(columns=column)
    for name, value in {"zero": 0, "negative": -1, "infinite": np.inf, "huge": 1e300}.items():
        yield name, table.assign(**{column: value})
    yield "reversed", table.assign(**{column: table[column].to_numpy()[::-1]})


def test_report_survives_wrong_or_extreme_columns(runs):
    files = [(path, pd.read_parquet(path)) for path in sorted(runs.glob("*/*/*.parquet"))]
    every = [(path.parent, path.stem, column) for path, table in files if len(table) for column in table]
    chosen = random.Random(0).sample(every, 4)
    for number, (run, table, column) in enumerate(chosen):
        kept = {path: path.read_bytes() for path in (run / f"{table}.parquet", run / "record.json")}
        changes = [*changed_columns(pd.read_parquet(run / f"{table}.parquet"), column)]
        changed = changes[number % len(changes)][1]
        change_table(run, table, lambda _, changed=changed: changed)
        report = reported(runs)
        assert "report.md" in report.texts and not rendered_markup(report)
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.parametrize(
    "other",
    [
        {"ms": [1.0, -1.0]},
        {"ms": [1.0, 1e16]},
        {"ms": [1.0, np.inf]},
        {"ms": ["x", "y"]},
        {"mode": ["step", "x"]},
        {"mode": ["step", "step"]},
        {"beside": [1, 2]},
    ],
)
def test_schema_rejects_impossible_values_and_repeated_keys(other):
    schema = table_schema(("mode",), mode=text_column("step", "forward"), ms=number_column())
    accepted = {"mode": ["step", "forward"], "ms": [1.0, np.nan]}
    schema.validate(pd.DataFrame(accepted))
    with pytest.raises((SchemaError, SchemaErrors)):
        schema.validate(pd.DataFrame(accepted | other))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda times: times.assign(wall_ms="x"), "column 'wall_ms': coerce_dtype('float64') fails for 'x'"),
        (lambda times: times.drop(columns="wall_min_ms"), "column 'wall_min_ms' is missing"),
        (lambda times: pd.concat([times, times]), "several rows have the same key"),
    ],
)
def test_error_names_the_invalid_table_column(runs, change, words):
    run = next(run for run in folders(runs) if run.parent.name == "benchmark")
    change_table(run, "times", change)
    [error] = read(Store(runs)).errors
    assert words in error and run.name in error

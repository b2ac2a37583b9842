"""Records of anybody: nothing of them is alive in the report, and no table of theirs ends it."""

import hashlib
import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from pandera.errors import SchemaError, SchemaErrors

import reports
from stepscope.report import load as loading
from stepscope.report.claims import TAG, Renderer
from stepscope.report.load import read
from stepscope.report.render import CHAPTERS, render
from stepscope.report.schemas import measured, tidy, word
from stepscope.report.tables import escape
from stepscope.runs.store import Store

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
    "{{ 7 * 7 }}{% claim x %}{size}${title}",
    "<!-- /story -->",
    "\u202eevil\x00\x01\x02\x1b[31m",
    "# heading\n\n> quote\n\n1. list",
    "x" * 5000,
    "\\",
    "-",
    "",
]
TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "header",
    "main",
    "footer",
    "nav",
    "ul",
    "ol",
    "li",
    "a",
    "section",
    "details",
    "summary",
    "h1",
    "h2",
    "h3",
    "p",
    "strong",
    "em",
    "code",
    "pre",
    "img",
    "figure",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "hr",
    "br",
    "blockquote",
}
# The chapters' own folds as they begin and end on GitHub.
FOLDS = {
    f"<details><summary>{tag['name'].replace('_', ' ')}</summary>\n"
    for page in CHAPTERS.rglob("*.md")
    for tag in TAG.finditer(page.read_text())
    if tag["kind"] == "fold"
}
FOLD_END = "</details>\n"
ATTRIBUTES = {
    "lang",
    "charset",
    "http-equiv",
    "content",
    "name",
    "aria-label",
    "class",
    "id",
    "href",
    "src",
    "alt",
    "width",
    "height",
    "role",
    "tabindex",
    "scope",
    "start",
}


class Alive(HTMLParser):
    """What is in a page that no page of ours has."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in TAGS:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            link = name in ("href", "src") and not re.match(
                r"#[\w-]*$|[\w./+-]+$|data:image/svg\+xml,|https://(pytorch|docs\.|github\.com|arxiv\.org/abs/|cs336\.stanford\.edu$)",
                value or "",
            )
            if name not in ATTRIBUTES or link:
                self.found.append(f"<{tag} {name}={(value or '')[:60]!r}>")

    def handle_comment(self, data):
        self.found.append(f"<!--{data}")


def alive(report: Path) -> list[str]:
    """What a reader's browser or GitHub would do of a report beyond showing it."""
    found = Alive((report / "writeup.html").read_text()).found
    github = MarkdownIt("gfm-like", {"html": True, "linkify": False}).enable("table")
    for page in [*report.glob("*.md"), *report.glob("evidence/*.md")]:
        text, folds = page.read_text(), []
        for token in github.parse(text):
            if token.type == "html_block" and token.content in (*FOLDS, FOLD_END):
                folds.append(token.content)
                continue
            for inner in [token, *(token.children or [])]:
                target = str(inner.attrGet("href") or inner.attrGet("src") or "")
                outside = target and not re.match(
                    r"#|[\w./+-]+(#[\w-]+)?$|https://(pytorch|docs\.|github\.com)", target
                )
                if inner.type in ("html_block", "html_inline") or outside:
                    found.append(f"{page.name}: {inner.content[:60] or target[:60]}")
        if FOLD_END in folds[::2] or {*folds[1::2]} - {FOLD_END} or len(folds) % 2:
            found.append(f"{page.name}: {folds}")  # of ours, one after the other
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        found += [
            f"{page.name}: {link}" for link in re.findall(r"(?i)(?:https?://|\bwww\.|@)evil\.example", prose)
        ]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return reports.few(tmp_path_factory.mktemp("hostile") / "runs", 1)


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of those runs that a test may change."""
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def _runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/*/record.json"))


@pytest.mark.parametrize("text", MARKUP)
def test_escaped_text_does_nothing_and_is_one_line(text):
    said = escape(text)
    assert "\n" not in said and len(said) < 2 * 200 + 50
    for around in (
        "{}",
        "| {} |\n| -- |\n| {} |",
        "# {}",
        "A sentence {} goes on.",
        "![{}](figures/x.svg)",
        "* {}",
    ):
        tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(around.replace("{}", said))
        flat = [inner.type for token in tokens for inner in [token, *(token.children or [])]]
        plain = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(around.replace("{}", "word"))
        expected = {inner.type for token in plain for inner in [token, *(token.children or [])]}
        assert set(flat) - {"text_special", "softbreak"} <= expected | {"text"}, (around, said)


def test_what_records_say_is_shown_and_not_alive(copy, tmp_path):
    """Causes, findings, devices and failed runs' words, all of them markup."""
    for place, run in enumerate(_runs(copy)):

        def hostile(record: dict, place: int = place) -> None:
            record["results"] |= {"finding": MARKUP[place % len(MARKUP)]}
            record["machine"] |= {"device_name": MARKUP[(place + 1) % len(MARKUP)], "cpu": MARKUP[1]}
            record["software"] |= {"torch": MARKUP[1], "driver": MARKUP[2]}
            if place % 3 == 2:
                record |= {"status": "failed", "cause": MARKUP[1], "tables": {}}

        reports.change_record(run / "record.json", hostile)
    found = read(Store(copy))
    assert not found.errors and len(found.records) == len(_runs(copy))
    render(copy, tmp_path / "out")
    assert not alive(tmp_path / "out")
    assert "onclick" in (tmp_path / "out" / "evidence" / "runs.md").read_text()


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.trials) for first in (5, 11))])
def test_names_in_tables_are_shown_and_not_alive(copy, tmp_path, first):
    """Kernels, lines of code and reasons are texts of anybody."""
    for run in _runs(copy):
        for table in json.loads((run / "record.json").read_text())["tables"]:
            if not (run / f"{table}.parquet").exists():
                continue

            def hostile(frame: pd.DataFrame) -> pd.DataFrame:
                for column in ("name", "reason", "line", "source", "tensor", "region", "kernel"):
                    if column in frame and len(frame):
                        frame[column] = [f"{MARKUP[(first + n) % len(MARKUP)]}{n}" for n in range(len(frame))]
                return frame

            reports.change_table(run, table, hostile)
    render(copy, tmp_path / "out")
    assert not alive(tmp_path / "out")


def test_errors_quote_what_is_wrong_and_are_not_alive(copy, tmp_path):
    """Folders, configurations, results and columns that cannot be used are named where all are listed."""
    first, *others = sorted(_runs(copy), key=lambda run: run.parent.name != "benchmark")
    name = "<b onclick=alert(1)>"
    (copy / first.parent.name / name).mkdir()
    (copy / first.parent.name / name / "record.json").write_text("{")
    hostile = [
        lambda record: record["config"].update(size=MARKUP[1]),
        lambda record: record.update(beside=[MARKUP[1]]),
        lambda record: record["results"].update({MARKUP[2]: [1]}),
        lambda record: record.update(study=MARKUP[0]),
    ]
    spoiled = list(zip(others[1:], hostile))  # one run stays as it was
    for run, change in spoiled:
        reports.change_record(run / "record.json", change)
    reports.change_table(first, "times", lambda frame: frame.rename(columns={"wall_ms": MARKUP[1]}))
    rendered = render(copy, tmp_path / "out")
    assert len(rendered.errors) == 2 + len(spoiled) >= 5
    assert all("\n" not in error for error in rendered.errors)
    assert not alive(tmp_path / "out")
    assert "## Left out" in (tmp_path / "out" / "evidence" / "runs.md").read_text()


def _changes(frame: pd.DataFrame, column: str):
    """Ways to change a table by one of its columns, by name."""
    number = pd.api.types.is_numeric_dtype(frame[column]) and not pd.api.types.is_bool_dtype(frame[column])
    yield "text", frame.assign(**{column: "<b>x</b>"})
    yield "one text", frame.assign(**{column: ["x", *frame[column].astype(object)[1:]]})
    yield "nothing", frame.assign(**{column: None})
    yield "no number", frame.assign(**{column: np.nan})
    yield "lists", frame.assign(**{column: [[1, 2]] * len(frame)})
    yield "missing", frame.drop(columns=column)
    yield "doubled name", frame.assign(**{f"{column}_": frame[column]})
    if number:
        for name, value in (
            ("zero", 0),
            ("negative", -1),
            ("infinite", np.inf),
            ("huge", 1e300),
            ("tiny", 1e-300),
        ):
            yield name, frame.assign(**{column: value})
        yield "shuffled", frame.assign(**{column: frame[column].to_numpy()[::-1]})
    else:
        yield "same", frame.assign(**{column: frame[column].iloc[0]})


def _whole_changes(frame: pd.DataFrame):
    yield "no rows", frame.iloc[:0]
    yield "one row", frame.iloc[:1]
    yield "doubled rows", pd.concat([frame, frame])
    yield "no columns", frame[[]]
    yield "reversed", frame.iloc[::-1]


def _all_changes(runs: Path) -> list[tuple[Path, str, str, str]]:
    """Every change of every table: run, table, column or "", name."""
    found = []
    for run in _runs(runs):
        for file in sorted(run.glob("*.parquet")):
            frame, table = pd.read_parquet(file), file.stem
            if len(frame):
                found += [
                    (run, table, column, name) for column in frame for name, _ in _changes(frame, column)
                ]
                found += [(run, table, "", name) for name, _ in _whole_changes(frame)]
    return found


def _say(renderer: Renderer, kind: str, name: str) -> None:
    {
        "claim": renderer._made,
        "reference": renderer._made,
        "table": lambda _, name: renderer._table(name),
        "figure": lambda _, name: renderer._figure(name),
    }[kind](kind, name)


@pytest.fixture
def survives(runs, monkeypatch):
    """Say everything that reads a table of which one was changed in memory; what went wrong, empty: nothing."""
    frames: dict[str, pd.DataFrame] = {}
    real, whole = loading._file, Store(runs).records(check_files=True)
    monkeypatch.setattr(Store, "records", lambda *_, **__: whole)
    renderer, readers = Renderer(reports.Reads(read(Store(runs)).tables)), {}
    monkeypatch.setattr("stepscope.report.claims.collect", renderer.known.__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "stepscope.report.claims.svg", lambda picture: ""
        )  # made, to see what it reads, and not drawn
        for kind, known in renderer.known.items():
            for name in known:
                renderer.tables.asked = set()
                _say(renderer, kind, name)
                readers[kind, name] = {asked.partition(".")[0] for asked in renderer.tables.asked}

    def tell(change: tuple[Path, str, str, str]) -> str:
        run, table, column, name = change

        def file(store: Store, record, asked: str) -> pd.DataFrame:
            path = f"{record.study}/{record.run_id}/{asked}"
            if path not in frames:
                frames[path] = real(store, record, asked)
            if path != f"{run.parent.name}/{run.name}/{table}":
                return frames[path].copy()
            return dict(_changes(frames[path], column) if column else _whole_changes(frames[path]))[name]

        monkeypatch.setattr(loading, "_file", file)
        try:
            found = read(Store(runs))
            if not found.errors:  # else it was left out, as whole runs are
                said = Renderer(found.tables)
                for (kind, tag), studies in readers.items():
                    if run.parent.name in studies:
                        _say(said, kind, tag)
        except Exception as error:  # noqa: BLE001 any is what this looks for
            return f"{run.parent.name} {table} {column} {name}: {type(error).__name__}: {error}"
        return ""

    return tell


@pytest.mark.parametrize("seed, most", [(0, 10), pytest.param(1, 400, marks=pytest.mark.trials)])
def test_no_changed_table_ends_the_report(runs, survives, monkeypatch, seed, most):
    if most > 100:
        monkeypatch.setattr("stepscope.report.claims.svg", lambda picture: "")  # made, and not drawn
    every = _all_changes(runs)
    some = (
        random.Random(seed).sample(every, min(most, len(every)))
        + [one for one in every if one[2:] == ("name", "lists")][:1]
    )
    assert not list(filter(None, map(survives, some)))


def test_a_schema_takes_its_own_columns_numbers_that_can_be_measured_and_each_key_once():
    schema, whole = (
        tidy(("mode",), mode=word("step", "forward"), ms=measured()),
        {"mode": ["step", "forward"], "ms": [1.0, np.nan]},
    )
    schema.validate(pd.DataFrame(whole))
    for other in (
        {"ms": [1.0, -1.0]},
        {"ms": [1.0, 1e16]},
        {"ms": [1.0, np.inf]},
        {"ms": ["x", "y"]},
        {"mode": ["step", "x"]},
        {"mode": ["step", "step"]},
        {"beside": [1, 2]},
    ):
        with pytest.raises((SchemaError, SchemaErrors)):
            schema.validate(pd.DataFrame(whole | other))
    with pytest.raises(SchemaError):
        schema.validate(pd.DataFrame(whole)[["mode"]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda times: times.assign(wall_ms="x"), "column 'wall_ms': coerce_dtype('float64') fails for 'x'"),
        (lambda times: times.drop(columns="wall_min_ms"), "column 'wall_min_ms' is missing"),
        (lambda times: pd.concat([times, times]), "its key is not unique"),
    ],
)
def test_a_wrong_table_is_named_with_what_is_wrong(copy, change, words):
    run = next(run for run in _runs(copy) if run.parent.name == "benchmark")
    reports.change_table(run, "times", change)
    found = read(Store(copy))
    assert [*found.errors] == [f"benchmark/{run.name}: its table times cannot be used: {words}"]
    assert run.name not in set(found.tables["runs"].query("study == 'benchmark'")["run_id"])


def test_a_file_that_is_no_table_is_named(copy):
    run = next(run for run in _runs(copy) if run.parent.name == "benchmark")
    (run / "times.parquet").write_bytes(b"PAR1 no, it is not")
    digest = hashlib.sha256((run / "times.parquet").read_bytes()).hexdigest()
    reports.change_record(run / "record.json", lambda record: record["tables"]["times"].update(sha256=digest))
    errors = read(Store(copy)).errors
    assert len(errors) == 1 and "times.parquet: cannot be read as Parquet" in errors[0]


@pytest.mark.parametrize(
    ("study", "change", "words"),
    [
        (
            "ladder",
            lambda record: record["results"].update(parameters=MARKUP[0]),
            "its result parameters is '<script>",
        ),
        (
            "benchmark",
            lambda record: record["results"].update(matmul_tflops="1.0"),
            "its result matmul_tflops is '1.0'",
        ),
        ("benchmark", lambda record: record.update(tables={}), "its record names no table"),
    ],
)
def test_a_record_of_no_table_or_of_text_for_a_number_is_named_and_left_out(copy, study, change, words):
    run = next(run for run in _runs(copy) if run.parent.name == study)
    reports.change_record(run / "record.json", change)
    found = read(Store(copy))
    assert len(found.errors) == 1 and words in found.errors[0] and run.name in found.errors[0]
    assert (study, run.name) not in {(record.study, record.run_id) for record in found.records}


@pytest.mark.parametrize("limit, most", [("MOST_ROWS", 999), ("MOST_BYTES", 20_000)])
def test_a_small_file_that_unpacks_to_much_is_named_and_not_read(copy, monkeypatch, limit, most):
    run = next(run for run in _runs(copy) if run.parent.name == "benchmark")
    path = run / "times.parquet"
    pd.DataFrame({"wall_ms": np.zeros(1000), "reason": ["x" * 100] * 1000}).to_parquet(
        path, compression="zstd", use_dictionary=False
    )
    assert path.stat().st_size < 10_000
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    reports.change_record(run / "record.json", lambda record: record["tables"]["times"].update(sha256=digest))
    monkeypatch.setattr(loading, limit, most)
    monkeypatch.setattr(loading.pq.ParquetFile, "read", None)  # nothing of it may be
    named = [error for error in read(Store(copy)).errors if run.name in error]
    assert len(named) == 1 and "times.parquet: has 1,000 rows, more than any run leaves" in named[0]

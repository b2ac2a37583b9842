"""Chapters and their tags: what is said, what vanishes, and what leans on it."""

import inspect
import re

import pandas as pd
import pytest

from reports import CLAIM, PAGES
from stepscope.report import claims, claims_across
from stepscope.report.claims import HOLDS, TAG, ChapterError, Renderer, collect, formatted
from stepscope.report.render import CHAPTERS
from stepscope.report.style import figure
from stepscope.report.tables import table


def holds(tables):
    return {"size": "a_b", "wall": 94.23, "operations": 1778, "kernel": "k<T>"}


def fails(tables):
    return None


def lacks(tables):
    raise KeyError("benchmark.times")


def breaks(tables):
    raise TypeError("of\nan odd table")


def empty(tables):
    return {"wall": float("nan")}


@pytest.fixture
def renderer(monkeypatch):
    functions = {one.__name__: one for one in (holds, fails, lacks, breaks, empty)}
    known = {
        "claim": functions,
        "reference": {"holds": lambda tables: {"wall": 5.07, "on": "H200"}, "lacks": lacks},
        "table": {
            "times": lambda tables: table(pd.DataFrame({"wall, ms": [1.0]})),
            "none": lambda tables: None,
            "rowless": lambda tables: pd.DataFrame(),
        },
        "figure": {"busy": lambda tables: figure("A <b>message</b>")[0], "none": lambda tables: None},
    }
    monkeypatch.setattr(claims, "collect", known.__getitem__)
    return Renderer({})


def test_a_claim_that_holds_is_said_with_its_numbers(renderer):
    text = "Before. {% claim holds %}{size}: {operations:n} kernels, `{kernel}`, in {wall:ms}.{% endclaim %} After."
    assert renderer.chapter(text, "a.md") == "Before. a\\_b: 1,778 kernels, `k<T>`, in 94.2 ms. After.\n"
    assert [told.why for told in renderer.results] == [HOLDS]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "does not hold"),
        ("lacks", "no data"),
        ("breaks", "TypeError: of an odd table"),
        ("empty", "has no number for wall"),
    ],
)
def test_a_claim_that_does_not_hold_is_left_out_and_listed(renderer, name, why):
    text = f"A. {{% claim {name} %}}B {{wall:ms}}.{{% endclaim %}} C. {{% claim holds %}}D.{{% endclaim %}}"
    assert renderer.chapter(text, "a.md") == "A. C. D.\n"
    assert renderer.results[0].why == why


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("table", "times", HOLDS),
        ("table", "none", "no data"),
        ("table", "rowless", "no data"),
        ("figure", "none", "no data"),
    ],
)
def test_a_table_or_figure_without_data_is_listed(renderer, kind, name, why):
    renderer.chapter(f"A. {{% {kind} {name} %}}", "a.md")
    assert [(told.kind, told.name, told.why) for told in renderer.results] == [(kind, name, why)]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "{% claim fails %}A.{% endclaim %} {% claim lacks %}B.{% endclaim %}\n\nProse. {% claim holds %}C.{% endclaim %}",
            "Prose. C.\n",
        ),
        (
            "(a), (b) **A question?** {% claim fails %}An answer.{% endclaim %}\n\n{% claim holds %}C.{% endclaim %}",
            "C.\n",
        ),
        (
            "(b) **Peaks:** or so: {% claim fails %}B.{% endclaim %} {% claim holds %}A.{% endclaim %}",
            "(b) **Peaks:** or so: A.\n",
        ),
        (
            "Prose of 2.7B. It all leads to:\n\n{% table none %}\n\n{% claim holds %}A.{% endclaim %}",
            "Prose of 2.7B.\n\nA.\n",
        ),
        (
            "{% claim holds %}A.{% endclaim %} Code of 2.7B:\n\n{% claim fails %}B:\n\n```sh\nx\n```\n{% endclaim %}",
            "A.\n",
        ),
        (
            "{% claim holds %}A.{% endclaim %} It leads to: {% claim fails %}what is not said.{% endclaim %}",
            "A.\n",
        ),
        (
            "**Why?** With the square: {% claim fails %}B.{% endclaim %} C. {% claim holds %}D.{% endclaim %}",
            "**Why?** C. D.\n",
        ),
        (
            "## Title\n\nProse.\n\n{% table none %}\n\n### Part\n\nMore.\n\n{% table times %}",
            "## Title\n\n### Part\n\nMore.\n\n| wall, ms |\n| --: |\n| 1.00 |\n",
        ),
        (
            "## Title\n\n{% table times %}\n\n### Part\n\nMore.\n\n{% figure none %}",
            "## Title\n\n| wall, ms |\n| --: |\n| 1.00 |\n",
        ),
        (
            "## Title\n\nProse.\n\n{% table none %}\n\n{% table rowless %}\n\n{% claim lacks %}A.{% endclaim %}",
            "",
        ),
        (
            "A.\n\n{% fold Why %}\n\nProse. {% claim fails %}A.{% endclaim %}\n\n{% endfold %}\n\n{% claim holds %}B.{% endclaim %}",
            "A.\n\nB.\n",
        ),
        (
            "## Title\n\n{% claim holds %}A.{% endclaim %}\n\n### Part\n\nProse.\n\n{% fold Why %}\n\n{% table none %}\n\n{% endfold %}",
            "## Title\n\nA.\n",
        ),
        ("## Title\n\nProse without a tag.", "## Title\n\nProse without a tag.\n"),
    ],
)
def test_what_says_nothing_is_absent(renderer, text, left):
    assert renderer.chapter(text, "a.md") == left


def test_what_the_reference_found_stands_beside_and_alone(renderer):
    text = "{% claim fails %}Here {wall:ms}.{% endclaim %} {% reference holds %}On the {on} {wall:ms}.{% endreference %}"
    assert renderer.chapter(text, "a.md") == "On the H200 5.07 ms.\n"
    assert renderer.chapter(text.replace("reference holds", "reference lacks"), "a.md") == ""


def test_a_figure_is_shown_once_made_with_its_message_escaped(renderer):
    text = renderer.chapter("{% figure busy %}", "a.md", "../figures")
    assert text == "![A \\<b\\>message\\</b\\>](../figures/busy.svg)\n"
    renderer.chapter("{% figure busy %}", "b.md")
    assert [*renderer.figures] == ["busy"] and len(renderer.results) == 1


def test_code_in_fences_is_left_as_it_is(renderer):
    text = (
        "A.\n\n```python\nf'{x}'  # {% claim nothing %}\n\n\ny\n```\n\nB. {% claim holds %}C.{% endclaim %}\n"
    )
    assert renderer.chapter(text, "a.md") == text.replace("{% claim holds %}C.{% endclaim %}", "C.")


def test_a_fold_is_one_that_github_folds_too(renderer):
    text = "A.\n{% fold Why_so %}\n{% claim holds %}B.{% endclaim %}\n\n```sh\nx\n```\n{% claim fails %}C.{% endclaim %}\n{% endfold %}\nD."
    assert renderer.chapter(text, "a.md") == (
        "A.\n\n<details><summary>Why so</summary>\n\nB.\n\n```sh\nx\n```\n\n</details>\n\nD.\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% fold Why %}A.", "a fold is not closed"),
        ("A.\n{% endfold %}", "line 2: .*not open"),
        ("{% fold %}A.", "is no tag"),
        ("{% fold A %}{% fold B %}", "a fold is open"),
        ("{% claim holds %}{% fold A %}", "claim holds is not closed before"),
        ("One.\n\n{% claim nothing %}A.{% endclaim %}", r"a\.md, line 3: no claim is called nothing"),
        ("{% table holds %}", "no table is called holds"),
        ("{% figure x %}", "no figure is called x"),
        ("{% claim holds %}A.", "claim holds is not closed"),
        ("{% reference holds %}A.{% endclaim %}", "endclaim without a claim"),
        ("A.{% endclaim %}", "endclaim without a claim"),
        ("{% claim holds %}{% table times %}{% endclaim %}", "claim holds is not closed before"),
        ("{% if x %}", "is no tag"),
        ("{% claim %}A.{% endclaim %}", "is no tag"),
        (
            "\n{% claim holds %}{walls:ms}{% endclaim %}",
            r"line 2: claim holds has no field 'walls', only size, wall",
        ),
        ("{% claim holds %}{wall:furlongs}{% endclaim %}", r"\{wall:furlongs\}: unit 'furlongs'"),
        ("{% claim holds %}{wall}{% endclaim %}", "needs its unit"),
        ("{% claim holds %}{size:ms}{% endclaim %}", "of the text"),
        ("{% claim holds %}{wall:ms{% endclaim %}", "claim holds"),
    ],
)
def test_a_wrong_tag_is_an_error_that_names_its_line(renderer, text, message):
    with pytest.raises(ChapterError, match=message):
        renderer.chapter(text, "a.md")


def test_two_studies_may_not_have_one_name(monkeypatch):
    modules = list(claims._modules("claims"))[:1] * 2
    monkeypatch.setattr(claims, "_modules", lambda _: modules)
    with pytest.raises(ChapterError, match="has a claim called"):
        collect("claim")


# The chapters as they are


def test_every_tag_has_its_function():
    known = {kind: collect(kind) for kind in claims.KINDS}
    lacking = [
        f"{page.name}: {tag[0]}"
        for page in PAGES
        for tag in TAG.finditer(page.read_text())
        if tag["kind"] in known and tag["name"] not in known[tag["kind"]]
    ]
    assert not lacking


def test_every_claim_and_table_is_said_somewhere():
    said = {(tag["kind"], tag["name"]) for page in PAGES for tag in TAG.finditer(page.read_text())}
    unsaid = [
        f"{kind} {name}" for kind in ("claim", "table") for name in collect(kind) if (kind, name) not in said
    ]
    assert not unsaid


def test_a_claims_numbers_are_its_functions():
    """Words of a claim have no number with a unit of their own."""
    own = [
        (page.name, found[0])
        for page in PAGES
        for claim in CLAIM.finditer(page.read_text())
        for found in re.finditer(
            r"(?<!over )(?<!under )\b[\d.,]+ ?(?:ms|µs|s|%|x|GiB|MiB|W|J|MHz|TFLOP/s|tokens/s)(?!\w)",
            re.sub(r"\{[^}]*\}", "", claim[2]),
        )
    ]
    assert not own


def test_no_chapter_has_a_number_of_the_references_sweeps():
    """Batches, contexts and dimensions are those of the runs, in claims and tables: another sweep has others."""
    setting = re.compile(
        r"\b(?:batch|context|vocabulary|d|d_model|sequence)(?: size| length)?(?: of)? \d[\d,]*|\b[\d,]+\d (?:positions|tokens)",
        re.IGNORECASE,
    )
    code = re.compile(r"^```.*?^```$|`[^`]*`|\{[^{}%]*:[^{}%]*\}", re.DOTALL | re.MULTILINE)
    found = [
        f"{page.relative_to(CHAPTERS)}: {words}"
        for page in PAGES
        for words in setting.findall(code.sub("", page.read_text()))
    ]
    assert not found


# What leans on a claim stands inside it


class Ones(dict):
    """A claim's numbers, whatever their names."""

    def __missing__(self, name):
        return 1


LEANING = re.compile(
    r"(\W*)((But|And|So|Then|Thus|Therefore|Elsewhere|Otherwise) |(\w+ )?(it|its|they|them|their|theirs|these|"
    r"those|both)\b|(this|that)(?! (report|page|study|project)\b))",
    re.IGNORECASE,
)


def _units(text: str) -> list[str]:
    """Code, tables, pictures and sentences, in their order."""
    blocks = re.findall(r"^```.*?^```$|(?:(?!```).)+?(?=\n\n|\Z)", text.strip(), re.DOTALL | re.MULTILINE)
    blocks = [block.strip().removeprefix("> ") for block in blocks if not block.strip().startswith("#")]
    return [
        unit
        for block in blocks
        for unit in ([block] if block.startswith(("```", "|")) else re.split(r"(?<=[.?!:])\**\s+", block))
        if unit
    ]


def _orphans(chapter: str) -> list[str]:
    """Of a chapter's claims, tables and figures, each dropped in turn, what is left that leaned on it."""
    found = []
    tags = {(tag["kind"], tag["name"]) for tag in TAG.finditer(chapter) if tag["name"]}
    known = {
        kind: {
            name: lambda tables, of=kind, name=name: (
                Ones(x=1) if of in claims.SENTENCES else pd.DataFrame({name: [1]})
            )
            for of, name in tags
            if of == kind
        }
        for kind in claims.KINDS
    }

    def told(dropped: tuple = ()) -> list[str]:
        renderer = Renderer({})
        renderer.known = {
            kind: {
                name: (lambda tables: None) if (kind, name) == dropped else function
                for name, function in own.items()
            }
            for kind, own in known.items()
        }
        renderer.figures = {
            name: (name, "") for kind, name in tags if kind == "figure" and (kind, name) != dropped
        }
        return _units(renderer.chapter(chapter, "a chapter"))

    whole = told()
    for tag in sorted(tags):
        left, gone = iter(told(tag)), False
        following = next(left, None)
        for unit in whole:
            if unit != following:
                gone = True
                continue
            if gone and not unit.startswith("**") and (unit.startswith("```") or LEANING.match(unit)):
                found.append(f"{' '.join(tag)}: {unit[:80]!r}")
            gone, following = False, next(left, None)
        assert following is None, f"{' '.join(tag)}: without it other words are said: {following}"
    return found


@pytest.mark.parametrize(
    ("chapter", "orphans"),
    [
        ("{% claim a %}A.{% endclaim %} It leans.", 1),
        ("{% claim a %}A.{% endclaim %}\n\nThese lean.\n\nThey do.", 1),
        ("B. {% claim a %}Do this:{% endclaim %}\n\n```sh\nx\n```", 1),
        ("{% claim a %}A.{% endclaim %} {% claim b %}That is 2x.{% endclaim %}", 1),
        ("{% claim a %}A. It leans:\n\n```sh\nx\n```\n{% endclaim %} Another.", 0),
        ("Prose stands. {% claim a %}A.{% endclaim %}", 0),
        ("{% claim b %}B.{% endclaim %}\n\nAll of them:\n\n{% table a %}\n\nMore.", 0),
        ("{% claim a %}A.{% endclaim %} See:\n\n```sh\nx\n```", 0),
    ],
)
def test_an_orphan_is_found(chapter, orphans):
    found = _orphans(f"## Title\n\n{{% claim c %}}More.{{% endclaim %}}\n\n{chapter}")
    assert len(found) == orphans, found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_nothing_leans_on_a_claim_that_may_go(page):
    """Code, captions and sentences that need a claim stand inside it."""
    assert not _orphans(page.read_text())


def test_a_claims_function_is_short():
    long = {
        name: lines
        for name, function in collect("claim").items()
        if (lines := len(inspect.getsource(function).splitlines())) > 24
    }
    assert not long


def test_formatting_leaves_braces_that_are_doubled():
    assert formatted("{{x}} {a:n}", {"a": 1}, "here") == "{x} 1"


@pytest.mark.parametrize(
    "sentence, low, high, said",
    [
        ("{a:x} to {b:x} of it", 0.99, 0.991, "0.99x of it"),
        ("{a:x} to {b:x} of it", 0.99, 1.01, "0.99x to 1.01x of it"),
        ("of {a:ms} to {b:ms}.", 5, 5, "of 5.00 ms."),
        ("from {a:ms} to {b:ms}.", 5, 5, "from 5.00 ms to 5.00 ms."),
        ("{a:n} to {b:n}", 1, 11, "1 to 11"),
        ("{a:n} to {b:n}", 1, 1000, "1 to 1,000"),
        ("{a:n} to {b:n}", 11, 1, "11 to 1"),
        ("{a:%} to {b:%}", 0.1, 0.1, "10%"),
    ],
)
def test_a_range_whose_ends_read_alike_is_one_number(sentence, low, high, said):
    assert formatted(sentence, {"a": low, "b": high}, "here") == said


def test_every_text_within_backticks_is_code():
    texts = {"a": "f_a<T>", "b": "f_b<T>"}
    assert formatted("`{a} {b}`, {a}", texts, "here") == r"`f_a<T> f_b<T>`, f\_a\<T\>"


def test_the_cpus_report_says_kib_of_mib():
    """What is saved there is small: its claims are in other units than the tables."""
    passes = [
        {
            "implementation": name,
            "status": "ok",
            "device_gib": None,
            "wall_ms": wall,
            "sequence": 64,
            "d_model": 16,
            "batch_size": 2,
            "precision": "fp32",
            "saved_mib": saved,
        }
        for name, wall, saved in (("naive", 3.0, 2.0), ("flash", 1.0, 0.125))
    ]
    told = Renderer({"attention.passes": pd.DataFrame(passes)}).chapter(
        (CHAPTERS / "cpu" / "04-attention.md").read_text(), "here"
    )
    assert "2,048 KiB" in told and "128 KiB" in told


def test_the_cpus_report_speaks_of_the_plain_step():
    """The compiled run of the same model is of more contexts, and quicker: its times are another sentence's."""
    runs = [
        {
            "run_id": name,
            "compile": how,
            "parameters": parameters,
            "context_length": context,
            "batch_size": 4,
            "size": "nano",
            "vocab_size": 300,
            "precision": "fp32",
            "attention": "naive",
            "optimizer": "foreach",
            "repeat": 0,
        }
        for name, how, parameters, context in (
            ("less", "none", 10, 64),
            ("plain", "none", 20, 32),
            ("compiled", "blocks", 20, 64),
            ("larger", "blocks", 30, 64),
        )
    ]
    times = [
        {"run_id": run["run_id"], "mode": mode, "phase": phase, "wall_ms": wall * (1 + number)}
        for number, run in enumerate(runs)
        for mode in ("forward", "step")
        for phase, wall in (("forward", 2.0), ("backward", 5.0), ("optimizer", 1.0), ("whole", 10.0))
    ]
    devices = [
        {"study": "benchmark", "run_id": run["run_id"], "device": f"CPU of {run['run_id']}"} for run in runs
    ]
    tables = {
        "benchmark.results": pd.DataFrame(runs),
        "benchmark.times": pd.DataFrame(times),
        "runs": pd.DataFrame(devices),
    }
    said = claims_across.cpu_step(tables)
    assert said is not None and said["cpu"] == "CPU of plain"
    assert (said["parameters"], said["context"], said["compiled"], said["wall"]) == (20, 32, "none", 20.0)
    assert claims_across.cpu_phases(tables) == {"forward": 0.2, "backward": 0.5, "optimizer": 0.1}

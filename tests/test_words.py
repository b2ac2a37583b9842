"""Words hold no arithmetic and no comparison, and show what they are given as plain text."""
import re
from pathlib import Path

import pytest
from jinja2 import nodes
from markdown_it import MarkdownIt

import stepscope
from stepscope.report.load import chapters
from stepscope.say import formats
from stepscope.say.tables import markdown_table
from stepscope.say.words import Words, environment, escape, tidy

TEMPLATES = sorted(Path(stepscope.__file__).parent.glob("**/words/**/*.md"))
ARITHMETIC = (
    nodes.Compare,
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Pow,
    nodes.Neg,
)


def computed(source):
    """What a template computes by itself."""
    tree = environment().parse(source)
    return [type(node).__name__ for node in tree.find_all(ARITHMETIC)] + [
        node.name for node in tree.find_all(nodes.Test) if node.name != "none"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_words_compute_nothing(path):
    assert computed(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "{% if a > b %}more{% endif %}",
        "{{ a / b }}",
        "{{ 100 * share }}",
        "{{ a if a == b else b }}",
        "{% if n is divisibleby 2 %}even{% endif %}",
    ],
)
def test_what_computes_is_found(source):
    assert computed(source)


def test_every_question_has_its_words_and_every_words_its_question():
    for chapter in chapters():
        keys = {question.key for question in chapter.questions}
        assert keys == {path.stem for path in (chapter.folder / "words").glob("*.md")}, chapter.study
        for question in chapter.questions:
            words = Words(chapter.folder / "words", f"{question.key}.md")
            assert words.block("question").endswith("?") and "text" in words.template.blocks
            captions = {f"table_{name}" for name in question.printed} | {
                f"figure_{stem}" for stem in question.pictures
            }
            assert (
                captions | {"question", "text"}
                <= set(words.template.blocks)
                <= captions | {"question", "text", "not_answered"}
            )


def test_thousands_have_a_comma_wherever_a_number_stands():
    """In words, lists and tables; a flag is no number, and code given as text stays as it is."""
    words = environment().from_string("{{ n }}, {{ [512, n] | listing }}, {{ n | count('run') }}, {{ yes }}, {{ code }}")
    shown_as = "1,024, 512 and 1,024, 1,024 runs, True, --context 2048"
    assert words.render(n=1024, yes=True, code="--context 2048") == shown_as
    table = markdown_table(__import__("pandas").DataFrame({"context": [512, 1024], "as text": ["512", "16384"]}))
    assert "| 1,024 | 16,384 |" in table


HOSTILE = [
    "<b onclick=alert(1)>x</b>",
    "<form action=//x.test><button>go</form>",
    "<script>alert(1)</script>",
    "<img src=x>",
    "![pwn](http://x.test/a.png)",
    "[click](javascript:alert(1))",
    "[a]: http://x.test",
    "**bold** and _em_ and `code",
    "# heading",
    "a\n# heading\n\n* item",
    "<!-- comment",
    "\\<b>x</b>",
    "\\\\<b>x</b>",
    "$x$",
    "&lt;b&gt;",
    "a | b",
    "http://x.test/?q=<b>",
    "``x``<b>y</b>`",
    "<https://x.test>",
    "` `<i>z</i>` `",
]


def shown(markdown):
    """A paragraph or table as HTML."""
    return MarkdownIt("commonmark").enable("table").render(markdown)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_a_value_becomes_markup(text):
    rendered = environment().from_string("A value: {{ value }} and [{{ value }}](#here)").render(value=text)
    table = markdown_table(__import__("pandas").DataFrame({"name": [text, "b"], "n": ["1", "2"]}))
    for html in (shown(rendered), shown(table)):
        tags = set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", html))
        assert tags <= {"p", "a", "code", "table", "thead", "tbody", "tr", "th", "td"}, html
        assert "javascript:" not in re.sub(r"<code>.*?</code>|>[^<]*<", "", html)
    assert shown(table).count("<tr>") == 3 and shown(table).count("<td") == 4


@pytest.mark.parametrize(
    "text",
    [
        "small, context 512",
        "forward_backward",
        "0.3 * x",
        "`void f<int, 4>(T*)` at 3 < 4",
        "12 [11, 13]",
        "a_b",
        "28 × 4",
        "import torch._dynamo",
        "batch 4, 2.7B",
        "±",
        "C:\\x",
        "_scaled_mm",
    ],
)
def test_plain_text_stays_as_it_is(text):
    assert escape(text) == text


def test_what_is_no_text_is_left():
    assert escape(3.5) == 3.5 and escape(None) is None


def test_paragraphs_become_lines_and_items_stay_items():
    assert tidy("\n a\n b , c\n\n* one\n  more\n* two .\n") == "a b, c\n\n* one more\n* two."


@pytest.mark.parametrize(
    "value, printed",
    [(0.9996, "1.00"), (1.0004, "1.00"), (0.9994, "0.999"), (9.996, "10.0"), (99.97, "100"), (999.7, "1,000")],
)
def test_a_number_that_is_rounded_up_to_the_next_power_has_its_digits(value, printed):
    assert formats.number(value) == printed and formats.number(-value) == f"-{printed}"


def test_an_interval_that_prints_as_one_number_is_one():
    assert formats.with_interval(0.9999, 0.9998, 1.0002) == "1.00"
    assert formats.with_interval(1.0, 0.9, 1.1) == "1.00 [0.900, 1.10]"
    assert formats.with_interval(float("nan"), 1, 2) == "–"
    assert formats.change_with_interval(0.0, -0.0004, 0.0001) == "+0.0%"
    assert formats.change_with_interval(-0.02, -0.05, 0.01) == "-2.0% [-5.0%, +1.0%]"


def test_gains_go_one_way():
    """Slower is a number over 1 with its word, in the interval too, and needs none where both ends are so."""
    assert formats.gain(2.1) == "2.10x" and formats.gain(0.5) == "2.00x slower" and formats.gain(1.001) == "as fast"
    assert formats.gain_with_interval(2.1, 2.0, 2.2) == "2.10x [2.00, 2.20]"
    assert formats.gain_with_interval(0.8, 0.5, 1.0) == "1.25x slower [1.00, 2.00]"
    assert formats.gain_with_interval(1.25, 0.8, 2.0) == "1.25x [1.25x slower, 2.00x]"
    assert formats.gain_with_interval(1.25, 1.25, 1.25) == "1.25x" == formats.gain(1.25)
    assert formats.gain_with_interval(float("nan"), 1, 2) == "–" == formats.gain(float("nan"))


def test_a_position_has_a_comma_as_all_numbers_have():
    assert [formats.positions(n) for n in (512, 1024, 16_384)] == ["512", "1,024", "16,384"]

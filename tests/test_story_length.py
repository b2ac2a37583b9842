"""The main text stays short: the committed report, which is what the records say (``test_report.py``)."""
import re

from reference import ROOT

TEXT = (ROOT / "writeup.md").read_text(encoding="utf-8")
CHAPTERS = 7
FIRST_SCREEN, ALL_CHAPTERS, ROWS = 150, 3_500, 8


def parts():
    """The text's parts by their headings; before the first, under "", the first screen."""
    first, *rest = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    return {"": first} | {name: text for name, _, text in (part.partition("\n") for part in rest)}


def chapters():
    """Those between the advice and the assignment's questions."""
    names = list(parts())
    return {name: parts()[name] for name in names[2:names.index("The assignment's questions, answered")]}


def words(text):
    """How many words are read: no table's, no picture's description, no link's address, no tag."""
    lines = [line for line in text.splitlines() if not line.startswith(("|", "# "))]
    plain = re.sub(r"!\[[^]]*\]\([^)]*\)|<[^>]+>|\]\([^)]*\)|^#+ ", "", "\n".join(lines), flags=re.MULTILINE)
    return len(plain.split())


def test_what_is_counted():
    text = "# Title\n<a id=\"x\"></a>\n### One [two](#three) four\n\n![not this](a.png)\n| nor | this |\nfive.\n"
    assert words(text) == 4


def test_the_first_screen_is_short_and_has_its_picture():
    first = parts()[""]
    assert words(first) <= FIRST_SCREEN and first.count("![") == 1
    assert words(first.partition("![")[0]) <= 110


def test_the_chapters_are_short():
    assert len(chapters()) == CHAPTERS
    assert sum(words(name) + words(text) for name, text in chapters().items()) <= ALL_CHAPTERS


def test_a_table_has_few_rows():
    tables = [table for text in chapters().values() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert len(tables) > 5 and max(table.count("\n") - 2 for table in tables) <= ROWS
    advice = re.findall(r"(?:^\|.*\n)+", parts()["What to do"], re.MULTILINE)
    assert [table.count("\n") - 2 <= ROWS for table in advice] == [True]

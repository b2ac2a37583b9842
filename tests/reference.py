"""The committed runs, a study at a time: loading them all costs many seconds, and few tests need that."""
import base64
import fcntl
import functools
import pickle
from pathlib import Path

from stepscope.report.load import chapters
from stepscope.runs.selection import told_apart
from stepscope.runs.store import Store

ROOT = Path(__file__).parents[1]
STORE = Store(ROOT / "runs" / "h200")
# A picture of one pixel, where only its place matters.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
                       "awAAAABJRU5ErkJggg==")


shared: Path | None = None  # a folder of this run of the tests, where several processes share it


@functools.cache
def records():
    return STORE.records()[0]


@functools.cache
def tables(study):
    """One study's tables by name, of the committed runs."""
    if shared is None:
        return _made(study)
    with (shared / f"{study}.tables").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of several processes one makes them
        if not file.tell():
            pickle.dump(_made(study), file)
        file.seek(0)
        return pickle.load(file)


def _made(study):
    chapter = next(chapter for chapter in chapters() if chapter.study == study)
    own = [record for record in records() if record.study == study]
    return chapter.load(STORE, told_apart(own)[0])


def changed(table, where, **columns):
    """A copy of a table with columns set, by a value or a function of the rows, where a condition holds."""
    table = table.copy()
    rows = where(table)
    for column, value in columns.items():
        table.loc[rows, column] = value(table[rows]) if callable(value) else value
    return table


def answered(study, key, **replaced):
    """The answer to one question, with some of the study's tables replaced; other studies' are as committed."""
    from stepscope.say.chapter import answer

    chapter = next(chapter for chapter in chapters() if chapter.study == study)
    given = {name if "." in name else f"{study}.{name}": table
             for name, table in (tables(study) | replaced).items()}
    question = next(question for question in chapter.questions if question.key == key)
    for name in {*question.needs, *question.uses} - set(given):
        other, table = name.split(".")
        given[name] = tables(other)[table]
    return answer(chapter, question, given)

"""What a record or a table holds is shown as text: a report of hostile ones has the markup of a report of
harmless ones.
"""
import hashlib
import json
import re
from collections import Counter

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from reference import PNG, STORE, records, tables
from stepscope.report.load import chapters, load_data
from stepscope.report.page import render_page
from stepscope.report.render import compose, whole
from stepscope.report.story import STORY
from stepscope.runs.store import Store
from stepscope.say.style import save
from stepscope.studies.warmup import figures

TAGS = ("<b onclick=alert(1)>x</b> <form action=x.test><button>go</form> <script>alert(1)</script>"
        " <img src=x onerror=alert(1)> </details> <!-- note &lt;b&gt; \\<b>x</b> **bold** ![pwn](a.png)"
        " [click](javascript:alert(1)) $x^2$ and $y")
HOSTILE = {
    "with an address": "# heading\n\n## another\n\n* item\n\n| a | b |\n|---|---|\n| c | d |\n\n[a]: http://x.test"
                       f"\n\nhttp://x.test/?q={TAGS} `",
    "without": f"`<i>a | b `` c ` {TAGS} <b>d</b> \\"}
KINDS = ("benchmark", "nsys", "attention")  # with texts of machines, kernels, and reasons
TEXTS = {"reason", "cause", "flags", "name", "source", "line"}  # columns of which the report needs no meaning


def smallest(study):
    """The smallest run of a study."""
    done = [record for record in records() if record.study == study and record.status == "ok"
            and record.config["precision"] in ("fp32", "all")]
    return min(done, key=lambda r: (r.config["d_model"], r.config["context_length"], r.run_id))


@pytest.fixture(scope="module")
def chosen():
    """For each kind of study its smallest run: the record as it is in its file, and its tables by name; where
    there is no text in one, its file as it is.
    """
    runs = []
    for study in KINDS:
        record = smallest(study)
        place = STORE.root / study / record.run_id
        files = {name: place / table.file for name, table in record.tables.items() if "/" not in table.file}
        found = {name: pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
                 for name, file in files.items()}
        found = {name: table if TEXTS & set(table) else files[name].read_bytes()
                 for name, table in found.items()}
        runs.append((json.loads((place / "record.json").read_text()), found))
    return runs


def write(folder, runs, text):
    """Copies of some runs, with this text wherever the report only shows what is there."""
    for record, found in runs:
        place = folder / record["study"] / record["run_id"]
        place.mkdir(parents=True)
        changed = {"machine": record["machine"] | {"device_name": text, "cpu": text},
                   "software": dict.fromkeys(record["software"], text),
                   "gpu_after": record["gpu_after"] | {"throttle_reasons": [text]}, "tables": {}}
        for name, table in found.items():
            target = place / record["tables"][name]["file"]
            if isinstance(table, bytes):
                target.write_bytes(table)
            else:
                table = table.assign(**{column: table[column].where(table[column].isna(), text)
                                        for column in TEXTS & set(table)})
                table.to_csv(target, index=False) if target.suffix == ".csv" else table.to_parquet(target)
            digest = hashlib.sha256(target.read_bytes()).hexdigest()
            changed["tables"][name] = record["tables"][name] | {"sha256": digest}
        (place / "record.json").write_text(json.dumps(record | changed))


def markup(folder, runs, text):
    """What a report of these runs is made of, but for its words: elements, headings, addresses of links."""
    write(folder / "runs", runs, text)
    data = load_data(Store(folder / "runs"))
    assert not data.errors
    stems = [picture.stem for one in (*STORY, *chapters()) for picture in one.pictures]
    (folder / "figures").mkdir()
    for stem in stems:  # only their captions matter
        (folder / "figures" / f"{stem}.png").write_bytes(PNG)
    page = BeautifulSoup(render_page(whole(compose(data, stems), "runs"), folder), "html.parser")
    # A longer text may make a table one of sentences, whose cells repeat their column's name for a phone.
    elements = Counter((tag.name, *sorted(set(tag.attrs) - {"class", "data-name"}))
                       for tag in page.find_all(True) if tag.name != "code")
    headings = [re.sub(r"\W+", "", tag.get_text()) for tag in page.find_all(re.compile("h[1-6]"))]
    return elements, headings, [link["href"] for link in page.find_all("a", href=True)]


@pytest.fixture(scope="module")
def harmless(chosen, tmp_path_factory):
    return markup(tmp_path_factory.mktemp("harmless"), chosen, "plain text " * 30)  # as long, since a long name has a row


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_of_a_record_becomes_markup(text, chosen, harmless, tmp_path):
    elements, headings, links = markup(tmp_path, chosen, text)
    assert elements == harmless[0]
    assert headings == harmless[1] and links == harmless[2]


def test_no_name_of_a_device_is_typeset_as_a_formula(tmp_path):
    samples = tables("warmup")["samples"]
    one = samples[samples["run_id"] == samples["run_id"].iloc[0]]
    figure = figures.warmup_steps(one, one.iloc[:0], where=r"$\no{formula$ <b>x</b>")
    assert save(figure, tmp_path / "figure.png").stat().st_size  # as a formula it would be an error

"""What a record or a table holds is shown as text: a report of hostile ones has the markup of a report of harmless ones."""
import json
import re
from collections import Counter

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from reference import STORE, records

from stepscope.report.load import load_data
from stepscope.report.page import render_page
from stepscope.report.render import draw_figures, writeup
from stepscope.runs.store import Store

TAGS = ("<b onclick=alert(1)>x</b> <form action=x.test><button>go</form> <script>alert(1)</script> <img src=x onerror=alert(1)>"
        " </details> <!-- note &lt;b&gt; \\<b>x</b> **bold** ![pwn](a.png) [click](javascript:alert(1)) $x^2$ and $y")
HOSTILE = [TAGS, f"http://x.test/?q={TAGS} `", "# heading\n\n## another\n\n* item\n\n| a | b |\n|---|---|\n| c | d |\n\n[a]: http://x.test",
           "`<i>a | b `` c ` <b>d</b> \\"]
KINDS = ("benchmark", "nsys", "attention")  # with texts of machines, kernels, and reasons


def chosen():
    """A run of each kind of study, the smallest ones."""
    return [min((record for record in records() if record.study == study and record.status == "ok" and record.config["precision"]
                 in ("fp32", "all")), key=lambda record: (record.config["d_model"], record.config["context_length"], record.run_id))
            for study in KINDS]


def write(folder, text):
    """Copies of the chosen runs, with something for every text of which the report does not need the meaning."""
    for record in chosen():
        place = folder / record.study / record.run_id
        place.mkdir(parents=True)
        content = json.loads((STORE.root / record.study / record.run_id / "record.json").read_text())
        content["machine"] |= {"device_name": text, "cpu": text}
        content["software"] = {name: text for name in content["software"]}
        content["gpu_after"]["throttle_reasons"] = [text]
        (place / "record.json").write_text(json.dumps(content))
        for table in record.tables.values():
            source, target = STORE.root / record.study / record.run_id / table.file, place / table.file
            if "/" in table.file:
                continue
            frame = pd.read_csv(source) if source.suffix == ".csv" else pd.read_parquet(source)
            for column in {"reason", "cause", "flags", "name", "source", "line"} & set(frame):
                frame[column] = frame[column].where(frame[column].isna(), text)
            frame.to_csv(target, index=False) if target.suffix == ".csv" else frame.to_parquet(target)
    return folder


def markup(folder, text):
    data = load_data(Store(write(folder / "runs", text)))
    assert not data.errors
    figures = draw_figures(data, folder / "figures") if "$" in text else []  # matplotlib, too, would typeset a formula
    page = BeautifulSoup(render_page(writeup(data, figures, "runs", "figures"), folder), "html.parser")
    elements = Counter((tag.name, *sorted(set(tag.attrs) - {"class"})) for tag in page.find_all(True)
                       if tag.name not in ("code", "img", "figure", "figcaption"))
    headings = [re.sub(r"\W+", "", tag.get_text()) for tag in page.find_all(re.compile("h[1-6]"))]
    return elements, headings, [link["href"] for link in page.find_all("a", href=True)]


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    return markup(tmp_path_factory.mktemp("harmless"), "plain text")


@pytest.mark.parametrize("text", HOSTILE, ids=["tags", "address", "lines", "code"])
def test_no_text_of_a_record_becomes_markup(text, harmless, tmp_path):
    assert markup(tmp_path, text) == harmless

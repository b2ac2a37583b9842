"""Who may know whom, and that a study is a folder."""
import ast
import shutil
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope import studies

PACKAGE = Path(stepscope.__file__).parent
FLOORS = (
    ("config", "files", "yaml_files"),
    ("step",),
    ("traces",),
    ("runs",),
    ("say",),
    ("studies",),
    ("report",),
    ("cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported(path):
    """The modules of this package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stepscope":
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "stepscope")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem in FLOOR]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_knows_only_those_above_it(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts
    for name in imported(path):
        other = name.split(".")[1:]
        if other and other[0] in FLOOR:
            assert FLOOR[other[0]] <= FLOOR[own[0]], f"imports {name}"
            if own[0] == "studies" == other[0] and len(own) > 2:
                assert other[1] == own[1], f"a study imports another: {name}"


def test_every_room_is_on_a_floor():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= FLOOR.keys()


def test_every_study_in_the_list_is_a_folder_and_every_folder_in_the_list():
    folders = {path.parent.name for path in (PACKAGE / "studies").glob("*/chapter.py")}
    assert folders == set(studies.STUDIES)
    for name in folders:
        runs = (PACKAGE / "studies" / name / "config.py").exists()
        assert (PACKAGE / "notebooks" / f"{name}.ipynb").exists() == runs
        assert (PACKAGE / "studies" / name / "sweep.yaml").exists() == runs
    assert {path.stem for path in (PACKAGE / "notebooks").glob("*.ipynb")} <= folders | {"explore"}


TOY = {
    "__init__.py": "",
    "config.py": '''from typing import Literal

from stepscope.config import RunConfig


class Config(RunConfig):
    study: Literal["toy"] = "toy"
    sides: int = 6
''',
    "chapter.py": '''from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from stepscope.runs.tables import load_table
from stepscope.say.chapter import Chapter, Picture, Question


def load(store, records):
    return {"throws": load_table(store, [record for record in records if record.study == "toy"], "throws")}


def mean(throws):
    return {"mean": throws["pips"].mean(), "fair": abs(throws["pips"].mean() - 3.5) < 1, "runs": ["toy/" +
    throws["run_id"].iloc[0]]}


def draw(throws, where):
    figure, axis = plt.subplots()
    axis.hist(throws["pips"])
    axis.set_title(where)
    return figure


CHAPTER = Chapter(
    Path(__file__).parent, "Toys", load,
    questions=(Question("dice", mean, ("toy.throws",), pictures=("toy_throws",),
                        printed={"throws": lambda facts: pd.DataFrame({"mean": [f"{facts['mean']:.1f}"]})}),),
    pictures=(Picture("toy_throws", draw, ("toy.throws",)),))
''',
    "sweep.yaml": "study: toy\nfixed: {device: cpu, d_model: 2, context_length: 1}\n",
    "words/dice.md": '''{% block question %}Are the dice fair?{% endblock %}
{% block text %}The mean is {{ mean | number }}: {% if fair %}fair{% else %}loaded{% endif %}.{% endblock %}
{% block table_throws %}All throws.{% endblock %}
{% block figure_toy_throws %}Throws{% endblock %}
''',
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A study in a folder of its own, listed."""
    for name, text in TOY.items():
        path = tmp_path / "studies" / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    from stepscope import config
    from stepscope.report import load
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(tmp_path / "studies")])
    monkeypatch.setattr(studies, "STUDIES", (*studies.STUDIES, "toy"))
    caches = (config.studies, load.chapters)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.startswith("stepscope.studies.toy")]:
        del sys.modules[name]


def test_a_folder_and_a_line_are_a_study(toy):
    import pandas as pd

    from stepscope.config import configure
    from stepscope.report.load import load_data
    from stepscope.report.render import compose, draw_figures, whole
    from stepscope.runs.store import Store
    from stepscope.runs.sweep import run_sweep

    def notebook(config, folder, *_):
        """In a kernel's place: its end is a table."""
        import json

        from stepscope.runs.tables import write_table
        table = write_table(folder, "throws", pd.DataFrame({"pips": [1, 6] * config.sides}))
        (folder / "outcome.json").write_text(
            json.dumps({"finished": True, "tables": {"throws": table.model_dump()}})
        )
        return "ok", None

    from stepscope.runs.sweep import How
    end = run_sweep([toy / "studies" / "toy" / "sweep.yaml"], Store(toy / "runs"), How(notebook=notebook))
    assert end.counts["ok"] == 1
    data = load_data(Store(toy / "runs"))
    assert [record.run_id for record in data.records] == [
        configure("toy", d_model=2, context_length=1, device="cpu").run_id
    ]
    text = whole(compose(data, draw_figures(data, toy / "figures")), ".")
    assert "<summary>CPU preset: Toys</summary>" in text, text[-3000:]
    assert "The mean is 3.50: fair." in text
    assert (toy / "figures" / "toy_throws.png").exists()
    shutil.rmtree(toy / "runs")

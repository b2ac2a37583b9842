"""What is shipped: clean code, pins that install, a wheel that works alone, untouched notebooks."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.request
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import stepscope
from conftest import TINY
from stepscope import cli

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11.2", "3.12.0", "3.13.0")  # the oldest is Debian 12's
JUNK = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints")


def said(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def pip(*command, **options) -> subprocess.CompletedProcess:
    return said(sys.executable, "-m", "pip", *command, "--quiet", "--no-deps", **options)


def alone() -> dict[str, str]:
    """This process's environment without what points to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize("command", ["-m ruff check", "tests/typecheck.py"])
def test_the_code_is_clean(command):
    found = said(sys.executable, *command.split(), cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


# Pins

def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def pinned(need: Requirement) -> bool:
    """Whether there is a pin of it, at a version that it takes."""
    return pins().get(canonicalize_name(need.name), "") in need.specifier


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_pins_are_of_what_the_project_asks_for():
    asked = [project()["dependencies"], *project()["optional-dependencies"].values()]
    assert [text for texts in asked for text in texts if not pinned(Requirement(text))] == []


def test_no_pin_that_is_installed_here_needs_a_newer_python_than_the_oldest():
    same = [found for found in distributions()
            if pins().get(canonicalize_name(found.name)) == found.version.partition("+")[0]]
    assert len(same) > len(pins()) // 2
    needs = {found.name: found.metadata.get("Requires-Python") or "" for found in same}
    assert {name: need for name, need in needs.items() if PYTHONS[0] not in SpecifierSet(need)} == {}


def resolved(python: str, folder: Path) -> list[dict]:
    """What pip would install of all pins on that Python: the metadata of each release."""
    # Without torch, whose builds differ by place.
    lines = [f"{name}=={version}" for name, version in pins().items() if name != "torch"]
    (folder / "pins").write_text("\n".join(lines), encoding="utf-8")
    found = pip("install", "--dry-run", "--ignore-installed", "--target", folder / "there",
                "--only-binary=:all:", "--python-version", python,
                "--requirement", folder / "pins", "--report", folder / "report.json")
    assert found.returncode == 0, found.stderr
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))["install"]


@pytest.mark.trials
@pytest.mark.parametrize("python", PYTHONS)
def test_pins_install(python, tmp_path):
    """Every pin has a release for that Python, none is withdrawn, and what each needs is pinned too."""
    if pip("download", "--dest", tmp_path, "toolz").returncode:
        pytest.skip("no package index can be reached")
    chosen = resolved(python, tmp_path)
    assert [one["metadata"]["name"] for one in chosen if one.get("is_yanked")] == []
    there = default_environment() | {"extra": "", "python_version": python.rpartition(".")[0],
                                     "python_full_version": python}
    needs = [(one["metadata"]["name"], Requirement(text))
             for one in chosen for text in one["metadata"].get("requires_dist", [])]
    assert [f"{name}: {need}" for name, need in needs if (need.marker is None or need.marker.evaluate(there))
            and not pinned(need)] == []


# The documents

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_command_that_a_page_gives_is_one():
    """Of make its target, of stepscope its name and options."""
    from typer.main import get_command
    known, targets = get_command(cli.app).commands, (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [line for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
             for line in block.splitlines()]
    made = [words[1] for line in lines if (words := line.split())[:1] == ["make"]]
    assert made and [name for name in made if f"\n{name}:" not in targets] == []
    asked = [found for line in lines if (found := re.search(r"stepscope ([a-z]+)([^#]*)", line))]
    assert len(asked) > 8
    for found in asked:
        options = {name for one in known[found[1]].params for name in (*one.opts, *one.secondary_opts)}
        assert set(re.findall(r"--[a-z-]+", found[2])) <= options | {"--help"}, found[0]


def test_what_a_record_holds_is_told():
    """Every table and every scalar of the reference's records has its word in docs/on-disk.md."""
    told = set(re.findall(r"`([\w.]+)`", (ROOT / "docs" / "on-disk.md").read_text(encoding="utf-8")))
    begin = tuple(name for name in told if name.endswith("_"))
    records = [json.loads(path.read_text(encoding="utf-8"))
               for path in (ROOT / "runs" / "h200").glob("*/*/record.json")]
    tables = {name for record in records for name in record["tables"] if not name.startswith("nsys/")}
    fields = {name for record in records for part in (record, record["results"], record["machine"])
              for name in part}
    assert len(tables) > 10 and tables - told == set()
    assert {name for name in fields - told if not name.startswith(begin)} == set()


# The wheel

@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what a wheel is built from, with a study more, whose folder nothing else knows."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("lib", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=JUNK)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    toy = folder / "lib" / "stepscope" / "studies" / "toy"
    (toy / "words" / "deeper").mkdir(parents=True)
    for name in ("__init__.py", "sweep.yaml", "words/answer.md", "words/deeper/page.html.j2"):
        (toy / name).touch()
    return folder


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    built = pip("wheel", "--no-build-isolation", "--no-index", "--wheel-dir", sources / "dist", sources)
    assert built.returncode == 0, built.stderr
    return next((sources / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of an environment that has the wheel, and beside it whatever else is installed here."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    beside = next(folder.glob("lib/python*/site-packages"))
    # No .pth file that lies in there is followed, so the checkout is not found through it.
    (beside / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    done = pip("--python", python, "install", "--no-index", "--ignore-installed", wheel, env=alone())
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(sources, wheel):
    package = sources / "lib" / "stepscope"
    paths = [*package.rglob("*"), *package.glob("notebooks/*")]  # rglob follows no link
    files = {path.relative_to(sources / "lib").as_posix() for path in paths if path.is_file()}
    assert any(name.startswith("stepscope/notebooks/") for name in files)
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert metadata["Version"] == stepscope.__version__ and metadata["License-Expression"] == "MIT"
    assert metadata.get_payload().startswith("# stepscope")
    versions = {kind.rpartition(" ")[2] for kind in metadata.get_all("Classifier") if "Python :: 3." in kind}
    assert versions == {python.rpartition(".")[0] for python in PYTHONS}


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == stepscope.__version__
    assert cited["license"] == "MIT" and cited["title"].startswith("stepscope")


def test_the_installed_wheel_works_outside_a_checkout(installed, tmp_path):
    helped = said(installed / "stepscope", "--help", cwd=tmp_path, env=alone())
    assert helped.returncode == 0 and "sweep" in helped.stdout, helped.stderr
    code = "import stepscope; print(stepscope.PACKAGE)"
    where = said(installed / "python", "-c", code, cwd=tmp_path, env=alone())
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)

    began = said(installed / "stepscope", "sweep", "cpu", "--time-budget", "0s", cwd=tmp_path, env=alone())
    assert began.returncode == 75, began.stderr  # runs are left
    shipped = {path.parent.name for path in (ROOT / "lib" / "stepscope" / "studies").glob("*/sweep_cpu.yaml")}
    assert len([*tmp_path.glob("runs/local-*/sweeps/*.yaml")]) == len(shipped)


@pytest.mark.trials
def test_the_first_command_measures_every_study_on_a_cpu_and_renders_them(installed, tmp_path):
    """Minutes. What a record of a CPU lacks has ended it at the rendering, where no smaller test looked."""
    ran = said(installed / "stepscope", "report", cwd=tmp_path, env=alone() | {"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr
    records = [*tmp_path.glob("runs/local-cpu/*/*/record.json")]
    studies = {path.parent.name for path in (ROOT / "lib" / "stepscope" / "studies").glob("*/sweep_cpu.yaml")}
    assert {path.parent.parent.name for path in records} == studies and "0 failed" in ran.stderr
    assert "Warning" not in ran.stderr and "Traceback" not in ran.stderr
    written = next(tmp_path.glob("runs/local-cpu/writeup.md")).read_text(encoding="utf-8")
    told = {path.stem for path in tmp_path.glob("runs/local-cpu/evidence/*.md")}
    assert studies <= told and all(f"evidence/{study}.md" in written for study in studies)
    pictures = set(re.findall(r"\]\((figures/[^)]+)\)", written))
    assert pictures and all((tmp_path / "runs" / "local-cpu" / name).is_file() for name in pictures)


@pytest.mark.trials
def test_the_installed_wheel_makes_a_report_in_an_empty_folder(installed, tmp_path, write_sweep):
    file = write_sweep({"study": "benchmark", "fixed": TINY})
    (tmp_path / "empty").mkdir()
    here = {"cwd": tmp_path / "empty", "env": alone()}
    ran = said(installed / "stepscope", "report", file, **here)
    assert ran.returncode == 0, ran.stderr
    assert [*here["cwd"].glob("runs/local-*/benchmark/*/record.json")]
    assert all(Path(line).is_file() for line in ran.stdout.split()) and "writeup.html" in ran.stdout
    assert "1 run" in ran.stderr and "One step takes" in ran.stderr  # announced, and its finding
    fits = said(installed / "stepscope", "fit", "small", **here)
    assert fits.returncode == 0 and "forward" in fits.stdout, fits.stderr


# Notebooks

def make(folder: Path, *arguments) -> list[str]:
    return ["make", "--no-print-directory", "-C", str(folder), "-f", str(ROOT / "Makefile"), "READY=", "LAB=",
            f"BIN={Path(sys.executable).parent}", *arguments]


@pytest.fixture
def notebooks(tmp_path) -> Path:
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=JUNK)
    return tmp_path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ipynb"))


def test_lab_opens_copies_and_keeps_what_was_edited(notebooks):
    copies = make(notebooks, "lab-copies")
    original = (ROOT / "notebooks" / "memory.ipynb").read_text(encoding="utf-8")
    edited, untouched = notebooks / "lab" / "memory.ipynb", notebooks / "lab" / "warmup.ipynb"
    assert said(*copies).stdout == ""
    assert names_in(notebooks / "lab") == names_in(ROOT / "notebooks")

    edited.write_text("mine")
    assert said(*copies).stdout == ""
    assert (notebooks / "notebooks" / "memory.ipynb").read_text(encoding="utf-8") == original

    for name in ("memory", "warmup"):
        (notebooks / "notebooks" / f"{name}.ipynb").write_text("newer")
    told = said(*copies).stdout.splitlines()
    assert len(told) == 1 and "lab/memory.ipynb" in told[0]
    assert edited.read_text() == "mine" and untouched.read_text() == "newer"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_ignores_the_copies():
    assert said("git", "check-ignore", "lab/memory.ipynb", cwd=ROOT).returncode == 0


@pytest.mark.trials
def test_lab_starts_for_every_user_and_sees_the_copies(notebooks):
    places = {f"JUPYTER_{name}_DIR": str(notebooks / name) for name in ("CONFIG", "RUNTIME")}
    flags = "LAB_FLAGS=--no-browser --port 0 --ip 127.0.0.1"
    log = notebooks / "log"
    with log.open("w") as out:
        lab = subprocess.Popen(make(notebooks, "lab", flags), stdout=out, stderr=out, start_new_session=True,
                               env=os.environ | places)
    try:
        until, servers = time.monotonic() + 120, []
        while not servers and lab.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            servers = [*notebooks.glob("RUNTIME/jpserver-*.json")]
        assert servers, log.read_text(encoding="utf-8")
        server = json.loads(servers[0].read_text(encoding="utf-8"))
        assert Path(server["root_dir"]) == notebooks / "lab"
        status = f"{server['url']}api/status?token={server['token']}"
        with urllib.request.urlopen(status, timeout=60) as answer:
            assert "started" in json.load(answer)
    finally:
        os.killpg(lab.pid, signal.SIGKILL)
        lab.wait()

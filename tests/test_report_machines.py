"""Reports of other machines than the reference's: a CPU's own, a tour's, and one beside the reference."""
import re
from pathlib import Path

import pandas as pd
import pytest

import reports
from stepscope.model.accounting import GIB, peak
from stepscope.report import claims_across
from stepscope.report.claims import collect
from stepscope.report.left_out import TOPICS, not_measured
from stepscope.report.load import load
from stepscope.report.render import CHAPTERS, WITHOUT_GPU, Rendered, render
from stepscope.report.shipped import shipped
from stepscope.report.tables import all_of, listed, some_of
from stepscope.report.tables_across import key_numbers, with_reference
from stepscope.studies.ladder.rows import gain, largest_ladder
from stepscope.studies.memory.tables import predicted

CPU = Path(__file__).parent / "data" / "cpu"  # runs of `stepscope sweep cpu`, without their notebooks


def _rendered(runs: Path, out: Path) -> tuple[Rendered, str]:
    return render(runs, out), (out / "writeup.md").read_text()


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$|^\|.*$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    return *_rendered(CPU, out := tmp_path_factory.mktemp("cpu")), out


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    runs = reports.tour(folder / "runs")
    return *_rendered(runs, folder / "out"), folder / "out", runs


def test_a_cpu_has_chapters_of_its_own_and_nothing_of_a_gpus(cpu):
    rendered, text, out = cpu
    assert not rendered.errors
    titles = [path.read_text().partition("\n")[0] for path in sorted(WITHOUT_GPU.glob("*.md"))]
    assert [line for line in text.splitlines() if line.startswith(("# ", "## "))] == titles
    assert {path.name for path in out.glob("evidence/*")} == {"runs.md"} and not (out / "answers-2026.md").exists()
    assert "GPU time" not in text and not re.search(r"\b0\.\d+x", text), "a step that is slower is no gain"
    assert {"reference", "predicted_timeline", "norms"} == {path.stem for path in out.glob("figures/*")}


def test_of_a_whole_cpu_sweep_all_is_said_that_a_cpu_can_know(cpu):
    """What is missing does not hold here, or is of a precision that this processor's PyTorch lacks."""
    assert {one.name for one in cpu[0].omitted} <= {"health", "warmup_few", "warmup_enough", "norm_other"}
    assert all(line.count("stepscope sweep") <= 1 and "reference" not in line for line in cpu[0].left_out)


def test_what_a_gpu_would_hold_is_computed_and_what_a_block_saves_counted(cpu):
    said, config = claims_across.predicted_peak({}), predicted()
    assert said["peak"] == peak(config).allocated / GIB and config.device == "cuda"
    assert f"{said['peak']:.1f} GiB" in cpu[1]
    tables = load(CPU)
    counted = claims_across.block_saves_formula(tables)
    assert counted["tensors"] == 20
    rows = tables["memory.allocations"]
    more = tables | {"memory.allocations": rows.assign(mib=rows["mib"] + 1 / 2**20)}
    assert claims_across.block_saves_formula(more) is None, "a byte more a tensor"


def test_a_tour_says_first_what_it_is_of_and_what_it_leaves_out(tour):
    rendered, text, out, runs = tour
    assert not rendered.errors
    first = text.partition("\n\n")[2].partition("\n")[0]
    assert all(words in first for words in ("2 of the handout's 5 sizes, small and 2.7B", "medium, large and xl", *TOPICS.values()))
    place = re.search(r"`stepscope sweep reference --runs (\S+)`", first)[1]
    assert (out / place).samefile(runs)
    assert "Not measured here" not in text, "no chapter lacks all of its studies"
    assert len(rendered.left_out) == 1 and not re.search(r"\w_\w", rendered.left_out[0])


def test_one_measured_case_is_told_as_one(tour):
    for page in [*tour[2].glob("*.md"), *tour[2].glob("evidence/*.md")]:
        text = _prose(page.read_text())
        assert not re.findall(r"[^.\n]*\b(?:1 of 1|all [12]|0 repeats|([\d.,]+x?) to \1)\b[^.\n]*", text), page.name
    assert not re.findall(r"^#{2,} .*\n+(?=#{1,2} |\Z)", tour[1], re.MULTILINE), "a heading with nothing below it"


@pytest.mark.parametrize("name", ["fused_adamw", "compile_gain", "precision_launch", "answer_attention_growth", "answer_attention_half",
                                  "attention_growth_why", "gradients_off", "memory_formula"])
def test_what_a_tour_measured_is_said_of_it(tour, name):
    assert name not in {one.name for one in tour[0].omitted}


@pytest.mark.parametrize("name", ["rung_graph", "snapshot_kept", "fair_peer", "mixed_memory_long", "compile_then"])
def test_what_a_tour_lacks_is_not_said_of_it(tour, name):
    assert name in {one.name for one in tour[0].omitted}


def test_a_gain_below_its_own_noise_is_none(tour):
    """As a rented H200's first tour had it: four steps of 124 and 131 ms that differed by 13 and 15."""
    shape, rows = largest_ladder(load(tour[3]))
    changed = rows.drop(columns=["wall_q1_ms", "wall_q3_ms"], errors="ignore").assign(busy=0.99)
    for spread, told in ((13.4, False), (1.5, True)):
        changed.loc["blocks", ["wall_ms", "wall_std_ms"]] = 124.0, spread
        changed.loc["cuda_graph", ["wall_ms", "wall_std_ms"]] = 131.0, spread
        assert (gain(changed, "cuda_graph") is not None) == told, shape


def test_topics_are_tags_of_the_chapters():
    pages = "".join(path.read_text() for path in CHAPTERS.rglob("*.md"))
    assert all(name in collect(kind) and f"{{% {kind} {name} %}}" in pages for kind, name in TOPICS)


def test_of_a_study_without_runs_no_topic_is_missed(tmp_path):
    runs = reports.few(tmp_path / "runs", 1, ("benchmark",))
    said = render(runs, tmp_path / "out").left_out[-1]
    assert TOPICS["table", "repeats"] in said and TOPICS["table", "reach_10b"] not in said
    assert not_measured({}, []) == []


def test_a_host_is_told_where_all_runs_had_the_same():
    runs = pd.DataFrame({"machine_cpu": ["Xeon", "Xeon"], "machine_cpu_cores": [16, 16], "driver": ["580.1", "580.1"]})
    assert claims_across.measured_host({"runs": runs}) == {"cpu": "Xeon", "cores": 16, "driver": "580.1"}
    for other in (runs.assign(machine_cpu=["Xeon", "EPYC"]), runs.assign(driver=None)):
        assert claims_across.measured_host({"runs": other}) is None


def test_a_machine_stands_beside_the_reference_of_the_same_gpu_alone(tour):
    tables = load(tour[3])
    there = pd.DataFrame(shipped()["key_numbers"])
    assert {"TFLOP/s", "TB/s", "us", "ms"} == set(there["unit"]) and (key_numbers(tables)["value"] > 0).all()
    assert with_reference(tables)["speed"].between(0.9, 1.1).all()
    assert claims_across.beside_reference(tables) is None and claims_across.beside_reference_alike(tables)
    assert "as fast as it should be?" in tour[1]
    slow = tables | {"ladder.steps": tables["ladder.steps"].assign(wall_ms=2 * tables["ladder.steps"]["wall_ms"])}
    said = claims_across.beside_reference(slow)
    assert said["speed"] == pytest.approx(0.5, rel=0.1) and "all changes" in said["what"]
    assert claims_across.beside_reference_alike(slow) is None
    for others in (tables | {"runs": tables["runs"].assign(device="NVIDIA H100")}, load(reports.RUNS)):
        with pytest.raises(LookupError):
            with_reference(others)


def test_counts_and_lists_in_words():
    assert [all_of(count) for count in (1, 2, 22)] == ["the one", "both", "all 22"]
    assert [some_of(*pair) for pair in ((0, 2), (2, 2), (1, 2))] == ["none of the 2", "both", "1 of the 2"]
    assert [listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]

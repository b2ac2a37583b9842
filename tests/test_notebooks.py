"""What the notebooks show: readings that say no more than was measured, pictures, and a second Run All."""
import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from stepscope.runs.one_run import NOTEBOOKS
from stepscope.say import run_figures
from stepscope.say.formats import number, percent, percent_span, share, signed_percent
from stepscope.say.source import source_of
from stepscope.studies.compile import figures as of_compile
from stepscope.studies.compile import measure as of_compiled
from stepscope.studies.nsys import figures as of_nsys
from stepscope.studies.processes import measure as processes
from stepscope.studies.warmup import measure as warmup


@pytest.mark.parametrize(("given", "decimals", "printed"), [
    (0.5, 0, "50%"), (0.0317, 1, "3.2%"), (0.0, 2, "0%"), (0.004, 0, "0.4%"), (3.2e-5, 2, "0.003%"),
    (-0.0004, 0, "-0.04%"), (1e-15, 2, "0%"), (0.0096, 0, "1%"),
])
def test_a_share_is_0_percent_only_where_it_is_none(given, decimals, printed):
    assert percent(given, decimals) == printed


def test_a_number_that_is_rounded_up_has_no_digit_more():
    assert [number(value) for value in (9.996, 9.994, 0.0999951, 99.96)] == ["10.0", "9.99", "0.100", "100"]
    assert number(19_073) == "19,073" and number(0.00996, 1) == "0.01"


def test_small_shares_in_spans_and_with_signs():
    assert percent_span([0.0, 0.003]) == "0% to 0.3%"
    assert (signed_percent(0.0004, 1), signed_percent(-0.0004, 1), signed_percent(0.0, 1)) == ("+0.04%", "-0.04%", "0%")
    assert share(float("nan")) == "–"


class Documented:
    """What it is for.

    Raises:
        ValueError: never.
    """

    def first(self):
        def inner():
            """Inner words.

            Raises: nothing.
            """
            return "kept\n\nall of it"
        return inner()

    def second(self):
        """Second words,
        in two lines.

        Raises: nothing.
        """
        return 2


def test_shown_source_has_all_of_the_code_and_the_first_words_of_docstrings():
    shown = source_of(Documented)
    assert '"""What it is for."""' in shown and '"""Inner words."""' in shown and "Raises" not in shown
    assert 'in two lines."""' in shown
    names: dict = {}
    exec(shown, names)
    made = names["Documented"]()
    assert (made.first(), made.second()) == (Documented().first(), 2)


def steps_of(times_ms, warmups):
    rows = [(step, step >= warmups, phase, ms, 0.5 * ms) for step, ms in enumerate(times_ms)
            for phase in ("forward", "backward", "step")]
    return pd.DataFrame(rows, columns=["step", "timed", "phase", "time_ms", "enqueue_ms"])


def test_long_warm_up_steps_do_not_flatten_the_timed_ones():
    axis = run_figures.steps(steps_of([900.0, 12.0, 10.0, 11.0, 10.0], 1), "here").axes[0]
    assert axis.get_ylim()[1] < 20 and "900 ms" in {text.get_text() for text in axis.texts}
    assert "10.5 ms" in axis.get_title(loc="left")
    alike = run_figures.steps(steps_of([12.0, 12.0, 10.0], 1), "here").axes[0]
    assert alike.get_ylim()[1] > 20  # phases above one another: none is cut


@pytest.mark.parametrize("fresh", [True, False])
def test_warmup_says_where_a_process_was_not_fresh(fresh):
    samples = steps_of([90.0] + [10.0] * 9, 0)
    costs = warmup.first_costs(samples, {warmup.IMPORTED: 3000.0} if fresh else {}, {"optimizer state": 5.0})
    said = warmup.reading(samples, costs)
    assert "80.0 ms more" in said and "From step 2 on" in said
    assert ("restart its kernel" in said) != fresh
    wild = steps_of([90.0] + [10.0] * 8 + [30.0], 0)
    costs = warmup.first_costs(steps_of([5.0] + [10.0] * 9, 0), {"model and optimizer": 2.0}, {})
    assert "takes 5.00 ms less" in run_figures.first_costs(costs, "here").axes[0].get_title(loc="left")
    assert "do not settle" in warmup.reading(wild, warmup.first_costs(wild, {}, {}))


def compiled_times(block_ms, half):
    rows = [("eager", variant, "step", "step", ms, ms - half, ms + half)
            for variant, ms in (("eager", 10.0), ("block", block_ms))]
    return pd.DataFrame(rows, columns=["attention", "variant", "mode", "phase", "median_ms", "ci_low_ms",
                                       "ci_high_ms"])


@pytest.mark.parametrize(("block_ms", "half", "said", "title"), [
    (5.0, 1.0, "2.00x faster than eager", "is 2.00x faster than eager"),
    (5.0, 4.0, "not surely faster than eager", "No variant is surely faster"),
    (20.0, 1.0, "written-out eager **10.0 ms**", "No variant is surely faster"),
])
def test_compiling_is_said_to_be_faster_only_where_the_intervals_tell(block_ms, half, said, title):
    times = compiled_times(block_ms, half)
    assert said in of_compiled.reading(times)
    assert title in of_compile.one_run(times, "here").get_suptitle()


def test_the_largest_family_of_the_whole_step_is_named():
    rows = [("step", "forward", "ffn", "matrix multiply", 70), ("step", "optimizer", "optimizer", "elementwise", 30)]
    operations = pd.DataFrame(rows, columns=["mode", "phase", "region", "family", "total_ns"])
    title = of_nsys.families(operations, "here").axes[0].get_title(loc="left")
    assert "Full step: 70% of the device time is matrix multiply" in title


def test_processes_names_the_widest_cell():
    samples = pd.concat([steps_of([10.0, 10.0, 30.0], 0).assign(size="nano", context_length=32, mode="step"),
                         steps_of([10.0, 10.0, 90.0], 0).assign(size="nano", context_length=64, mode="forward")])
    assert "context 64, forward, takes 9.00 times" in processes.reading(samples)
    axis = processes.spread_of_steps(samples, "here").axes[0]
    assert "9.00 times" in axis.get_title(loc="left")
    assert [label.get_text() for label in axis.get_yticklabels()] == ["nano, 32, full step", "nano, 64, forward"]


def test_a_second_run_all_is_right_or_says_why_not():
    """In one kernel; the warm-up is what a second run cannot measure."""
    notebook = nbformat.read(NOTEBOOKS / "warmup.ipynb", as_version=4)
    client, said = NotebookClient(notebook, timeout=300), []
    with client.setup_kernel():
        for _ in range(2):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
            assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
            assert not [output for output in outputs if output.get("name") == "stderr"]
            said.append(outputs[-1]["data"]["text/markdown"])
    assert "restart its kernel" not in said[0] and "restart its kernel" in said[1]

"""How far to trust a timing: the main text's facts on data made for it, and on the committed warm-up runs."""
import pandas as pd
import pytest

from reference import tables
from stepscope.report.story import trust, trust_facts
from stepscope.report.story.part import tell
from stepscope.report.story.trust_figures import apart

NONE = pd.DataFrame()


def spreads(**ranges):
    """Full steps that six processes repeated: the slowest over the fastest, by size; each within 1%."""
    rows = [{"size": size, "context_length": 128, "mode": "step", "phase": "step", "processes": 6,
             "median_ms": 10.0, "within_share": 0.01, "between_share": share / 2, "range_share": share,
             "host_ahead_share": 0.0} for size, share in ranges.items()]
    return pd.DataFrame(rows)


SAMPLES = pd.DataFrame({"study": ["processes"], "run_id": ["process0"]})


def repeats(spread, warmups=NONE):
    return trust_facts.repeats(spread, SAMPLES, warmups, NONE, NONE, NONE, NONE, NONE, NONE)


def test_processes_that_differ_more_than_one_shows_are_told_of():
    found = repeats(spreads(small=0.9, large=0.02))["apart"]
    assert (found["widest"]["size"], found["least"]["size"]) == ("small", "large") and found["hidden"]
    assert not repeats(spreads(small=0.9, large=0.005))["apart"]["hidden"]
    assert not found["waiting"]  # no profile tells who waits


def test_others_beside_the_runs_that_measured_the_spread_are_told_of():
    for beside, each in ((0, None), (1, True)):
        samples = pd.DataFrame({"study": "processes", "run_id": ["a", "b"], "beside": beside})
        found = trust_facts.repeats(spreads(small=0.9), samples, *[NONE] * 7)["apart"]["neighbours"]
        assert found is None if each is None else found == {"runs": 2, "beside": 2, "each": True}


def test_who_waits_is_told_of_the_ends_where_captures_tell():
    cells = trust_facts.step_spreads(spreads(small=0.9, large=0.4, xl=0.02))
    calm = {("small", 128, "step"): True, ("large", 128, "step"): False, ("xl", 128, "step"): False}
    assert trust_facts._apart(cells, calm)["waiting"] and not trust_facts._apart(cells, {})["waiting"]


def eager(by, **ms):
    """Eager full steps in bf16 as a study has them: a row a size."""
    return pd.DataFrame([{"mode": "step", "phase": "step", "precision": "bf16", "status": "ok", "device": "cuda",
                          "optimizer": "foreach", "compile": False, "batch_size": 4, "context_length": 512,
                          "size": size, "attention": "eager", "median_ms": value, "sm_clock_mhz": 1980.0,
                          "study": by, "run_id": size} for size, value in ms.items()])


def test_one_step_is_compared_over_the_studies_that_timed_it():
    low, compiled = eager("mixed_precision", small=20.0, large=100.0, xl=200.0), eager("compile", small=50.0, large=101.0)
    rungs = pd.DataFrame([{"rung": "bf16", "size": "small", "context_length": 512, "vocab_size": 10_000, "status": "ok",
                           "batch": 4.0, "median_ms": 30.0, "fastest_ms": 25.0, "slowest_ms": 40.0, "sm_clock_mhz": 1900.0,
                           "runs": "ladder/a; ladder/b"}])
    found = trust_facts.hosts(low, compiled.assign(variant="eager"), rungs, NONE)
    assert (found["most"]["size"], found["most"]["times"], found["most"]["needs_ms"]) == ("small", 2.5, None)
    assert (found["apart"], found["alike"], found["clocks_alike"]) == (["small"], ["large"], False)
    small = {by: ms for (size, _, by), ms in found["ms"].items() if size == "small"}
    assert small == {"precisions": [20], "compile": [50], "ladder": [25, 40]}
    assert {"ladder/b", "compile/small"} <= set(found["runs"])
    assert "xl" not in set(trust_facts.printed_hosts(found)["size"])  # one study alone compares nothing
    again = trust_facts.hosts(low, compiled.assign(variant="eager"), rungs, NONE, low.assign(median_ms=90.0))
    assert again["ms"][("small", "eager", "precisions")] == [20, 90] and again["most"]["high_ms"] == 90
    assert "20.0, 90.0" in trust_facts.printed_hosts(again)["written out: precisions (ms)"].tolist()
    assert trust_facts.hosts(low, compiled.assign(variant="block"), NONE, NONE) is None
    assert trust_facts.hosts(low.assign(device="cpu"), compiled.assign(variant="eager"), NONE, NONE) is None
    assert trust_facts.hosts(NONE, NONE, NONE, NONE) is None


def test_two_processes_make_no_spread_and_nothing_measured_says_nothing():
    assert repeats(spreads(small=0.9).assign(processes=2)) is None and repeats(NONE) is None
    assert apart(spreads(small=0.9).assign(processes=2), "a GPU") is None


def test_the_title_and_the_bars_of_the_picture_are_what_was_found():
    bars = apart(spreads(small=0.4, large=0.02), "a GPU").axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([40, 2])
    one, two = (apart(table, "a GPU").get_suptitle() for table in
                (spreads(small=0.9), spreads(small=0.4, large=0.02)))
    assert "small at 128 differs by 90%" in one and "large" not in one
    assert "40%" in two and "large at 128 by 2.0%" in two


def test_settled_processes_are_those_with_one_slow_step_at_most():
    samples = tables("warmup")["samples"]
    slow = repeats(NONE, samples)["slow"]
    steps = samples[(samples["phase"] == "step") & (samples["precision"] == "fp32")]
    fresh = [rows.sort_values("step")["time_ms"].to_numpy() for _, rows in steps[
        ~steps["profile"].astype(bool) & ~steps["one_layer_first"].astype(bool)].groupby("run_id")]
    late = 0
    for times in fresh:
        steady = pd.Series(times[-(len(times) // 2):]).median()
        late += times[1] > (1 + slow["share"]) * steady
    assert slow["processes"] == len(fresh) and slow["settled"] == len(fresh) - late


def rungs(*clocks, throttle="power_cap"):
    return pd.DataFrame([{"size": "2.7B", "context_length": 512, "rung": f"rung{i}", "sm_clock_mhz": mhz,
                          "throttle": throttle if mhz < 1980 else ""} for i, mhz in enumerate(clocks)])


def clocks(ladder=NONE, compiled=NONE, speedups=NONE):
    return trust_facts.clocks_and_profilers(ladder, compiled, speedups, *[NONE] * 3)


def test_clocks_held_back_are_found_with_their_reason():
    held = clocks(rungs(1980.0, 1965.0, 1584.0))["held"]
    assert held["rungs"] == 1 and held["below"] == pytest.approx(0.2) and held["by_power"]
    assert not clocks(rungs(1980.0, 1584.0, throttle="thermal"))["held"]["by_power"]
    assert clocks(rungs(1980.0, 1965.0)) is None  # within two of the clock's own steps
    assert clocks(rungs(float("nan"))) is None and clocks() is None


def test_a_gain_is_understated_only_where_the_faster_side_had_the_lower_clock():
    pair = {"phase": "step", "size": "2.7B", "context_length": 512, "speedup": 3.0, "fp32_mhz": 1980.0, "sm_clock_mhz": 1900.0,
            "unlike_clocks": True}
    pairs = pd.DataFrame([pair, pair | {"unlike_clocks": False}])
    found = clocks(speedups=pairs)
    assert found["understated"] and (found["touched"][0]["pairs"], found["touched"][0]["of"]) == (1, 2)
    assert not clocks(speedups=pairs.assign(speedup=0.9))["understated"]
    assert clocks(speedups=pairs.assign(unlike_clocks=False)) is None


def test_without_a_gpu_nothing_is_said_of_one():
    names = {name for question in trust.PART.questions for name in (*question.needs, *question.uses)}
    times = pd.DataFrame([{"study": "benchmark", "run_id": "a", "status": "ok", "device": "cpu",
                           "warmup_steps": 2, "timed_steps": 5, "precision": "fp32", "phase": "step",
                           "sm_clock_mhz": float("nan")}])
    empty = dict.fromkeys(names, NONE)
    assert tell(trust.PART, empty) == []
    answers = tell(trust.PART, empty | {"benchmark.times": times})
    assert [one.key for one in answers] == ["trust-recipe"]
    assert not any(word in answers[0].text for word in ("GPU", "cuda", "nvidia"))
    gpu = tell(trust.PART, empty | {"benchmark.times": times.assign(device="cuda")})
    assert "cuda" in gpu[0].text


def test_a_capture_is_clearly_slower_only_beyond_what_steps_differ_by():
    index = pd.MultiIndex.from_tuples([("small", 128), ("large", 128)], names=["size", "context_length"])
    table = lambda plain, captured: pd.DataFrame(  # noqa: E731
        {("plain", "step"): plain, ("captured", "step"): captured}, index=index)
    told = {"slowdowns": table([10.0, 10.0], [13.0, 10.4]), "spreads": table([0.1, 0.0], [0.2, 0.0]),
            "slowdown": {"nearly": 0.05}}
    assert trust_facts._clearly_slower(told) == 1
    wide = told | {"spreads": table([0.5, 0.0], [0.2, 0.0])}
    assert trust_facts._clearly_slower(wide) == 0

"""The profiling study's facts on the committed profiles and on data changed; its words follow."""
import re
import warnings
from pathlib import Path

import pandas as pd
import pytest

from reference import answered, changed
from reference import tables as of_study
from stepscope.say.selections import pick
from stepscope.say.words import Words
from stepscope.studies.nsys import facts, facts_claims, facts_regions, figures, printed
from stepscope.traces.families import MATMUL

PROFILES = 20  # five sizes at four contexts
OF_CLAIMS = ("operations", "operations_low", "regions", "clocks", "walls")
WORDS = Path(facts.__file__).parent / "words"


@pytest.fixture(scope="module")
def tables():
    return of_study("nsys")


@pytest.fixture(scope="module")
def operations(tables):
    return tables["operations"]


@pytest.fixture(scope="module")
def times():
    return of_study("benchmark")["times"]


@pytest.fixture(scope="module")
def ceilings():
    return of_study("benchmark")["ceilings"]


def small(table):
    return (table["size"] == "small") & (table["context_length"] == 512)


def slower(clocks):
    """Clocks as if the device had taken half as long again for forward."""
    return changed(clocks, lambda t: t["phase"] == "forward", projected_ns=lambda t: t["projected_ns"] * 1.5)


def faster_softmax(operations, times):
    """Operations as if softmax had been so many times faster."""
    return changed(operations, lambda t: t["region"] == "attention.softmax",
                   total_ns=lambda t: t["total_ns"] // times)


def without(table, mode):
    """A table as if that mode of the smallest model had run out of memory at every context."""
    return table[(table["size"] != "small") | (table["mode"] != mode)].reset_index(drop=True)


def clocked(tables, **replaced):
    """forward_total of the committed profiles, some tables replaced."""
    given = tables | replaced
    return facts.forward_total(given["clocks"], given["walls"])


def test_clocks_of_plain_and_captured_steps_are_compared_where_they_were_read(tables, times):
    assert facts.clocks_beside_captured(tables["walls"].drop(columns="sm_clock_mhz", errors="ignore")) is None
    walls = tables["walls"].assign(sm_clock_mhz=1980.0)
    alike, [own, *_] = facts.clocks_beside_captured(walls), walls["run_id"].unique()
    assert alike["read"] > 3 and alike["unlike"] == 0
    late = (walls["run_id"] == own) & (walls["capture"] == "captured")
    lower = walls.assign(sm_clock_mhz=walls["sm_clock_mhz"].where(~late, 1800.0))
    assert facts.clocks_beside_captured(lower) == alike | {"unlike": walls.loc[late, "mode"].nunique()}
    assert phased(tables, times, walls=lower)["clocks"]["unlike"]


def phased(tables, times, **replaced):
    given = tables | replaced
    return facts.every_phase(given["phases"], given["operations"], given["walls"], times)


def test_whether_clocks_match_is_decided_by_the_data(tables):
    found = clocked(tables)
    assert found["unprofiled"]["match"] and found["measures_the_host"] and not found["host_does_the_work"]
    assert found["operations_ms"] <= found["projected_ms"] and len(printed.clocks(found)) == PROFILES
    plain = tables["walls"].loc[tables["walls"]["capture"] == "plain", "run_id"].nunique()
    slow = slower(tables["clocks"])
    later = clocked(tables, clocks=slow)
    assert not later["unprofiled"]["match"]
    for one in (found["slowdown"], later["slowdown"]):
        assert one["passes"] == one["matched"] + len(one["told"]) + len(one["untold"]) == plain > 0
    assert len(later["slowdown"]["mismatches"]) > len(found["slowdown"]["mismatches"])
    busy = changed(tables["clocks"], lambda t: t["phase"] == "forward", host_ns=lambda t: t["projected_ns"])
    assert clocked(tables, clocks=busy)["host_does_the_work"]


def test_a_mismatch_is_told_where_it_is_more_than_passes_differ(tables):
    slow, walls = slower(tables["clocks"]), tables["walls"]
    steady = walls.assign(time_ms=walls.groupby(["run_id", "mode", "phase", "capture"])["time_ms"].transform("median"))
    told = clocked(tables, clocks=slow, walls=steady)["slowdown"]
    assert told["told"] and not told["untold"]
    loose = changed(steady, lambda t: t["step"] % 2 == 0, time_ms=lambda t: t["time_ms"] * 9)
    assert not clocked(tables, clocks=slow, walls=loose)["slowdown"]["told"]
    gaps = clocked(tables, clocks=slow.assign(operations_ns=0))["slowdown"]
    assert gaps["gaps_alone"] and not clocked(tables, clocks=slow.assign(
        operations_ns=slow["projected_ns"]))["slowdown"]["gaps_alone"]


def without_plain(tables):
    """The profiles as those of before, which had no plain steps of the same process."""
    return tables | {"walls": tables["walls"][tables["walls"]["capture"] != "plain"]}


def test_without_plain_steps_of_the_process_nothing_is_said_of_the_profilers_cost(tables):
    """The benchmark's times are another process's: no clock is held against them."""
    tables = without_plain(tables)
    nothing = clocked(tables)
    assert nothing["unprofiled"] is None and nothing["slowdown"] is None
    assert printed.slowdowns(nothing).iloc[0, 2].startswith("– / ")
    claims = facts_claims.claims_beside(*(tables[name] for name in OF_CLAIMS))
    assert "nan" not in printed.claims(claims).to_csv()


def plain_steps(tables, times_as_long=1.0):
    """Walls as newer runs have them: plain and annotated steps of the same process, by phase."""
    captured = pick(tables["walls"], capture="captured", phase="step")
    phases = tables["phases"][tables["phases"]["run_id"].isin(captured["run_id"])]
    runs = captured[["run_id", "size", "context_length", "study"]].drop_duplicates()
    rows = phases[["run_id", "mode", "phase", "operations_ms"]].merge(runs, on="run_id")
    phase_rows = rows.assign(capture="plain", time_ms=rows["operations_ms"] * times_as_long)
    wholes = [captured.assign(capture=kind, time_ms=captured["time_ms"] * share)
              for kind, share in (("plain", 0.8), ("annotated", 0.9), ("captured", 1.0))]
    return pd.concat([phase_rows, *wholes], ignore_index=True)


def test_plain_annotated_and_captured_steps_of_one_process_are_compared(tables, times):
    tables = without_plain(tables)
    profiles = tables["operations"]["run_id"].nunique()
    walls = plain_steps(tables, 2)
    found = clocked(tables, walls=walls)
    of_captured, of_plain = found["spreads"]["captured"], found["spreads"]["plain"]
    assert of_plain.to_numpy() == pytest.approx(of_captured.to_numpy()) and (of_plain > 0).all().all()
    wider = changed(walls, lambda t: t["capture"] == "annotated", time_ms=lambda t: t["time_ms"] * (1 + t["step"] % 2))
    spreads = clocked(tables, walls=wider)["spreads"]
    assert (spreads["annotated"] > 0.4).all().all() and spreads["plain"].equals(of_plain)
    cost = found["slowdown"]
    assert cost["annotated"]["most"]["ratio"] == pytest.approx(9 / 8)
    assert cost["captured"]["most"]["ratio"] == pytest.approx(10 / 9)
    assert cost["together"]["slower"] == cost["together"]["steps"] == 3 * profiles
    assert cost["annotated"]["steps"] == 3 * profiles
    again = walls.duplicated(["run_id", "mode", "phase", "capture"])
    none = clocked(tables, walls=walls[~again | (walls["capture"] != "annotated")])["slowdown"]
    assert none["annotated"] is None  # one step is no median
    shares = phased(tables, times, walls=walls)["busy"]
    assert all(part["share"].round(9).eq(0.5).all() for part in shares)


def test_the_words_on_clocks_follow_the_facts(tables):
    def said(**replaced):
        return Words(WORDS, "nsys-a.md").block("text", clocked(tables, **replaced))
    assert "do not match" in said(clocks=slower(tables["clocks"])) and "do not match" not in said()
    assert "match" not in said(walls=without_plain(tables)["walls"])


def test_phases_are_in_their_order(tables, times):
    found = phased(tables, times)
    assert [part["phase"] for part in found["busy"]] == ["forward", "backward", "optimizer"]
    assert list(found["by_phase"]["phase"][:3]) == ["forward", "backward", "optimizer"]
    assert list(printed.phases(found))[2:] == ["forward", "backward", "optimizer"]
    forward = tables["phases"][tables["phases"]["mode"] == "forward"]
    assert phased(tables, times, phases=forward) is None


def test_who_waits_is_counted_over_the_long_phases(tables, times):
    tables = without_plain(tables)
    found = phased(tables, times)
    assert sum(found[part] for part in ("full", "waiting", "neither")) == found["long"] > 0
    assert phased(tables, times, phases=tables["phases"].assign(spread=0.5))["differ"] == 0.5 > found["differ"]
    deep = phased(tables, times, phases=tables["phases"].assign(deepest=1022.0))
    assert deep["full"] == deep["long"] and deep["waiting"] == 0
    shallow = tables["phases"].assign(deepest=1.0)
    late = phased(tables, times.assign(median_ms=times["median_ms"] * 3), phases=shallow)
    assert late["waiting"] == late["long"]
    unknown = phased(tables, times.iloc[:0], phases=shallow)
    assert unknown["waiting"] == unknown["full"] == unknown["neither"] == 0 and not unknown["busy"]
    assert "not known" in Words(WORDS, "nsys-phases.md").block("text", unknown)
    assert printed.phases(unknown)["backward"].str.endswith("not decided").all()


def test_backward_over_forward_is_by_products_and_the_rest(operations):
    found = facts.backward_over_forward(operations)
    twice = changed(operations, lambda t: (t["phase"] == "backward") & (t["family"] == MATMUL),
                    total_ns=lambda t: t["total_ns"] * 2)
    again = facts.backward_over_forward(twice)
    assert list(again["products"]) == pytest.approx(list(found["products"] * 2))
    assert list(again["rest"]) == pytest.approx(list(found["rest"]))
    low, high = found["rest"].combine(found["products"], min), found["rest"].combine(found["products"], max)
    assert ((low <= found["all"]) & (found["all"] <= high)).all()
    assert facts.backward_over_forward(operations[operations["mode"] == "forward"]) is None
    assert facts.backward_over_forward(operations.assign(family="other")) is None


def test_the_first_kernel_and_its_launches_follow_the_data(operations):
    found = facts.top_kernel(operations)
    assert (found["launches"], found["layers"]) == (61, 12)
    assert found["profiles"] == found["common"] == PROFILES
    assert sum(part["launches"] for part in found["parts"]) == found["launches"]
    assert {part["region"]: part["a_layer"] for part in found["parts"]}["head"] is None
    assert not found["both"]["same"] and (found["first"]["family"] == MATMUL).all()
    assert found["fractional"] == 0
    renamed = changed(operations, lambda t: (small(t) & (t["region"] == "attention.softmax")
                                             & (t["phase"] == "forward")),
                      name="one_big_softmax", total_ns=lambda t: t["total_ns"] * 100)
    other = facts.top_kernel(renamed)
    assert other["kernel"] == "one_big_softmax" and other["both"]["same"]
    assert other["kept"] == found["kept"] + 1
    shortened = facts.top_kernel(operations.assign(name="void a::gemm<" + operations["name"] + ">(int)"))
    assert shortened["kernel"] in shortened["names"] and found["kernel"] not in found["names"]
    assert printed.names(found) is None and len(printed.names(shortened)) == len(shortened["names"])
    assert other["parts"] == [{"region": "attention.softmax", "launches": 60, "a_layer": 5}]
    table = printed.first_kernels(other).set_index(["size", "context"])
    assert table.loc[("small", 512), "first in fwd + bwd"] == "same"


def test_kernels_that_do_not_run_in_every_pass_are_counted(operations):
    uneven = changed(operations, lambda t: small(t) & (t["mode"] == "forward") & (t["region"] == "head"),
                     name="now_and_then", count=lambda t: t["count"] + 1)
    assert facts.top_kernel(uneven)["fractional"] > 0


def test_what_is_no_matrix_product_follows_the_data(operations):
    found = facts.not_matmul(operations)
    assert 0 < found["rest_share"] < 1 and found["rest_share"] <= found["rest_shares"].max()
    assert sum(part["share"] for part in found["families"]) == pytest.approx(found["rest_share"], abs=0.02)
    assert (found["kernels"]["share"] > found["nontrivial"]).all()
    assert MATMUL not in set(found["kernels"]["family"])
    assert found["shares"].sum(axis=1).round(9).eq(1).all() and found["shares"].columns[0] == MATMUL
    half = facts.not_matmul(changed(operations, lambda t: t["family"] == MATMUL,
                                    total_ns=lambda t: t["total_ns"] // 2))
    assert (half["rest_shares"] > found["rest_shares"]).all()
    assert len(half["kernels"]) >= len(found["kernels"])
    softmax = pick(operations, mode="forward", phase="forward", region="attention.softmax")
    time = softmax.groupby(["size", "context_length"], observed=True)["total_ns"].sum()
    whole = pick(operations, mode="forward", phase="forward").groupby(["size", "context_length"],
                                                                        observed=True)["total_ns"].sum()
    assert list(found["softmax_shares"]) == pytest.approx(list(time / whole))
    assert list(found["shares"]["attention softmax"]) == pytest.approx(list(time / whole))
    only = facts.not_matmul(operations[operations["family"] == MATMUL])
    assert only["families"] == [] and only["rest_share"] == 0 and printed.kernels(only).empty


def test_what_a_full_step_changes_follows_the_data(operations):
    found = facts.full_step(operations)
    assert found["gained"][0]["family"] == "optimizer"
    assert found["gained"] == sorted(found["gained"], key=lambda part: -part["points"])
    assert 0 < found["falls"] <= found["profiles"] == PROFILES
    for own in found["by_context"]:
        assert len(own["optimizer"]) == 5 and own["low_points"] <= own["high_points"]
    assert found["falls_without"] <= found["falls"]
    assert "loss softmax" in set(facts.by_family(operations)["family"])
    cell = printed.step_families(found).set_index(["size", "context"])[MATMUL]["small", 512]
    assert cell == f"{found['own_before']:.1%} → {found['own_after']:.1%}"
    none = facts.full_step(operations[operations["phase"] != "optimizer"])
    assert "optimizer" not in [part["family"] for part in none["gained"]]
    assert all(own["optimizer"].max() == 0 for own in none["by_context"])


def test_a_profile_without_its_step_is_no_profile_of_nothing_but_zeros(operations):
    found = facts.full_step(without(operations, "step"))
    assert found["profiles"] == PROFILES - 4 and found["size"] == "medium" and found["own_after"] > 0.5
    assert facts.full_step(operations[operations["mode"] == "forward"]) is None


def test_where_forward_could_not_be_captured_another_profile_is_spoken_of(tables, times, ceilings):
    clocks, operations = (without(tables[name], "forward") for name in ("clocks", "operations"))
    given = tables | {"operations": operations, "clocks": clocks}
    claims = facts_claims.claims_beside(*(given[name] for name in OF_CLAIMS))
    assert "nan" not in printed.claims(claims).to_csv()
    assert {row["claim"].measure for row in claims["claims"] if row["claim"].size == "small"} == {"scores_gflop"}
    found = [clocked(tables, clocks=clocks), facts.top_kernel(operations),
             facts.not_matmul(operations), facts.full_step(operations),
             facts_regions.softmax_against_matmul(operations, ceilings, times),
             facts_regions.regions_against_floors(operations, ceilings, times)]
    assert "small" not in {answer["size"] for answer in found}


def softmaxed(operations, ceilings, times):
    return facts_regions.softmax_against_matmul(operations, ceilings, times)


def test_softmax_against_products_follows_the_data(operations, ceilings, times):
    found = softmaxed(operations, ceilings, times)
    own = found["own"]
    assert own["time_ratio"] > 1 > own["flops_ratio"] and found["slower"] == found["profiles"] == PROFILES
    assert own["bytes_ratio"] > 1 and own["projected_ratio"] < own["time_ratio"]
    assert softmaxed(faster_softmax(operations, 10), ceilings, times)["slower"] == 0
    assert softmaxed(operations, ceilings.iloc[:0], times.iloc[:0])["operations"] is None


def test_a_capture_whose_softmax_is_in_no_operation_is_not_compared(operations, ceilings, times):
    smallest = operations["size"].iloc[0]
    without = operations[(operations["region"] != "attention.softmax") | (operations["size"] != smallest)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = softmaxed(without, ceilings, times)
    assert found["size"] != smallest and 0 < found["profiles"] < PROFILES
    assert softmaxed(without[without["size"] == smallest], ceilings, times) is None


def test_softmax_is_told_by_operation(operations, ceilings, times):
    found = softmaxed(operations, ceilings, times)
    parts = {part["operation"]: part for part in found["operations"]}
    assert list(parts) == ["maximum", "subtract", "exponentiate", "sum", "divide"]
    assert parts["exponentiate"]["at_copys_rate"] and not parts["divide"]["at_copys_rate"]
    rates = found["rates"]
    time = rates.groupby(["size", "context_length"], observed=True)["time_ms"].sum()
    assert list(time) == pytest.approx(list(found["parts"]["softmax_ms"]))  # the five are all of it
    slow = changed(operations, lambda t: t["name"].str.contains("exp_kernel"), total_ns=lambda t: t["total_ns"] * 2)
    other = {part["operation"]: part for part in softmaxed(slow, ceilings, times)["operations"]}
    assert not other["exponentiate"]["at_copys_rate"]
    assert list(other["exponentiate"]["share"]) == pytest.approx(list(parts["exponentiate"]["share"] / 2))
    assert list(other["sum"]["share"]) == list(parts["sum"]["share"])


def test_sdpa_is_compared_with_the_written_out_attention_of_the_same_precision(tables, ceilings, times):
    names = ("operations", "operations_low", "operations_fused")
    written, low, fused = (tables[name] for name in names)
    found = facts_regions.softmax_against_matmul(written, ceilings, times, low, fused)
    rows = found["fused"]
    assert {"fp32", "bf16"} == set(rows["precision"]) and (rows["times"] > 1).all()
    assert len(rows) == fused["run_id"].nunique() and {*fused["run_id"]} <= {run.split("/")[1] for run in found["runs"]}
    assert len(printed.fused(found)) == len(rows)
    slow = changed(fused, lambda t: t["region"] == "attention.fused", total_ns=lambda t: t["total_ns"] * 3)
    again = facts_regions.softmax_against_matmul(written, ceilings, times, low, slow)["fused"]
    assert list(again["times"]) == pytest.approx(list(rows["times"] / 3))
    without = facts_regions.softmax_against_matmul(written, ceilings, times, low[:0], fused)["fused"]
    assert set(without["precision"]) == {"fp32"}
    assert printed.fused(softmaxed(written, ceilings, times)) is None


def test_the_words_on_softmax_follow_the_facts(operations, ceilings, times):
    fast = faster_softmax(operations, 10)
    answers = [Words(WORDS, "nsys-e.md").block("text", softmaxed(table, ceilings, times))
               for table in (operations, fast)]
    assert re.search(rf"\b{PROFILES} of {PROFILES}\b", answers[0])
    assert re.search(rf"\b0 of {PROFILES}\b", answers[1])


def test_rates_are_those_of_the_same_size_and_context(ceilings, times):
    rates = facts_regions.rates_by_profile(ceilings, times)
    runs = times[(times["size"] == "small") & (times["context_length"] == 512)]["run_id"]
    copies = ceilings[ceilings["run_id"].isin(runs) & (ceilings["ceiling"] == "copy")]["value"]
    assert facts_regions.rates_of(rates, "small", 512)["copy"] == copies.median()
    every = ceilings[ceilings["ceiling"] == "copy"]["value"].median()
    assert facts_regions.rates_of(rates, "nano", 7)["copy"] == every


def test_regions_are_measured_against_their_floor_by_operation(operations, ceilings, times):
    found = facts_regions.regions_against_floors(operations, ceilings, times)
    own = found["regions"].set_index("region")
    assert own["share"].sum() == pytest.approx(1) and own["time_ms"].is_monotonic_decreasing
    assert found["furthest"]["of_floor"] == own.loc[own["share"] > found["nontrivial"], "of_floor"].min()
    assert found["whole"] == pytest.approx(own["floor_ms"].sum() / own["time_ms"].sum())
    rates = facts_regions.rates_of(facts_regions.rates_by_profile(ceilings, times), "small", 512)
    product = 2 * 4 * 512 * 768 * 768  # of one projection of one layer
    bytes_moved = 4 * (2 * 4 * 512 * 768 + 768 * 768)
    qkv = 3 * 12 * max(product / rates["matmul_fp32"], bytes_moved / rates["copy"]) / 1e9
    assert own.loc["attention.qkv", "floor_ms"] == pytest.approx(qkv)
    scores = 4 * 12 * 512 * 512
    squares = (2 + 2) * 4 * 12 * scores / rates["copy"] / 1e9  # copied, then filled in place
    assert own.loc["attention.mask", "floor_ms"] == pytest.approx(squares)
    slow = changed(operations, lambda t: t["region"] == "ffn", total_ns=lambda t: t["total_ns"] * 100)
    assert facts_regions.regions_against_floors(slow, ceilings, times)["furthest"]["region"] == "ffn"
    cached = changed(operations, lambda t: t["region"] == "residual", total_ns=lambda t: t["total_ns"] // 100)
    assert facts_regions.regions_against_floors(cached, ceilings, times)["above"] == ["residual"]


@pytest.fixture(scope="module")
def claims_of(tables):
    """The claims beside these operations, and what else was measured."""
    return lambda operations: facts_claims.claims_beside(
        *((tables | {"operations": operations})[name] for name in OF_CLAIMS))


@pytest.fixture(scope="module")
def claims(operations, claims_of):
    return claims_of(operations)


def by_reason(claims):
    return {(row["claim"].reason or row["claim"].as_printed): row for row in claims["claims"]}


def test_claims_are_set_beside_what_was_measured(operations, claims, claims_of):
    found = by_reason(claims)
    assert found["longer_than_its_pass"]["why"]["longer"]
    own, share = operations[small(operations)], found["rest_of_forward"]
    forward = own[(own["mode"] == "forward") & (own["phase"] == "forward")]
    products = forward.loc[forward["family"] == MATMUL, "total_ns"].sum() / forward["total_ns"].sum()
    assert share["low"] == share["high"] == pytest.approx(products) and share["place"] == "below"
    points = share["why"]
    assert points["products_points"] == pytest.approx((share["theirs"] - products) * 100)
    assert sum(points.values()) == pytest.approx(0, abs=0.5)  # its shares add up to 100.0%
    launches = found["all_passes"]["why"]
    assert launches["each"] * launches["passes"] == launches["launches"] and launches["same"]
    heads = found["head_by_head"]["why"]
    assert heads["whole"] and heads["here"] == 1
    assert heads["a_head"] * heads["heads"] * heads["layers"] + 1 == heads["indexing"]
    assert {fit["size"] for fit in facts_claims.layers(
        found["the first kernel is ~50% of forward"]["claim"].model_copy(
            update={"values": {"first": 217, "second": 36}}), [])["fits"]} == {"large"}
    assert found["as_written"]["why"]["ratio"] > 10
    assert found["all_products"]["why"]["inside"] < found["all_products"]["why"]["all"] < 1
    more = by_reason(claims_of(changed(operations, lambda t: t["region"] == "ffn",
                                       count=lambda t: t["count"] * 40, total_ns=lambda t: t["total_ns"] * 40)))
    assert not more["all_passes"]["why"]["same"] and more["rest_of_forward"]["low"] > products


def test_claims_are_counted_by_their_place(operations, tables, claims, claims_of):
    assert sum(claims["places"].values()) == len(claims["claims"]) > 10
    assert sum(one["within"] for one in claims["reports"]) == claims["places"]["within"]
    assert len(printed.claims(claims)) == claims["places"]["below"] + claims["places"]["above"] > 0
    scores = [row["place"] for row in claims_of(faster_softmax(operations, 100))["claims"]
              if row["claim"].as_printed.startswith("softmax 2.6%")]
    assert scores == ["above"]
    assert facts_claims.claims_beside(operations.assign(size="custom"), operations[:0], tables["regions"],
                                      tables["clocks"], tables["walls"]) is None


def test_claims_without_all_tables_are_fewer_and_said_without_gaps(operations):
    nothing = pd.DataFrame()
    bare = facts_claims.claims_beside(operations[operations["mode"] != "step"], nothing, nothing, nothing, nothing)
    table = printed.claims(bare)
    assert table.ne("").all(axis=None) and "nan" not in table.to_csv()
    kept = {row["claim"].measure for row in bare["claims"]}
    assert "share" in kept and not {"change", "device_over_wall"} & kept


def test_every_reason_has_its_words_and_every_words_their_reason():
    assert set(Words(printed.REASONS, "claims.md").template.blocks) == set(facts_claims.REASONS)


def test_unaccounted_kernels_would_be_told(operations, tables):
    found = facts.conserved(operations, tables["statuses"])
    assert found["unknown"] == 0 and found["captured"] == 3 * PROFILES and found["left_out"] is None
    assert found["families"]["share"].sum() == pytest.approx(1) and (found["families"]["share"] > 0).all()
    strange = changed(operations, lambda t: t["region"] == "embedding", family="other")
    assert facts.conserved(strange, tables["statuses"])["unknown"] > 0
    assert (answered("nsys", "nsys-conserved", operations=strange).text
            != answered("nsys", "nsys-conserved").text)


def test_reports_that_were_left_out_and_profiles_out_of_memory_are_told(operations, tables):
    statuses = tables["statuses"].assign(left_out=None)
    statuses.loc[0, "status"], statuses.loc[1, "left_out"] = "oom", "r.csv: line 3"
    found = facts.conserved(operations, statuses)
    assert (found["out_of_memory"], found["captured"]) == (1, len(statuses) - 1)
    assert found["left_out"] == {"profiles": 1, "first": "r.csv: line 3"}
    assert "r.csv: line 3" in answered("nsys", "nsys-conserved", statuses=statuses).text


def test_the_timeline_is_of_one_step_and_pictures_need_their_rows(tables):
    timeline = tables["timeline"]
    one = timeline[small(timeline)].drop(columns=["size", "context_length"])  # as a run's notebook has it
    said, of_several = (figures.timeline(rows, "here").get_suptitle() for rows in (one, timeline))
    assert "small" in of_several and "small" not in said
    longer = figures.timeline(one.assign(duration_ns=one["duration_ns"] / 2), "here").get_suptitle()
    idle = [int(re.search(r"(\d+)%", text)[1]) for text in (said, longer)]
    assert idle[1] > idle[0]  # of shorter operations more is idle
    assert figures.timeline(timeline[timeline["mode"] == "forward"], "here") is None

"""What other reports claim from their profiles, beside what these profiles say, and why the two differ."""
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from stepscope.config import SIZES
from stepscope.say.formats import runs_of
from stepscope.say.published import load_published
from stepscope.say.selections import pick, reference
from stepscope.step.flops import forward_flops
from stepscope.studies.nsys.facts import clocks_beside, per_kernel
from stepscope.studies.nsys.facts_regions import attention_parts, config_of, forward_of
from stepscope.traces.families import MATMUL
from stepscope.yaml_files import load_yaml

CLAIMS = Path(__file__).parent / "claims" / "claims.yaml"
HANDOUT = ("small", "medium", "large", "xl", "2.7B")
LINEAR_A_LAYER = 7  # q, k, v, output, gate, up, down: the most launches of one kernel in a layer's forward


class Profiles(NamedTuple):
    """What a claim is compared with: these tables, and of them the profile of one size and context."""

    operations: pd.DataFrame
    regions: pd.DataFrame
    clocks: pd.DataFrame  # clocks_beside's
    size: str
    context: int

    def own(self, table: pd.DataFrame) -> pd.DataFrame:
        """A table's rows of that profile."""
        return pick(table, size=self.size, context_length=self.context)

    def host_ns(self, region: str) -> int:
        """Host time inside a region's ranges in forward alone."""
        return pick(self.own(forward_of(self.regions)), region=region)["host_ns"].sum()


def claims_beside(operations: pd.DataFrame, regions: pd.DataFrame, clocks: pd.DataFrame, walls: pd.DataFrame,
                  times: pd.DataFrame) -> dict | None:
    """``claims``: each as it stands in the file, with the ``gpu`` it was made on (None where not stated), the
    ``size`` and ``context`` of the profile beside it, whether the claim ``stated`` them, and its measure's
    facts."""
    forward = forward_of(operations)
    if forward.empty:
        return None
    clocks = clocks_beside(clocks, walls, times)
    gpus = load_published().drop_duplicates("source").set_index("source")["gpu"]
    claims = []
    for claim in load_yaml(CLAIMS):
        size, context = claim["size"], claim["context_length"]
        stated, gpu = size is not None, gpus.get(claim["source"], "not stated")
        if not stated or pick(forward, size=size, context_length=context).empty:
            size, context = reference(forward)
        profiles = Profiles(operations, regions, clocks, size, context)
        beside = MEASURES[claim["measure"]](claim["values"], profiles)
        claims.append(claim | {"gpu": None if gpu == "not stated" else gpu, "size": size, "context": context,
                               "stated": stated} | beside)
    return {"claims": claims, "runs": runs_of(operations)}


def two_clocks(values: dict, profiles: Profiles) -> dict:
    """A range's time against the wall clock's: ``range_is_longer`` than a pass in which it lay.
    ``timed_unprofiled``: whether this machine's pass was timed without a profiler, too."""
    rows = pick(profiles.own(profiles.clocks), mode="forward").iloc[0]
    ratio = values["range_ms"] / values["wall_ms"]
    return {"timed_unprofiled": pd.notna(rows.unprofiled_ms), "projected_ms": rows.projected_ms,
            "unprofiled_ms": rows.unprofiled_ms, "host_ms": rows.host_ms,
            "range_ratio": ratio, "range_is_longer": ratio > 1, "profiler_cost_share": rows.slowdown - 1,
            "printed_apart_share": 1 / ratio - 1,
            "apart_share": abs(rows.projected_ms / rows.unprofiled_ms - 1)}


def launches(values: dict, profiles: Profiles) -> dict:
    """The first kernel's launches: whether what is printed is a ``multiple`` of the passes that ran, and then
    whether ``each`` pass has as many as here."""
    top = profiles.own(per_kernel(profiles.operations, "forward", "forward")).iloc[0]
    passes = values["timed_steps"] + values["warmup_steps"]
    each = values["launches"] / passes
    return values | {"launches_here": top.launches, "share": top.share, "passes": passes, "each": each,
                     "multiple": each == int(each), "same": bool(each == top.launches)}


def launches_of_layers(values: dict, profiles: Profiles) -> dict:
    """The sizes whose layers the printed launches fit, the head's one taken off (``fits``), and the profiles
    with ``same`` launches here."""
    fits = []
    for size in HANDOUT:
        a_layer, over = divmod(values["launches"] - 1, SIZES[size].num_layers)
        if over == 0 and a_layer <= LINEAR_A_LAYER:
            fits.append({"size": size, "layers": SIZES[size].num_layers, "a_layer": a_layer})
    tops = per_kernel(profiles.operations, "forward", "forward").drop_duplicates("run_id")
    same = tops[tops["launches"] == values["launches"]]
    return values | {"launches_here": profiles.own(tops).iloc[0].launches, "fits": fits, "same": [
        {"size": row.size, "context": row.context_length} for row in same.itertuples(index=False)]}


def matmul_share(values: dict, profiles: Profiles) -> dict:
    """The matrix products' share of forward and of the step: its change and its level, printed and here.
    Where no full step was captured, ``step_share`` is None and there is no change."""
    shares = {}
    for mode, rows in profiles.own(profiles.operations).groupby("mode"):
        time = rows.groupby("family")["total_ns"].sum()
        shares[mode] = time.get(MATMUL, 0) / time.sum()
    forward, step = shares["forward"], shares.get("step")
    found = {"forward_share": forward, "step_share": step,
             "level_points": (values["forward"] - forward) * 100}
    return found if step is None else found | {
        "same_sign": (values["step"] < values["forward"]) == bool(step < forward),
        "printed_change_points": (values["step"] - values["forward"]) * 100,
        "change_points": (step - forward) * 100}


def scores_gflop(values: dict, profiles: Profiles) -> dict:
    """The scores' FLOPs, in a layer and in all."""
    config = config_of(profiles.operations, profiles.size, profiles.context)
    layer = forward_flops(config)["attention.scores"] / config.num_layers / 1e9
    return {"layer_gflop": layer, "all_gflop": layer * config.num_layers, "ratio": values["gflop"] / layer}


def softmax_over_products(values: dict, profiles: Profiles) -> dict:
    """Softmax's time against its two products', and what share of forward those and all products take."""
    parts = attention_parts(profiles.operations).loc[(profiles.size, profiles.context)]
    rows = profiles.own(forward_of(profiles.operations))
    products = pick(rows, family=MATMUL).groupby("region")["total_ns"].sum()
    inside = products.reindex(["attention.scores", "attention.value"]).sum()
    return {"softmax_ms": parts.softmax_ms, "products_ms": parts.products_ms, "time_ratio": parts.time_ratio,
            "printed_share": values["products_share"], "inside_share": inside / rows["total_ns"].sum(),
            "products_share": products.sum() / rows["total_ns"].sum()}


def softmax_over_scores(values: dict, profiles: Profiles) -> dict:
    """Softmax's time against the scores' product's: on the device, printed, and by host ranges."""
    rows = profiles.own(forward_of(profiles.operations))
    scores = pick(rows, region="attention.scores", family=MATMUL)["total_ns"].sum()
    ratio = pick(rows, region="attention.softmax")["total_ns"].sum() / scores
    printed = values["softmax_us"] / values["scores_us"]
    return {"ratio": ratio, "printed_ratio": printed, "agrees": bool(ratio > 1) == (printed > 1),
            "host_ratio": profiles.host_ns("attention.softmax") / profiles.host_ns("attention.scores")}


def range_shares(values: dict, profiles: Profiles) -> dict:
    """Softmax's share of attention's time: on the device, by host ranges, and as printed."""
    rows = profiles.own(forward_of(profiles.operations))
    attention = rows[rows["region"].str.startswith("attention")]
    softmax = pick(attention, region="attention.softmax")["total_ns"].sum()
    return {"device_share": softmax / attention["total_ns"].sum(),
            "host_share": profiles.host_ns("attention.softmax") / profiles.host_ns("attention"),
            "printed_share": values["softmax_ms"] / values["attention_ms"]}


MEASURES = {measure.__name__: measure for measure in (
    two_clocks, launches, launches_of_layers, matmul_share, scores_gflop, softmax_over_products,
    softmax_over_scores, range_shares)}

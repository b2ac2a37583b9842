"""What other reports claim from their profiles, beside the same quantity here, and why it is off."""
import math
import re
from typing import NamedTuple

import pandas as pd

from stepscope.config import SIZES
from stepscope.say.formats import runs_of
from stepscope.say.published import Claim, Of, counts, load_published, placed
from stepscope.say.selections import pick
from stepscope.step.flops import forward_flops
from stepscope.step.timing import WHOLE
from stepscope.studies.nsys.facts_regions import SHAPE, config_of, forward_of
from stepscope.traces.families import MATMUL

HANDOUT = ("small", "medium", "large", "xl", "2.7B")
LINEAR_A_LAYER = 7  # q, k, v, output, gate, up, down: the most launches of one kernel in a layer's forward
# What is read of operations: each selection of their rows copies every column.
OF_OPERATIONS = ["size", "context_length", "mode", "precision", "phase", "region", "family", "name", "count",
                 "total_ns", "steps", *SHAPE]
NEAR = 2  # times: further off, a reason does not account for what is printed
FORWARD, PRODUCTS, ELEMENTWISE = Of(), Of(family=MATMUL), Of(kernel="elementwise_kernel")


class Profile(NamedTuple):
    """The rows of one size and context in these tables; ``operations`` of every precision."""

    size: str
    context: int
    operations: pd.DataFrame
    regions: pd.DataFrame
    clocks: pd.DataFrame
    walls: pd.DataFrame


def claims_beside(operations: pd.DataFrame, low: pd.DataFrame, regions: pd.DataFrame, clocks: pd.DataFrame,
                  walls: pd.DataFrame) -> dict | None:
    """Every claim whose quantity was measured here: of the size and context that it states, else of all.

    ``claims`` has, of each, ``report`` (its name), the ``claim``, ``theirs``, the least and the most here
    (``low``, ``high``), their ``place`` and ``ratio`` (say.published.placed), and as ``why`` the facts of its
    reason; ``places`` how many are in each place, ``reports`` how many of each report's are within. None
    where there is no claim.
    """
    both = (pd.concat([operations, low]) if len(low) else operations)[OF_OPERATIONS]
    tables = [table if table.empty else table.assign(size=table["size"].astype(str))
              for table in (both, regions, clocks, walls)]
    keys = sorted(set(zip(tables[0]["size"], tables[0]["context_length"])))
    measured = {(size, context): Profile(size, context, *(
        table if table.empty else pick(table, size=size, context_length=context) for table in tables))
        for size, context in keys if size in HANDOUT}
    rows, used = [], set(runs_of(operations))
    for report in load_published():
        for claim in report.claims:
            profiles = [one for key, one in measured.items()
                        if claim.size is None or key == (claim.size, claim.context_length)]
            here = [value for one in profiles if pd.notna(value := MEASURES[claim.measure](one, claim))]
            if here:
                if claim.of and claim.of.precision != "fp32":
                    shape = {"size": claim.size, "context_length": claim.context_length} if claim.size else {}
                    used |= {*runs_of(pick(low, precision=claim.of.precision, **shape))}
                why = REASONS[claim.reason](claim, profiles) if claim.reason else {}
                rows.append({"report": report.name, "claim": claim, "theirs": claim.theirs, "low": min(here),
                             "high": max(here), "why": why})
    if not rows:
        return None
    table = placed(pd.DataFrame(rows))
    reports = [{"report": report, "claims": len(own), "within": counts(own)["within"]}
               for report, own in table.groupby("report", sort=False)]
    return {"claims": table.to_dict("records"), "places": counts(table), "reports": reports,
            "runs": sorted(used)}


# What is measured: a number of one profile, NaN where it has none

def chosen(profile: Profile, of: Of) -> pd.DataFrame:
    """The operations that ``of`` describes."""
    rows = pick(profile.operations, mode=of.mode, precision=of.precision)
    rows = rows if of.phase is None else rows[rows["phase"] == of.phase]
    rows = rows if of.regions is None else rows[rows["region"].str.startswith(tuple(of.regions))]
    rows = rows if of.family is None else rows[rows["family"] == of.family]
    return rows if of.kernel is None else rows[rows["name"].str.contains(of.kernel, regex=False)]


def time_ratio(profile: Profile, of: Of, to: Of = FORWARD) -> float:
    """The device's time in some operations over that in others; NaN where there are none of these."""
    whole = chosen(profile, to)["total_ns"].sum()
    return chosen(profile, of)["total_ns"].sum() / whole if whole else math.nan


def share(profile: Profile, claim: Claim) -> float:
    """Of the time in what ``to`` describes (without it, in the whole mode and phase) that in ``of``."""
    return time_ratio(profile, claim.of, claim.to or claim.of.whole)


def change(profile: Profile, claim: Claim) -> float:
    """Percentage points by which the products' share of the full step differs from that of forward alone."""
    step = Of(mode="step", phase=None)
    of_step = time_ratio(profile, step.model_copy(update={"family": MATMUL}), step)
    return (of_step - time_ratio(profile, PRODUCTS)) * 100


def kernels(profile: Profile) -> pd.DataFrame:
    """Forward's kernels, the one with the most time first: share of the time, launches a pass."""
    rows = chosen(profile, FORWARD)
    table = rows.groupby("name")[["total_ns", "count"]].sum().sort_values("total_ns", ascending=False)
    return pd.DataFrame({"share": table["total_ns"] / table["total_ns"].sum(),
                         "launches": table["count"] / rows["steps"].max()})


def first_share(profile: Profile, claim: Claim) -> float:
    return next(iter(kernels(profile)["share"]), math.nan)


def first_launches(profile: Profile, claim: Claim) -> float:
    return next(iter(kernels(profile)["launches"]), math.nan)


def device_over_wall(profile: Profile, claim: Claim) -> float:
    """Forward on the device, from its first operation to its last one's end in the profile, over the plain
    pass's wall time in the same process (medians)."""
    if profile.clocks.empty or profile.walls.empty:
        return math.nan
    device_ns = pick(profile.clocks, mode="forward", phase="forward")["projected_ns"].median()
    plain = pick(profile.walls, mode="forward", phase=WHOLE, capture="plain")
    return device_ns / 1e6 / plain["time_ms"].median()


def scores_gflop(profile: Profile, claim: Claim) -> float:
    """GFLOP of one layer's scores."""
    config = config_of(profile.operations, profile.size, profile.context)
    return forward_flops(config)["attention.scores"] / config.num_layers / 1e9


MEASURES = {measure.__name__: measure for measure in (share, change, first_share, first_launches,
                                                      device_over_wall, scores_gflop)}


# Why a claim is off: from the numbers printed, and from the profiles of its size and context

def layers(claim: Claim, profiles: list[Profile]) -> dict:
    """The sizes to whose layers the launches printed fit, with or without the head's one more (``fits``)."""
    fits = []
    for size in HANDOUT:
        each = [divmod(launches, SIZES[size].num_layers) for launches in claim.values.values()]
        if all(0 < a_layer <= LINEAR_A_LAYER and over in (0, 1) for a_layer, over in each):
            fits.append({"size": size, "layers": SIZES[size].num_layers, "a_layer": int(each[0][0])})
    return {"fits": fits}


def longer_than_its_pass(claim: Claim, profiles: list[Profile]) -> dict:
    """Whether a range outlasts the synchronised wall time of the pass that it is said to lie in."""
    return {"longer": claim.theirs > 1}


def all_passes(claim: Claim, profiles: list[Profile]) -> dict:
    """Launches for each of all passes that ran, warm-up included, and whether there are as many here."""
    launches, passes = claim.values["launches"], claim.values["passes"]
    return {"launches": launches, "passes": passes, "each": launches / passes,
            "same": all(first_launches(one, claim) == launches / passes for one in profiles)}


def diluted(claim: Claim, profiles: list[Profile]) -> dict:
    """The shares of the first two kernels here over those printed."""
    return {"ratios": list(kernels(profiles[0])["share"].head(2) / list(claim.values.values()))}


def head_by_head(claim: Claim, profiles: list[Profile]) -> dict:
    """Indexing kernels a pass, printed and here; of those printed, less the embedding's, how many for each
    head of each layer (``whole``: a whole number)."""
    launches, shape = kernels(profiles[0])["launches"], SIZES[profiles[0].size]
    indexing = claim.values["launches"] / claim.values["passes"]
    a_head = (indexing - 1) / shape.num_layers / shape.num_heads
    return {"indexing": indexing, "a_head": a_head, "whole": a_head == int(a_head), "heads": shape.num_heads,
            "here": launches[launches.index.str.contains("gather|index", flags=re.IGNORECASE)].sum(),
            "layers": shape.num_layers}


def rest_of_forward(claim: Claim, profiles: list[Profile]) -> dict:
    """Points between the products' share printed and here, and where they are instead: in elementwise
    kernels (indexing included), and in what the report calls other."""
    products, elementwise = (time_ratio(profiles[0], of) for of in (PRODUCTS, ELEMENTWISE))
    return {"products_points": (claim.theirs - products) * 100,
            "elementwise_points": (claim.values["elementwise"] - elementwise) * 100,
            "other_points": (claim.values["other"] - (1 - products - elementwise)) * 100}


def all_products(claim: Claim, profiles: list[Profile]) -> dict:
    """Attention's two products as a share of forward here, and all of forward's products."""
    return {"printed": claim.values["share"], "inside": time_ratio(profiles[0], claim.to or FORWARD),
            "all": time_ratio(profiles[0], PRODUCTS)}


def as_written(claim: Claim, profiles: list[Profile]) -> dict:
    """The product as the claim writes it out."""
    gflop = scores_gflop(profiles[0], claim)
    return {"gflop": gflop, "ratio": claim.theirs / gflop}


def host_ranges(claim: Claim, profiles: list[Profile]) -> dict:
    """The same ratio by the host's ranges, which end when the launches are made: the least and the most over
    the profiles, None without ranges; whether they are ``near`` the claim, up to a factor of :data:`NEAR`."""
    found, whole = [], (claim.to or FORWARD).regions
    for ranges in (forward_of(one.regions) for one in profiles if len(one.regions)):
        part_ns, whole_ns = (ranges.loc[ranges["region"].isin(regions), "host_ns"].sum()
                             for regions in (claim.of.regions, whole))
        found.append(part_ns / whole_ns)
    low, high = min(found, default=None), max(found, default=None)
    near = low is not None and high is not None and low / NEAR < claim.theirs < high * NEAR
    return {"low": low, "high": high, "near": near}


REASONS = {reason.__name__: reason for reason in (layers, longer_than_its_pass, all_passes, diluted,
                                                  head_by_head, rest_of_forward, all_products, as_written,
                                                  host_ranges)}

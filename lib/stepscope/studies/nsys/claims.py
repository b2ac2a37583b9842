"""What other reports claim from their profiles, beside what these profiles say, and why the two differ."""
from pathlib import Path

import pandas as pd

from stepscope.config import SIZES
from stepscope.say.formats import Answer, ms, no_data, number, percent, runs_of
from stepscope.say.published import load_published
from stepscope.say.selections import pick, reference
from stepscope.step.flops import forward_flops
from stepscope.studies.nsys.answers import MATMUL, attention_parts, config_of, per_kernel
from stepscope.yaml_files import load_yaml

CLAIMS = Path(__file__).with_name("claims.yaml")
LINEAR_A_LAYER = 7  # q, k, v, output, gate, up, down: the most launches a layer that one product's kernel can have in forward


def claims_beside(operations: pd.DataFrame, regions: pd.DataFrame, clocks_table: pd.DataFrame) -> Answer:
    """``clocks_table`` is ``answers.nsys.clocks_beside``'s."""
    question = "Where do published answers to (a) to (e) say something else, and why?"
    if operations.empty:
        return no_data("nsys-claims", question, "nsys")
    gpus = load_published().drop_duplicates("source").set_index("source")["gpu"]
    rows = []
    for claim in load_yaml(CLAIMS):
        size, context = claim["size"], claim["context_length"]
        stated = size is not None
        if not stated or pick(operations, size=size, context_length=context).empty:
            size, context = reference(operations)
        here, cause = MEASURES[claim["measure"]](claim["values"], operations, regions, clocks_table, size, context)
        gpu = gpus.get(claim["source"], "not stated")
        rows.append({"question": f"({claim['question']})", "report": f"{claim['source']}: {gpu if gpu != 'not stated' else 'GPU not stated'}",
                     "as printed": claim["as_printed"], "here": f"{here} ({size}, {context}{'' if stated else '; theirs not stated'})", "why": cause})
    return Answer("nsys-claims", question, f"{len(rows)} printed claims, each with the same quantity from these profiles and a cause that"
                  " arithmetic gives.", tables=[("Published claims beside these profiles.", pd.DataFrame(rows))], runs=runs_of(operations))


def two_clocks(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    row = pick(clocks, size=size, context_length=context, mode="forward").iloc[0]
    ratio = values["range_ms"] / values["wall_ms"]
    here = f"device {ms(row.projected_ms)}, wall {ms(row.unprofiled_ms)}, host range {ms(row.host_ms)}"
    if ratio > 1:
        why = (f"the range is {number(ratio)} times the synchronised wall time: nothing inside a pass outlasts it, so the profiled pass was not the"
               f" timed one; the profiler costs {row.slowdown - 1:+.1%} here")
    else:
        why = (f"the two are {percent(1 / ratio - 1)} apart, where device and wall time are {percent(abs(row.projected_ms / row.unprofiled_ms - 1), 1)}"
               " apart here: they are not two clocks of one pass")
    return here, why


def launches(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    top = pick(per_kernel(operations, "forward", "forward"), size=size, context_length=context).iloc[0]
    passes = values["timed_steps"] + values["warmup_steps"]
    each = values["launches"] / passes
    why = (f"{values['launches']} is {each:g} times the {passes} passes that ran ({values['timed_steps']} timed, {values['warmup_steps']} warm-up),"
           f" not a count of layers" if each == int(each) else f"{values['launches']} is no multiple of the {passes} passes that ran")
    return f"{top.launches:g} launches a pass, {percent(top.share)} of forward", why + (", the number measured here" if each == top.launches else "")


def launches_of_layers(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    fits = [f"{(values['launches'] - 1) // SIZES[s].num_layers} x {SIZES[s].num_layers} + 1 ({s})" for s in ("small", "medium", "large", "xl", "2.7B")
            if (values["launches"] - 1) % SIZES[s].num_layers == 0 and (values["launches"] - 1) // SIZES[s].num_layers <= LINEAR_A_LAYER]
    tops = per_kernel(operations, "forward", "forward").drop_duplicates("run_id")
    same = tops[tops["launches"] == values["launches"]]
    here = (f"{values['launches']} for " + ", ".join(f"{r['size']} at {r.context_length}" for _, r in same.iterrows()) if len(same) else
            f"{pick(tops, size=size, context_length=context).iloc[0].launches:g} launches a pass")
    return here, "a whole number of layers and the head: " + " or ".join(fits) if fits else "fits no size's layers"


def matmul_share(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    own = pick(operations, size=size, context_length=context)
    shares = {}
    for mode in ("forward", "step"):
        time = own[own["mode"] == mode].groupby("family")["total_ns"].sum()
        shares[mode] = time.get(MATMUL, 0) / time.sum()
    same = (values["step"] < values["forward"]) == (shares["step"] < shares["forward"])
    return (f"{percent(shares['forward'], 1)} of forward, {percent(shares['step'], 1)} of the step",
            f"the change has {'the same' if same else 'the other'} sign ({(values['step'] - values['forward']) * 100:+.1f} against"
            f" {(shares['step'] - shares['forward']) * 100:+.1f} points); the level differs by {(values['forward'] - shares['forward']) * 100:+.1f} points")


def scores_gflop(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    config = config_of(operations, size, context)
    layer = forward_flops(config)["attention.scores"] / config.num_layers / 1e9
    return (f"{number(layer)} GFLOP a layer, {number(layer * config.num_layers)} in all layers",
            f"the product as written is {number(layer)} GFLOP: printed {number(values['gflop'] / layer)} times too large")


def softmax_over_products(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    row = attention_parts(operations).loc[(size, context)]
    own = pick(operations, size=size, context_length=context, mode="forward", phase="forward")
    products = own[own["family"] == MATMUL].groupby("region")["total_ns"].sum()
    inside = products.reindex(["attention.scores", "attention.value"]).sum() / own["total_ns"].sum()
    return (f"softmax {ms(row.softmax_ms)}, its products {ms(row.products_ms)}: {number(row.time_ratio)} times",
            f"{percent(values['products_share'])} is not attention's two products alone: here they are {percent(inside)} of forward, and all of"
            f" forward's products {percent(products.sum() / own['total_ns'].sum())}")


def softmax_over_scores(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    own = pick(operations, size=size, context_length=context, mode="forward", phase="forward")
    time = own.groupby("region")["total_ns"].sum()
    product = own[(own["region"] == "attention.scores") & (own["family"] == MATMUL)]["total_ns"].sum()
    ratio, printed = time["attention.softmax"] / product, values["softmax_us"] / values["scores_us"]
    return f"softmax {number(ratio)} times the scores' product", (f"printed {number(printed)} times: " + (
        "agrees that softmax takes longer" if (ratio > 1) == (printed > 1) else "says the opposite")
        + ("; by host ranges it would be "
           f"{number(_host(regions, size, context, 'attention.softmax') / _host(regions, size, context, 'attention.scores'))} times here"))


def range_shares(values, operations, regions, clocks, size, context) -> tuple[str, str]:
    own = pick(operations, size=size, context_length=context, mode="forward", phase="forward")
    attention = own[own["region"].str.startswith("attention")]
    device = attention.loc[attention["region"] == "attention.softmax", "total_ns"].sum() / attention["total_ns"].sum()
    host = _host(regions, size, context, "attention.softmax") / _host(regions, size, context, "attention")
    return (f"softmax {percent(device, 1)} of attention's device time, {percent(host, 1)} of its host range",
            f"a range is the host's time: {percent(values['softmax_ms'] / values['attention_ms'], 1)} says how long launching took, not what the GPU spent")


def _host(regions: pd.DataFrame, size: str, context: int, region: str) -> float:
    return pick(regions, size=size, context_length=context, mode="forward", phase="forward", region=region)["host_ns"].sum()


MEASURES = {function.__name__: function for function in (two_clocks, launches, launches_of_layers, matmul_share, scores_gflop,
                                                         softmax_over_products, softmax_over_scores, range_shares)}

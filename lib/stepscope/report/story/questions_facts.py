"""What the answers to the assignment's questions say beyond the studies' own facts; each function is given
those facts by key and the tables by name."""

import numpy as np
import pandas as pd

from stepscope.say.chapter import Facts, Tables
from stepscope.say.formats import MODE_WORDS, number
from stepscope.say.selections import pick
from stepscope.step.summary import unlike_clocks

MIB, GIB = 2**20, 2**30
HARDLY = 0.1  # a ratio this near to 1 has hardly changed


def benchmarking(found: Facts, tables: Tables) -> Facts:
    """``backward``: over all profiles, how many times as long as forward's the matrix products of backward
    and everything else take (series), and whether the rest ``holds_it_down``. ``between``: standard
    deviation between processes where the GPU waits for no launches (``ahead``, the median cell) and the
    widest range where it does (``behind``)."""
    return {"backward": _backward(found["nsys_phases"]), "between": _between(found["between_processes"])}


def _backward(phases: Facts | None) -> Facts | None:
    ratios = phases and phases["backward"]
    if not ratios:
        return None
    return {
        "products": ratios["products"],
        "rest": ratios["rest"],
        "holds_it_down": bool(ratios["rest"].median() < min(2, ratios["products"].median())),
    }


def _between(processes: Facts | None) -> Facts | None:
    if processes is None:
        return None
    kinds = {kind["waits"]: kind for kind in processes["kinds"]}
    behind = kinds.get(True)
    return {
        "processes": processes["processes"],
        "ahead": float(kinds[False]["range"].median()) if False in kinds else None,
        "behind": None
        if behind is None or not processes["on_gpu"]
        else {
            "times": 1 + behind["widest"]["range_share"],
            "size": behind["widest"]["size"],
            "context": behind["widest"]["context_length"],
            "mode": behind["widest"]["mode"],
        },
    }


def profiles(found: Facts, tables: Tables) -> Facts:
    """``adamw_makes_it``: the products' share falls in most full steps, and in none without the optimizer's
    phase. ``fades``: AdamW's share of the step at the ``first`` and ``last`` context, None where its median
    does not fall at every longer one. ``moves_more``: softmax has fewer FLOPs than the two products, and more
    bytes."""
    return {
        "several_profiles": found["nsys_b"] is not None and found["nsys_b"]["profiles"] > 1,
        **_pattern(found["nsys_d"]),
        "moves_more": found["nsys_e"] is not None
        and found["nsys_e"]["own"]["bytes_ratio"] > 1
        and found["nsys_e"]["own"]["flops_ratio"] < 1,
    }


def _pattern(step: Facts | None) -> Facts:
    if step is None:
        return {"adamw_makes_it": False, "fades": None}
    contexts = [{"context": one["context"], "shares": one["optimizer"]} for one in step["by_context"]]
    medians = [one["shares"].median() for one in contexts]
    fades = len(medians) > 1 and bool((np.diff(medians) < 0).all())
    return {
        "adamw_makes_it": 2 * step["falls"] > step["profiles"] and step["falls_without"] == 0,
        "fades": {"first": contexts[0], "last": contexts[-1]} if fades else None,
    }


def mixed(found: Facts, tables: Tables) -> Facts:
    """``low``: the full step's speed-up in bf16 by size (``others``: of the first size in slower processes),
    None where not measured. ``trend_has_its_cause``: with the size the products' share of the step and their
    own speed-up rise, and all else hardly changes."""
    speed = found["mixed_speed"]
    rows = [one for one in speed["by_precision"] if one["precision"] == "bf16"] if speed else []
    trend = speed["trend"] if speed else None
    return {
        "low": rows[0] | {"others": _in_other_processes(speed, rows[0]["first_size"])} if rows else None,
        "trend_has_its_cause": bool(
            trend
            and trend["share_rises"]
            and trend["products_rise"]
            and all(abs(trend[end]["others"] - 1) < HARDLY for end in ("first", "last"))
        ),
    }


def _in_other_processes(speed: Facts, size: str) -> list[float]:
    """The same step's speed-up in bf16 in slower processes, at the context that is told of."""
    found = []
    for one in speed["others"]:
        ms = {cell["precision"]: cell["ms"] for cell in one["ms"]}
        if (one["size"], one["context"]) == (str(size), speed["context"]) and {"fp32", "bf16"} <= set(ms):
            found.append(ms["fp32"] / ms["bf16"])
    return found


def memory(found: Facts, tables: Tables) -> Facts:
    """``autocast``: what it does to a peak wherever it goes one way only. ``squares``: the largest tensors
    are all made in attention."""
    largest, peak = found["memory_largest"], found["memory_peaks"]
    return {
        "autocast": [one for one in peak["autocast"] if one["raises"] or one["lowers"]] if peak else [],
        "squares": bool(largest)
        and all(one["region"].startswith("attention.") for one in largest["biggest"]),
    }


def peaks(facts: Facts) -> pd.DataFrame | None:
    """A row a context: the steady peak in GiB of forward and of the full step, fp32 and bf16."""
    if facts["memory_peaks"] is None:
        return None
    rows = facts["memory_peaks"]["by_context"]
    rows = rows[rows["mode"].isin(["forward", "step"]) & rows["precision"].isin(["fp32", "bf16"])]
    if rows.empty:
        return None
    rows = rows.assign(
        cell=[
            number(row.steady_peak_allocated_mib * MIB / GIB) if row.status == "ok" else "out of memory"
            for row in rows.itertuples()
        ]
    )
    wide = rows.pivot_table(
        index="context_length", columns=["mode", "precision"], values="cell", aggfunc="first"
    )
    wanted = [(mode, precision) for mode in ("forward", "step") for precision in ("fp32", "bf16")]
    wide = wide.reindex(columns=[cell for cell in wanted if cell in wide]).fillna("–")
    wide.columns = [f"{MODE_WORDS[mode]}, {precision} (GiB)" for mode, precision in wide.columns]
    return wide.rename_axis("context").reset_index()


def attention(found: Facts, tables: Tables) -> Facts:
    """``rows``: the written-out attention in fp32 with the causal mask at one head width, a row a sequence;
    ``tf32_ends``: what TF32 saves of a pass at the least and the largest width."""
    time = found["attention_time"]
    rows = (
        pd.DataFrame()
        if time is None
        else pick(time["written_out"], precision="fp32", d_model=time["d"]).sort_values("sequence")
    )
    tf32 = found["attention_tf32"]
    changes = sorted(tf32["by_d"], key=lambda one: one["d"]) if tf32 and not tf32["on_cpu"] else []
    ends = [changes[0], changes[-1]] if len(changes) > 1 else changes
    saves = all(one["change"] < 0 for one in ends)
    return {
        "rows": rows,
        "compiled_times": _compiled(time),
        "tf32_ends": [{"d": one["d"], "saving": -one["change"]} for one in ends] if saves else [],
    }


def _compiled(time: Facts | None) -> list[Facts]:
    """The written-out attention in fp32 and bf16, eager and compiled, at the reference point."""
    found = []
    for one in time["times"] if time else ():
        cells = {cell["implementation"]: cell["ms"] for cell in one["cells"]}
        mhz = {cell["implementation"]: cell["mhz"] for cell in one["cells"]}
        if one["precision"] != "tf32" and {"eager", "compiled"} <= set(cells):
            found.append(
                {
                    "precision": one["precision"],
                    "eager_ms": cells["eager"],
                    "compiled_ms": cells["compiled"],
                    "unlike": bool(unlike_clocks(*(mhz[name] for name in ("eager", "compiled")))),
                    "times": cells["eager"] / cells["compiled"],
                    "faster": cells["compiled"] < cells["eager"],
                }
            )
    return found


def written_out(facts: Facts) -> pd.DataFrame | None:
    """Sequence, times of forward and backward, and memory in use before backward."""
    rows = facts["rows"]
    if rows.empty:
        return None
    return pd.DataFrame(
        {
            "sequence": [f"{one:,}" for one in rows["sequence"]],
            "forward (ms)": [number(one) for one in rows["forward_median_ms"]],
            "backward (ms)": [number(one) for one in rows["backward_median_ms"]],
            "in use before backward (MiB)": [number(one / MIB) for one in rows["in_use_bytes"]],
        }
    )


def compiled(found: Facts, tables: Tables) -> Facts:
    """``all_faster``: the range of speed-ups of the modes in which every pair got faster. ``fastest``:
    :func:`_fastest`."""
    model = found["compile_model"]
    gains, why = model["gains"] if model else [], found["compile_why"]
    fastest = None if model is None else _fastest(model["pairs"])
    return {
        "kernels": why
        and {
            "low": int(why["rest_count"].min()),
            "high": int(why["rest_count"].max()),
            "low_after": int(why["rest_count_after"].min()),
            "high_after": int(why["rest_count_after"].max()),
        },
        "all_faster": [
            {
                "mode": one["mode"],
                "low": one["ways"][0]["lowest"]["speedup"],
                "high": (one["ways"][0]["highest"] or one["ways"][0]["lowest"])["speedup"],
            }
            for one in gains
            if one["all_faster"]
        ],
        "contexts": [str(context) for context in model["shape"]["contexts"]] if model else [],
        "fastest": fastest,
        "marks": {name: fastest is not None and bool(fastest[name].any()) for name in ("unlike", "flagged")},
    }


def _fastest(pairs: pd.DataFrame) -> pd.DataFrame:
    """Of the pairs with written-out attention, one a size, precision and mode: where several processes
    measured one, that with the fastest eager step, since a busy host only adds to it."""
    rows = pairs[pairs["attention"] == "eager"].sort_values("median_ms", kind="stable")
    return rows.drop_duplicates(["size", "precision", "mode"]).sort_index()


def speedups(facts: Facts) -> pd.DataFrame | None:
    """A row a size and precision's modes across: eager ms, compiled ms."""
    rows = facts["fastest"]
    if rows is None or rows.empty:
        return None
    rows = rows.assign(
        cell=[f"{number(row.median_ms)} → {number(row.median_ms_after)}"
              + " ≠" * row.unlike + " †" * row.flagged for row in rows.itertuples()]
    )
    wide = rows.pivot_table(
        index="size", columns=["precision", "mode"], values="cell", aggfunc="first", observed=True, sort=False
    )
    order = [(precision, mode) for precision in ("fp32", "bf16") for mode in MODE_WORDS]
    wide = wide.reindex(columns=[cell for cell in order if cell in wide]).fillna("–")
    wide.columns = [f"{precision} {MODE_WORDS[mode]}" for precision, mode in wide.columns]
    return wide.reset_index()

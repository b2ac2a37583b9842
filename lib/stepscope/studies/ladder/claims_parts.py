"""Where the last step's milliseconds go, and what holds it: claims."""

from stepscope.report.schemas import Claim, Tables
from stepscope.stats import AT_CAP, LEAST_GAIN
from stepscope.studies.ladder.parts import (
    ADAMW,
    ATTENTION,
    MATMULS,
    attention_bytes_of,
    config_of,
    last_step,
    launch_wall,
    parts_of,
    roofline,
)
from stepscope.studies.ladder.rows import (
    CAPTURED,
    LAST,
    at_longest,
    draws_cap,
    largest_ladder,
    power_cap_w,
    roofs,
    timed,
)
from stepscope.studies.ladder.tables import NAMES


def last_largest(tables: Tables) -> Claim:
    """Of what the largest size's last step takes over its bound, the largest part."""
    shape, parts, _ = last_step(tables)
    part, over = parts["over"].idxmax(), parts["over"].sum()
    found = {
        "size": shape.size,
        "wall": parts["ms"].sum(),
        "bound": parts["bound_ms"].sum(),
        "over": over,
        "part": part,
        "most": parts.loc[part, "over"],
        "share": parts.loc[part, "over"] / over,
    }
    return found if over > 0 else None


def last_rates(tables: Tables) -> Claim:
    """What the last step's matmuls and AdamW reach, and of what: no more than a burst of each."""
    _, parts, rates = last_step(tables)
    matmuls, bytes_ = parts.loc[MATMULS, "tflops"], parts.loc[ADAMW, "tb_s"]
    found = {
        "matmuls": matmuls,
        "of_matmul": matmuls / rates.matmul,
        "adamw": bytes_,
        "of_copy": bytes_ / rates.copy,
    }
    return found if max(found["of_matmul"], found["of_copy"]) <= 1 else None


def last_attention(tables: Tables) -> Claim:
    """The rate of fused attention in the largest size's last step, and at the longest context, where that is
    clearly higher."""
    shape, own, _ = last_step(tables)
    longest = {longer.size: (longer, rows) for longer, rows in at_longest(tables).items()}
    if shape.size not in longest:
        return None
    longer, rows = longest[shape.size]
    long, _ = parts_of(tables, longer, rows)
    found = {
        "context": shape.context_length,
        "rate": own.loc[ATTENTION, "tflops"],
        "longer": longer.context_length,
        "long_rate": long.loc[ATTENTION, "tflops"],
    }
    return found if found["long_rate"] > 1.2 * found["rate"] else None


def ridge(tables: Tables) -> Claim:
    """FLOPs a byte from which a kernel is compute-bound: the rate of a large matmul over that of a copy."""
    fp32, bf16, copy = roofs(tables)
    return {"fp32": fp32, "bf16": bf16, "copy": copy, "fp32_ridge": fp32 / copy, "bf16_ridge": bf16 / copy}


def last_power(tables: Tables) -> Claim:
    """The last step is at the power cap, and at a lower clock for it than the ladder's quickest."""
    _, rows = largest_ladder(tables)
    row, full = timed(rows).loc[LAST], timed(rows)["sm_clock_mhz"].max()
    found = {"power": row["power_w"], "cap": power_cap_w(tables), "clock": row["sm_clock_mhz"], "full": full}
    return found if draws_cap(tables, rows)[LAST] and row["sm_clock_mhz"] < AT_CAP * full else None


def last_kept_up(tables: Tables) -> Claim:
    """At the cap the last step's matmuls take no longer than at the rate that a large one keeps up there."""
    _, parts, rates = last_step(tables)
    took, kept_up = parts.loc[MATMULS, "ms"], parts.loc[MATMULS, "bound_ms"] * rates.matmul / rates.kept_up
    held = last_power(tables) and took < (1 + LEAST_GAIN) * kept_up
    return (
        {"rate": rates.kept_up, "clock": rates.kept_up_mhz, "kept_up": kept_up, "matmuls": took}
        if held
        else None
    )


def last_joules(tables: Tables) -> Claim:
    """From the CUDA graph on, where all of the largest size's steps draw as much as the cap lets them, energy
    and time fall alike."""
    own = timed(largest_ladder(tables)[1], CAPTURED)
    if len(own) < 2 or last_power(tables) is None or not draws_cap(tables, own).all():
        return None
    own = own.assign(joules=own["power_w"] * own["wall_ms"] / 1e3)  # of the median step, as costs are
    first, last = own.iloc[0], own.iloc[-1]
    joules, wall = (1 - last[name] / first[name] for name in ("joules", "wall_ms"))
    return (
        {
            "first": NAMES[own.index[0]],
            "before_j": first["joules"],
            "after_j": last["joules"],
            "joules": joules,
            "wall": wall,
        }
        if wall > LEAST_GAIN and abs(joules - wall) < LEAST_GAIN
        else None
    )


def roofline_wall(tables: Tables) -> Claim:
    """What launches alone allow the smallest size's compiled step, beside the dots of the roofline."""
    roofline(tables)
    size, operations, launch, _ = launch_wall(tables)
    return {"size": size, "operations": operations, "launch": launch}


def attention_bytes(tables: Tables) -> Claim:
    """What the last step's attention must move takes longer than its FLOPs, by which the bound goes."""
    shape, parts, rates = last_step(tables)
    moved = attention_bytes_of(config_of(shape)) / rates.copy / 1e9
    more = moved - parts.loc[ATTENTION, "bound_ms"]
    return {"moved": moved, "more": more} if more > 0 else None

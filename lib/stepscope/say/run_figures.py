"""Pictures of one run, for its notebook."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.formats import ms
from stepscope.say.style import PHASE_COLORS, WIDTH_IN, use_style

CUT = 1.5  # times the longest timed step: a bar ends there, and with it the axis


def steps(samples: pd.DataFrame, where: str) -> Figure:
    """Each step of a run as a bar of its phases, with host wall time and the host's time to enqueue it as
    marks. Warm-up steps that are much longer than timed ones are cut, and say how long they are.
    """
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.6))
    phases = samples[samples["phase"] != "step"].pivot(index="step", columns="phase", values="time_ms")
    bottom = 0
    for phase, color in PHASE_COLORS.items():
        if phase in phases:
            axis.bar(phases.index, phases[phase], bottom=bottom, color=color, label=phase, width=0.7,
                     edgecolor="white", linewidth=0.5)
            bottom = bottom + phases[phase]
    whole = samples[samples["phase"] == "step"]
    axis.plot(whole["step"], whole["time_ms"], "k_", markersize=16, label="wall time of the step")
    axis.plot(whole["step"], whole["enqueue_ms"], ".", color="#D55E00", label="host has enqueued it")
    warmups, timed = int((~whole["timed"]).sum()), whole.loc[whole["timed"], "time_ms"]
    if warmups:
        if whole["time_ms"].max() > CUT * timed.max():
            axis.set_ylim(0, CUT * timed.max())
        top = axis.get_ylim()[1]
        axis.axvspan(-0.5, warmups - 0.5, color="0.9", zorder=0)
        axis.text(warmups - 0.6, 0.9 * top, "warm-up", va="top", ha="right", fontsize=9)
        for row in whole[whole["time_ms"] > top].itertuples():
            axis.text(row.step, top, ms(row.time_ms), va="bottom", ha="center", fontsize=9)
    first = "" if warmups and len(whole) > 1 else f", the first {ms(whole['time_ms'].iloc[0])}"
    axis.set_title(f"A step takes {ms(timed.median())}{first} ({where})", pad=18 if warmups else None)
    axis.set(xlabel="step", ylabel="time (ms)", xlim=(-0.5, len(whole) - 0.5), xticks=whole["step"])
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def first_costs(costs: pd.DataFrame, where: str) -> Figure:
    """What comes before the first step and what the first step pays beyond a steady one, as bars."""
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.2))
    colors = costs["when"].map({"before": "#56B4E9", "in": "#0072B2"})
    axis.barh(costs["part"], costs["time_ms"], color=colors)
    for y, time_ms in enumerate(costs["time_ms"]):
        axis.text(max(time_ms, 0), y, f" {ms(time_ms)}", va="center", fontsize=10)
    before = costs.loc[costs["when"] == "before", "time_ms"].sum()
    beyond = costs.set_index("part")["time_ms"]["first step beyond steady"]
    axis.set(xlabel="time (ms)",
             title=f"{ms(before)} before the first step, which takes {ms(abs(beyond))}"
                   f" {'more' if beyond > 0 else 'less'} than later ones\n({where})")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)
    return figure

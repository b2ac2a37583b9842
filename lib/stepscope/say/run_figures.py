"""Pictures of one run, for its notebook."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.style import PHASE_COLORS, WIDTH_IN, use_style


def steps(samples: pd.DataFrame, title: str) -> Figure:
    """Each step of a run as a bar of its phases, with host wall time and the host's time to enqueue it as
    marks.
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
    warmups = int((~whole["timed"]).sum())
    if warmups:
        axis.axvspan(-0.5, warmups - 0.5, color="0.9", zorder=0)
        axis.text(-0.4, axis.get_ylim()[1], "warm-up", va="top", fontsize=9)
    axis.set(xlabel="step", ylabel="time (ms)", title=title, xlim=(-0.5, len(whole) - 0.5),
             xticks=whole["step"])
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def first_costs(costs: pd.DataFrame, title: str) -> Figure:
    """What comes before the first step and what the first step pays beyond a steady one, as bars."""
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.2))
    colors = costs["when"].map({"before": "#56B4E9", "in": "#0072B2"})
    axis.barh(costs["part"], costs["time_ms"], color=colors)
    for y, time_ms in enumerate(costs["time_ms"]):
        axis.text(max(time_ms, 0), y, f" {time_ms:.3g} ms", va="center", fontsize=10)
    axis.set(xlabel="time (ms)", title=title)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)
    return figure

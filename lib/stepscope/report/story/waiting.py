"""When the GPU waits for launches."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stepscope.config import PHASE_NAMES
from stepscope.report.story import waiting_facts as facts
from stepscope.report.story.part import Part
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import number, percent
from stepscope.say.style import WIDTH_IN, ink_on, use_style
from stepscope.studies.nsys.figures import sizes_of, title

FONT = 14
NAMES = {"eager": "as torch runs it", "block": "blocks compiled", "model": "one compiled graph",
         "cuda_graphs": "the same with CUDA graphs"}


def waiting_map(times: pd.DataFrame, captured: pd.DataFrame, low: pd.DataFrame, where: str) -> Figure | None:
    """Sizes down, contexts across, a panel a phase of the full step: the share of its time in which the GPU
    waits."""
    rows = facts.decided(times, low, captured)
    if rows.empty:
        return None
    use_style()
    sizes, phases = sizes_of(rows), [phase for phase in PHASE_NAMES if (rows["phase"] == phase).any()]
    columns = list(rows[["precision", "context_length"]].drop_duplicates().sort_values(
        ["precision", "context_length"], ascending=[False, True]).itertuples(index=False, name=None))
    figure, axes = plt.subplots(1, len(phases), figsize=(WIDTH_IN, 2.4 + 0.5 * len(sizes)), squeeze=False,
                                sharey=True)
    for axis, phase in zip(axes[0], phases, strict=True):
        shares = rows[rows["phase"] == phase].pivot_table(
            index="size", columns=["precision", "context_length"], values="waited_share", observed=True)
        shares = shares.reindex(index=sizes, columns=columns).to_numpy(dtype=float)
        image = axis.imshow(shares, cmap="Oranges", vmin=0, vmax=0.7, aspect="auto")
        for (line, column), share in np.ndenumerate(shares):
            if np.isnan(share):
                axis.text(column, line, "–", ha="center", va="center", fontsize=FONT, color="0.5")
            else:
                color = ink_on(image.cmap(image.norm(share))) if share else "0.4"
                axis.text(column, line, f"{100 * share:.0f}", ha="center", va="center", fontsize=FONT,
                          color=color)
        axis.set_xticks(range(len(columns)), [str(context) for _, context in columns], rotation=90)
        for precision in dict.fromkeys(name for name, _ in columns):
            places = [place for place, (name, _) in enumerate(columns) if name == precision]
            axis.text(sum(places) / len(places), -0.6, precision, ha="center", fontsize=FONT)
            if places[0]:
                axis.axvline(places[0] - 0.5, color="white", linewidth=4)
        axis.set_yticks(range(len(sizes)), sizes)
        axis.set_title({"optimizer": "AdamW"}.get(phase, phase), fontsize=FONT + 1, pad=20)
        axis.set_xlabel("context", fontsize=FONT)
        axis.tick_params(labelsize=FONT)
        axis.grid(visible=False)
    waiting = rows.groupby(facts.SHAPE, observed=True)["waited_ms"].sum() > 0
    many = f"{waiting.sum()} of {len(waiting)} steps" if waiting.any() else "no step here"
    title(figure, f"The GPU waits for launches in {many}\n(percent of each phase's time, {where})")
    return figure


def remedies_table(facts: dict) -> pd.DataFrame:
    """Variants down: ms, times faster than eager, kernels, and how busy they keep the GPU."""
    table = facts["table"]
    shown = pd.DataFrame({"full step": [NAMES[name] for name in table.index], "ms": table["ms"].map(number),
                          "faster": [f"{number(value, 2)}x" for value in table["faster"]]})
    if facts["busy_known"]:
        shown["kernels, forward + backward"] = [f"{n:,.0f}" for n in table["kernels"]]
        shown["GPU busy in these"] = [percent(share) for share in table["busy"]]
    return shown


TIMES, CAPTURED, LOW = "benchmark.times", "nsys.phases", "mixed_precision.times"

PART = Part(
    "When the GPU waits for launches",
    questions=(
        Question("waiting-where", facts.where, (TIMES, CAPTURED), (LOW, "mixed_precision.other_times"),
                 pictures=("waiting_map",)),
        Question("waiting-seen", facts.seen, (CAPTURED, TIMES),
                 (LOW, "waits.phases", "nsys.clocks", "nsys.walls", "processes.samples")),
        Question("waiting-helps", facts.helps, ("compile.times",), ("compile.kernels", "ladder.rungs"),
                 printed={"remedies": remedies_table}),
    ),
    pictures=(Picture("waiting_map", waiting_map, (TIMES, CAPTURED), (LOW,)),),
)

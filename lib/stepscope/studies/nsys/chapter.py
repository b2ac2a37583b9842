"""What the profiling study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture
from stepscope.studies.nsys import answers, claims, figures
from stepscope.studies.nsys.measure import all_runs


TABLES = {"operations": "operations.parquet", "clocks": "clocks", "regions": "regions", "timeline": "timeline.parquet",
          "walls": "walls", "statuses": "statuses"}


def load(store, records):
    """The tables of the profiles in fp32; ``operations_low`` has the operations of those in other precisions."""
    fp32 = [record for record in records if record.config["precision"] == "fp32"]
    low = [record for record in records if record.config["precision"] != "fp32"]
    return {name: all_runs(store, fp32, file) for name, file in TABLES.items()} | {
        "operations_low": all_runs(store, low, "operations.parquet")}


def _clocks(t):
    clocks = t["nsys.clocks"]
    return clocks if clocks.empty else answers.clocks_beside(clocks, t["nsys.walls"], t["benchmark.times"])


CHAPTER = Chapter(
    Path(__file__).parent, "Profiling", load,
    old=(
        lambda t: answers.forward_total(t["nsys.clocks"], t["nsys.walls"], t["benchmark.times"]),
        lambda t: answers.every_phase(t["nsys.clocks"]),
        lambda t: answers.top_kernel(t["nsys.operations"]),
        lambda t: answers.not_matmul(t["nsys.operations"]),
        lambda t: answers.full_step(t["nsys.operations"]),
        lambda t: answers.softmax_against_matmul(t["nsys.operations"], t["nsys.regions"], t["benchmark.ceilings"]),
        lambda t: answers.regions_against_ceilings(t["nsys.operations"], t["benchmark.ceilings"]),
        lambda t: claims.claims_beside(t["nsys.operations"], t["nsys.regions"], _clocks(t)),
        lambda t: answers.conserved(t["nsys.operations"], t["nsys.statuses"]),
    ),
    pictures=(
        Picture("nsys_clocks", figures.clocks_of, ("nsys.clocks",), ("nsys.walls", "benchmark.times")),
        Picture("nsys_families", figures.forward_families, ("nsys.operations",)),
        Picture("nsys_step_families", figures.step_families, ("nsys.operations",)),
        Picture("nsys_attention", figures.attention, ("nsys.operations", "nsys.regions")),
        Picture("nsys_roofline", figures.roofline_of, ("nsys.operations", "benchmark.ceilings")),
        Picture("nsys_timeline", figures.timeline_of, ("nsys.timeline",)),
    ),
)

"""What the profiling study brings to the report."""
from functools import partial
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.nsys import facts, facts_claims, facts_regions, figures, printed
from stepscope.studies.nsys.tables import load

CHAPTER = Chapter(
    Path(__file__).parent, "Profiling", load,
    questions=(
        Question("nsys-a", facts.forward_total, ("nsys.clocks", "nsys.walls"),
                 printed={"clocks": printed.clocks, "slowdowns": printed.slowdowns},
                 pictures=("nsys_clocks",)),
        Question("nsys-phases", facts.every_phase, ("nsys.phases",),
                 ("nsys.operations", "nsys.walls", "benchmark.times"), printed={"phases": printed.phases},
                 pictures=("nsys_timeline",)),
        Question("nsys-b", facts.top_kernel, ("nsys.operations",),
                 printed={"first_kernels": printed.first_kernels, "names": printed.names}),
        Question("nsys-c", facts.not_matmul, ("nsys.operations",), printed={"kernels": printed.kernels},
                 pictures=("nsys_families",)),
        Question("nsys-d", facts.full_step, ("nsys.operations",),
                 printed={"step_families": printed.step_families}),
        Question("nsys-e", facts_regions.softmax_against_matmul, ("nsys.operations",),
                 ("benchmark.ceilings", "benchmark.times", "nsys.operations_low", "nsys.operations_fused"),
                 printed={"softmax": printed.softmax, "by_operation": printed.by_operation,
                          "fused": printed.fused}),
        Question("nsys-regions", facts_regions.regions_against_floors,
                 ("nsys.operations", "benchmark.ceilings"), ("benchmark.times",),
                 printed={"regions": printed.regions}),
        Question("nsys-claims", facts_claims.claims_beside, ("nsys.operations",),
                 ("nsys.operations_low", "nsys.regions", "nsys.clocks", "nsys.walls"),
                 printed={"reports": printed.reports, "claims": printed.claims}),
        Question("nsys-conserved", facts.conserved, ("nsys.operations",), ("nsys.statuses",),
                 printed={"rules": printed.rules}),
    ),
    pictures=(
        Picture("nsys_clocks", figures.clocks, ("nsys.clocks",), ("nsys.walls",)),
        Picture("nsys_families",
                partial(figures.families_by_size, mode="forward", phases=("forward",),
                        words="forward's time on the device"), ("nsys.operations",)),
        Picture("nsys_timeline", figures.timeline, ("nsys.timeline",)),
    ),
)

"""Nsight Systems as a program: where it is, whether it is whole, and what it makes of a capture. No torch."""

import os
import shutil
import subprocess
from pathlib import Path

from stepscope import StepscopeError

PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/local/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)


class NsysError(StepscopeError, RuntimeError):
    """nsys is missing, incomplete, or made no use of a capture; quotes what it said itself."""


def find_nsys() -> Path | None:
    """The nsys to use: on the PATH, else the newest in the usual install folders, the copy inside Nsight
    Compute last.
    """
    if on_path := shutil.which("nsys"):
        return Path(on_path)
    for place in PLACES:
        if found := sorted(Path("/").glob(place.removeprefix("/"))):
            return found[-1]
    return None


def nsys_version(nsys: Path) -> str:
    """What ``nsys --version`` says of itself."""
    return (
        subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True)
        .stdout.strip()
        .rpartition(" ")[2]
    )


def missing_libraries(nsys: Path) -> list[str]:
    """Shared libraries that the importer, which turns a capture into a report, cannot find; empty when nsys
    is whole.

    The copy inside Nsight Compute comes without ``libdw.so.1`` and ``libelf.so.1`` and then captures, but
    reports nothing.
    """
    real = Path(os.path.realpath(nsys))
    if real.stat().st_size < 4096:  # a wrapper script: what it executes is what matters
        words = real.read_text(errors="replace").split()
        real = next((Path(word) for word in words if word.endswith("/nsys") and Path(word).exists()), real)
    missing = set()
    for host in ("host-linux-*", "linux-desktop-*"):
        for program in real.parent.parent.glob(f"{host}/QdstrmImporter"):
            listed = subprocess.run(
                ["ldd", program],
                capture_output=True,
                text=True,
                env=os.environ | {"LD_LIBRARY_PATH": str(program.parent)},
            ).stdout
            missing |= {line.split()[0] for line in listed.splitlines() if line.endswith("not found")}
    return sorted(missing)


def export_capture(nsys: Path, report: Path, export: Path) -> Path:
    """Make a capture's event-level export (sqlite), with the payloads of NVTX ranges where this nsys can.

    Raises:
        NsysError: nsys exported nothing; quotes it.
    """
    command = ("export", "--type=sqlite", "--force-overwrite=true")
    output_of(nsys, *command, "--include-json=true", "--output", export, report)
    said = ""
    if not export.exists():  # an older nsys, which has no such option
        said = output_of(nsys, *command, "--output", export, report)
    if not export.exists():
        raise NsysError(f"nsys export made nothing of {report.name}; it said: {said}")
    return export


def make_reports(nsys: Path, export: Path, reports: tuple[str, ...]) -> dict[str, Path]:
    """By ``nsys stats``, beside an export, its CSV reports; one that nsys makes nothing of is absent.

    Raises:
        NsysError: nsys made none; quotes it.
    """
    # A copy: nsys does not say whether it leaves alone what it reads.
    copy = Path(shutil.copy(export, export.with_name("stats.sqlite")))
    said = output_of(
        nsys,
        "stats",
        "--format=csv",
        "--output",
        export.with_name("stats"),
        "--report",
        ",".join(reports),
        copy,
    )
    made = {name: export.with_name(f"stats_{name}.csv") for name in reports}
    if not any(path.exists() for path in made.values()):
        raise NsysError(f"nsys stats made nothing of {export.name}; it said: {said}")
    return {name: path for name, path in made.items() if path.exists()}


def output_of(*command: str | Path) -> str:
    """The end of what a command says."""
    return subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ).stdout[-2000:]

"""Find and run Nsight Systems. This module does not import torch."""

import os
import shutil
import subprocess
from pathlib import Path

from stepscope import StepscopeError

INSTALL_PATTERNS = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/local/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)


class NsysError(StepscopeError, RuntimeError):
    """Raised if nsys is missing or incomplete, or if it fails. The message quotes any output of nsys."""


def find_nsys() -> Path | None:
    """Return the path of nsys, or None if nsys isn't installed.

    The nsys on the PATH takes precedence over the newest nsys in the usual install folders, and the copy inside
    Nsight Compute is the last choice.
    """
    if on_path := shutil.which("nsys"):
        return Path(on_path)
    for pattern in INSTALL_PATTERNS:
        if matches := sorted(Path("/").glob(pattern.removeprefix("/"))):
            return matches[-1]
    return None


def nsys_version(nsys: Path) -> str:
    """Return the version that ``nsys --version`` prints."""
    return (
        subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True)
        .stdout.strip()
        .rpartition(" ")[2]
    )


def missing_libraries(nsys: Path) -> list[str]:
    """Return the shared libraries that nsys's importer can't find. The list is empty if nsys is complete.

    The importer turns a capture into a report. The nsys inside Nsight Compute lacks ``libdw.so.1`` and
    ``libelf.so.1``, so it can capture, but can't create reports.
    """
    program_path = Path(os.path.realpath(nsys))
    if program_path.stat().st_size < 4096:  # a wrapper script: check the program that it runs
        words = program_path.read_text(errors="replace").split()
        program_path = next(
            (Path(word) for word in words if word.endswith("/nsys") and Path(word).exists()), program_path
        )
    missing = set()
    for host in ("host-linux-*", "linux-desktop-*"):
        for program in program_path.parent.parent.glob(f"{host}/QdstrmImporter"):
            listed = subprocess.run(
                ["ldd", program],
                capture_output=True,
                text=True,
                env=os.environ | {"LD_LIBRARY_PATH": str(program.parent)},
            ).stdout
            missing |= {line.split()[0] for line in listed.splitlines() if line.endswith("not found")}
    return sorted(missing)


def export_capture(nsys: Path, report: Path, export: Path) -> Path:
    """Export a capture to SQLite, with the payloads of NVTX ranges if this version of nsys supports them.

    Raises:
        NsysError: If nsys exported nothing; the message quotes its output.
    """
    command = ("export", "--type=sqlite", "--force-overwrite=true")
    output_of(nsys, *command, "--include-json=true", "--output", export, report)
    output = ""
    if not export.exists():  # an older nsys lacks --include-json
        output = output_of(nsys, *command, "--output", export, report)
    if not export.exists():
        raise NsysError(f"nsys export could not export {report.name}; its output: {output}")
    return export


def make_reports(nsys: Path, export: Path, reports: tuple[str, ...]) -> dict[str, Path]:
    """Write CSV reports to an export's folder with ``nsys stats``; return the reports' paths, keyed by name.

    Raises:
        NsysError: If nsys wrote no report; the message quotes its output.
    """
    # a copy, because nsys does not promise to leave its input unchanged
    copy = Path(shutil.copy(export, export.with_name("stats.sqlite")))
    output = output_of(
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
        raise NsysError(f"nsys stats wrote no reports for {export.name}; its output: {output}")
    return {name: path for name, path in made.items() if path.exists()}


def output_of(*command: str | Path) -> str:
    """Run a command; return the end of its output (stdout and stderr)."""
    return subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ).stdout[-2000:]

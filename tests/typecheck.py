"""Run mypy on the given files, or by default on the package, bench, the tests and the notebooks.

python tests/typecheck.py [FILE ...]
"""

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from mypy import api

ROOT = Path(__file__).parents[1]


def code_of(notebook: Path) -> list[tuple[str, str]]:
    """Return the location and text of each line in the code cells; locations look like ``path:cell 3:1``."""
    cells = nbformat.read(notebook, as_version=4).cells
    return [
        (f"{notebook.relative_to(ROOT)}:cell {number}:{at}", line)
        for number, cell in enumerate(cells, 1)
        if cell.cell_type == "code"
        for at, line in enumerate(cell.source.splitlines(), 1)
    ]


def typecheck(files: list[str]) -> tuple[str, int]:
    """Run mypy on ``files``, or on all files if the list is empty; return mypy's output and its exit status.

    In the output, locations in notebooks name the cell.
    """
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    if files:
        output, complaints, status = api.run([*settings, *files])
        return output + complaints, status
    with tempfile.TemporaryDirectory() as folder:
        places: dict[str, str] = {}
        for notebook in sorted(ROOT.glob("notebooks/*.ipynb")):
            code = code_of(notebook)
            path = Path(folder, f"{notebook.stem}_notebook.py")
            path.write_text("\n".join(line for _, line in code) + "\n", encoding="utf-8")
            places |= {f"{path}:{at}": place for at, (place, _) in enumerate(code, 1)}
        targets = [ROOT / "lib" / "stepscope", ROOT / "bench", ROOT / "tests", *Path(folder).iterdir()]
        output, complaints, status = api.run([*settings, *map(str, targets)])
    pattern = re.escape(folder) + r"/\w+\.py:\d+"
    return re.sub(pattern, lambda match: places.get(match[0], match[0]), output) + complaints, status


if __name__ == "__main__":
    text, status = typecheck(sys.argv[1:])
    print(text, end="")
    sys.exit(status)

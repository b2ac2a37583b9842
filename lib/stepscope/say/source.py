"""The code that was measured, shown where it is measured."""
import ast
import inspect
import textwrap
from collections.abc import Callable

from IPython.display import Markdown


def show(*functions: Callable) -> Markdown:
    """The source of some functions, for a notebook's reader: what is inside the clocks, and what is not. Of
    their docstrings only the first sentences."""
    return Markdown("\n\n".join(f"```python\n{source_of(function)}\n```" for function in functions))


def source_of(function: Callable) -> str:
    """A function's or class's source; of docstrings of several paragraphs the first."""
    lines = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in reversed([*ast.walk(ast.parse("\n".join(lines)))]):
        if isinstance(node, documented) and ast.get_docstring(node):
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            ends = next((n for n in range(first, last) if not lines[n].strip()), None)
            if ends:
                lines[ends - 1] += '"""'
                del lines[ends:last]
    return "\n".join(lines)

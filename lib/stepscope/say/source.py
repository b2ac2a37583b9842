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
    nodes = ast.walk(ast.parse("\n".join(lines)))
    documented = [node.body[0] for node in nodes
                  if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)]
    for words in sorted(documented, key=lambda one: -one.lineno):  # so that lines keep their numbers
        first, last = words.lineno - 1, words.end_lineno or words.lineno
        ends = next((n for n in range(first, last) if not lines[n].strip()), None)
        if ends:
            lines[ends - 1] += '"""'
            del lines[ends:last]
    return "\n".join(lines)

"""The code that was measured, shown where it is measured."""
import inspect
import textwrap
from collections.abc import Callable

from IPython.display import Markdown


def show(*functions: Callable) -> Markdown:
    """The source of some functions, for a notebook's reader: what is inside the clocks, and what is not."""
    sources = [textwrap.dedent(inspect.getsource(function)).rstrip() for function in functions]
    return Markdown("\n\n".join(f"```python\n{source}\n```" for source in sources))

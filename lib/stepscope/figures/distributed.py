"""Draw the distributed study's figures."""

import pandas as pd

from stepscope.report.style import Picture
from stepscope.studies.distributed.figures import draw_parts, draw_streams


def strategy_parts(title: str, strategies: pd.DataFrame) -> Picture:
    """Draw a bar per strategy with the parts of its profiled step; a tick marks the unprofiled steps' median.

    Args:
        strategies: rows of the view ``strategies``, for one case.
    """
    return draw_parts(title, strategies.set_index("name"))


def strategy_streams(title: str, streams: pd.DataFrame) -> Picture:
    """Draw rank 0's compute and communication during one step of each strategy.

    Args:
        streams: rows of the view ``strategy_streams``, for one case.
    """
    return draw_streams(title, streams)

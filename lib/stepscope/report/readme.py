"""What the README says of the records, made from them: the story of the report's first screen."""
import html
import re
from collections.abc import Callable

from stepscope.report.load import Data
from stepscope.report.story import first
from stepscope.report.story.part import tell

STORY_BEGIN, STORY_END = "<!-- story -->\n", "<!-- /story -->"
PICTURE_WIDTH = 560  # px: whole on the first screen, with the words above it


def with_story(readme: str, data: Data, linked: Callable[[str], str]) -> str:
    """A README that opens as the report does, between its two marks; as it is, where it has none.

    Args:
        linked: makes a text's links lead to the pages of the report.
    """
    answers = tell(first.PART, data.tables)
    parts = [part for answer in answers for part in (
        answer.text, *(_picture(stem, caption) for stem, caption in answer.figures))]
    if not parts or STORY_BEGIN not in readme:
        return readme
    before, _, rest = readme.partition(STORY_BEGIN)
    text = linked("\n\n".join(parts))
    return f"{before}{STORY_BEGIN}{text}\n{STORY_END}{rest.partition(STORY_END)[2]}"


def _picture(stem: str, caption: str) -> str:
    """A picture at a width, which markdown's own way of writing one cannot say."""
    told = html.escape(re.sub(r"\\(\W)", r"\1", caption))  # in a tag, a backslash escapes nothing
    return f'<p><img src="figures/{stem}.png" width="{PICTURE_WIDTH}" alt="{told}"></p>'

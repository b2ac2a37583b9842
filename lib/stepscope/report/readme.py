"""What the README says of the records, made from them: the story of the report's first screen."""
from collections.abc import Callable

from stepscope.report.load import Data
from stepscope.report.story import first
from stepscope.report.story.part import tell

STORY_BEGIN, STORY_END = "<!-- story -->\n", "<!-- /story -->"


def with_story(readme: str, data: Data, linked: Callable[[str], str]) -> str:
    """A README that opens as the report does, between its two marks; as it is, where it has none.

    Args:
        linked: makes a text's links lead to the pages of the report.
    """
    answers = tell(first.PART, data.tables)
    parts = [part for answer in answers for part in (
        answer.text, *(f"![{caption}](figures/{stem}.png)" for stem, caption in answer.figures))]
    if not parts or STORY_BEGIN not in readme:
        return readme
    before, _, rest = readme.partition(STORY_BEGIN)
    text = linked("\n\n".join(parts))
    return f"{before}{STORY_BEGIN}{text}\n{STORY_END}{rest.partition(STORY_END)[2]}"

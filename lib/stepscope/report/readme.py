"""What the README says of the records, made from them: the story of the report's first screen."""
from stepscope.report.load import Data
from stepscope.report.story import first
from stepscope.report.story.part import tell

STORY_BEGIN, STORY_END = "<!-- story -->\n", "<!-- /story -->"


def with_story(readme: str, data: Data) -> str:
    """A README that opens as the report does, between its two marks; as it is, where it has none."""
    answers = tell(first.PART, data.tables)
    parts = [part for answer in answers for part in (
        answer.text, *(f"![{caption}](figures/{stem}.png)" for stem, caption in answer.figures))]
    if not parts or STORY_BEGIN not in readme:
        return readme
    before, _, rest = readme.partition(STORY_BEGIN)
    text = "\n\n".join(parts).replace("](#", "](writeup.md#")
    return f"{before}{STORY_BEGIN}{text}\n{STORY_END}{rest.partition(STORY_END)[2]}"

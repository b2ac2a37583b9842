"""Which of a folder's runs answers are made from."""
import json
from collections import Counter

from stepscope.runs.record import Record

# Fields that no table has a column for.
VARIANTS = ("batch_size", "vocab_size", "seed", "timed_steps", "warmup_steps")


def told_apart(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Records that answers are made from, and those put aside, both in the order given.

    Runs of a study that differ in :data:`VARIANTS` only are told apart by no table, so answers take one of
    them: one that is done before one that failed, then one whose variant the study has done most of, then the
    first. Of those that differ in ``timed_steps`` only, the newest is the one that counts, however many of
    the others there are: they are the same measurement as it was made before.
    """
    done = Counter(_key(record, varying=True) for record in records if record.done)

    def rank(record: Record) -> tuple[bool, int]:
        return record.done, done[_key(record, varying=True)]
    best: dict[str, Record] = {}
    for record in records:
        key = _key(record, varying=False)
        held = best.setdefault(key, record)
        newer = (_key(record, varying=True) == _key(held, varying=True)
                 and record.started_at > held.started_at)
        if rank(record) > rank(held) or (rank(record) == rank(held) and newer):
            best[key] = record
    kept = {id(record) for record in best.values()}
    return ([record for record in records if id(record) in kept],
            [record for record in records if id(record) not in kept])


def _key(record: Record, varying: bool) -> str:
    """The record's study, and those of its fields that are variants, or those that are not; no
    ``timed_steps``.
    """
    studied = {"warmup_steps"} if record.study == "warmup" else set()
    variants = set(VARIANTS) - studied
    fields = {field: value for field, value in record.config.items()
              if (field in variants) == varying and field != "timed_steps"}
    return json.dumps([record.study, fields], sort_keys=True)

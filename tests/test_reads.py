"""What a study's claims, tables and figures read of other studies is what it declares."""
import importlib
from contextlib import suppress

import pytest

from reports import Reads
from stepscope import PROJECT
from stepscope.report.claims import collect
from stepscope.report.load import load
from stepscope.studies import STUDIES


@pytest.fixture(scope="module")
def asked():
    """By study the tables of other studies that anything of it asked the reference's for."""
    if PROJECT is None:
        pytest.skip("not in a checkout")
    tables, found = load(), {study: set() for study in STUDIES}
    for kind in ("claim", "table", "figure"):
        for function in collect(kind).values():
            room, study = function.__module__.split(".")[1:3]
            if room == "studies":
                reads = Reads(tables)
                with suppress(LookupError):  # where it has no data, it has asked all the same
                    function(reads)
                found[study] |= {name for name in reads.asked if "." in name and not name.startswith(f"{study}.")}
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_declares_the_tables_of_others_that_it_reads(asked, study):
    assert asked[study] == set(getattr(importlib.import_module(f"stepscope.studies.{study}.tables"), "READS", ()))

"""The calculator and the ladder picker, in a browser: their numbers are Python's, to the byte."""
import json
import random
from math import prod

import pandas as pd
import pytest

from browser import DESKTOP, PHONE, browser, shown, too_wide, violations
from conftest import record_of
from reference import tables
from stepscope.config import PHASES, PRECISIONS, SIZES, configure
from stepscope.report.interactive import (
    LETTERS,
    PRODUCTS,
    Rung,
    calculator,
    calculator_data,
    ladder_picker,
    ladder_rows,
    pieces,
)
from stepscope.report.load import chapters
from stepscope.report.page import render_page
from stepscope.step import accounting
from stepscope.studies.memory.facts_options import fragmentation

DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length", "batch_size")
TEXT = '# Report\n\n<div id="ladder-picker"></div>\n\n## Fit\n\n<div id="calculator">\n\nElsewhere a form.\n\n</div>\n'
ROWS = [vars(row) for row in (
    Rung("small", 512, "fp32", "fp32, eager", 60.0, 34_000.0, 5.5, 0.2, "fp32"),
    Rung("small", 512, "bf16", "bf16 autocast", 30.0, 68_000.0, 4.5, 0.1),
    Rung("2.7B", 512, "fp32", "fp32, eager", 1000.0, 2_000.0, 65.25, 0.3, "fp32"),
    Rung("2.7B", 512, "bf16", "<b>bf16</b> autocast", 250.0, 8_000.0, 50.0, 0.15, gain=4.02),
    Rung("2.7B", 512, "fp8", "FP8 products", 100.0, 20_000.0, None, None, "fp8", faster=10.2),
    Rung("2.7B", 512, "fill", "batch fills memory", 900.0, 25_000.0, 130.0, 0.6, beside=True),
    Rung("2.7B", 2048, "fp32", "fp32, eager", 5000.0, None, None, None, "fp32"))]


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_page(TEXT, path.parent, pieces=[ladder_picker(ROWS), calculator([])]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(chromium, file):
    with shown(chromium, file) as (opened, said):
        yield opened
        assert said == []


def shapes(number, seed):
    """Configurations of named sizes and of arbitrary dimensions, as dictionaries."""
    draw = random.Random(seed)
    for _ in range(number):
        heads = draw.choice([2, 3, 8, 25, 32])
        own = {"num_heads": heads, "d_model": heads * draw.randrange(2, 260, 2), "d_ff": draw.randint(1, 20_000),
               "num_layers": draw.choice([1, 2, 3, 7, 12, 31])}
        named = SIZES[draw.choice([*SIZES])]._asdict()
        yield draw.choice([own, named]) | {
            "vocab_size": draw.choice([2, 777, 10_000, 128_256]), "batch_size": draw.choice([1, 3, 4, 64]),
            "context_length": draw.choice([1, 17, 128, 512, 1000, 4096, 131_072]),
            "mode": draw.choice([*PHASES]), "precision": draw.choice(PRECISIONS),
            "optimizer": draw.choice(["foreach", "fused"]), "attention": draw.choice(["eager", "sdpa"])}


def of(config):
    return configure("benchmark", **config, device="cpu").model_copy(update={"device": "cuda"})


def test_a_letter_is_the_product_of_the_same_dimensions_as_in_python():
    for shape in shapes(50, seed=1):
        config, sizes = of(shape), shape | {"head_dim": shape["d_model"] // shape["num_heads"]}
        assert {letter: prod(sizes[name] for name in names) for letter, names in LETTERS.items()} == accounting.terms(config)
        for name, formula in (("saved", accounting.FORMULAS["bf16"].saved), ("end", accounting.FORMULAS["bf16"].end)):
            terms = calculator_data()["formulas"]["eager"]["bf16"][name]
            assert sum(n * accounting.terms(config)[letter] for n, letter in terms) == accounting.value(formula, config)


def peaks_of_the_page(page, configs):
    """Bytes, phase, block, operation and categories that the page's script computes."""
    return page.evaluate("""configs => {
      const data = JSON.parse(document.getElementById('calculator-data').textContent);
      return configs.map(config => {
        const {bytes, phase, layer, operation, categories} = fits.peak(data, config);
        return [String(bytes), phase, layer, operation,
                Object.fromEntries(Object.entries(categories).map(([name, size]) => [name, String(size)]))];
      });
    }""", configs)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_pages_peaks_are_pythons_to_the_byte(page, device):
    configs = [shape | {"device": device, "blocks_per_checkpoint": 0} for shape in shapes(300, seed=2)]
    for index, config in enumerate(configs):
        if config["mode"] != "forward" and index % 2:
            config["blocks_per_checkpoint"] = index % config["num_layers"] + 1
    found = peaks_of_the_page(page, configs)
    for config, (size, phase, layer, operation, categories) in zip(configs, found, strict=True):
        shape = {name: config[name] for name in config if name not in ("device", "blocks_per_checkpoint")}
        top = accounting.peak(of(shape).model_copy(update={"device": device}), config["blocks_per_checkpoint"])
        assert (int(size), phase, layer, operation) == (top.allocated, top.phase, top.layer, top.operation), config
        assert {name: int(part) for name, part in categories.items()} == top.categories, config


def test_the_pages_largest_are_pythons(page):
    for shape in shapes(12, seed=3):
        shape |= {"context_length": 256, "batch_size": 2}
        for field in ("context_length", "batch_size"):
            found = page.evaluate("""([config, field, bytes]) => fits.largestThatFits(
                JSON.parse(document.getElementById('calculator-data').textContent), config, field, BigInt(bytes))""",
                [shape | {"device": "cuda", "blocks_per_checkpoint": 0}, field, 80 * 2**30])
            assert found == accounting.largest_that_fits(of(shape), field, 80 * 1024), shape


def fill(page, **fields):
    for name, value in fields.items():
        field = page.locator(f"#fits-{name}")
        if field.evaluate("field => field.localName") == "select":
            field.select_option(value)
        else:
            field.evaluate("""(field, value) => {
                field.value = value; field.dispatchEvent(new Event('input', {bubbles: true})); }""", str(value))
    return page.locator("#fits-verdict").inner_text()


def test_the_form_says_whether_it_fits(page):
    shape = {"mode": "step", "precision": "fp32", "optimizer": "foreach", "context_length": 512, "batch_size": 4}
    top = accounting.peak(of(SIZES["2.7B"]._asdict() | shape)).allocated / 2**30
    said = fill(page, size="2.7B", **shape, memory_gib=2 * top)
    assert said.startswith("It fits") and f"{top:.2f} GiB at the peak, {top:.2f} GiB to spare" in said
    said = fill(page, memory_gib=top + 1)  # which is less than the allowance
    assert said.startswith("It is tight") and "1.00 GiB to spare" in said
    assert "does not fit" in fill(page, memory_gib=top - 1)
    assert page.locator("#fits-parts li").count() >= 5
    assert "It is tight" in fill(page, blocks_per_checkpoint=1)  # only the blocks' inputs are kept
    lean = accounting.peak(of(SIZES["2.7B"]._asdict() | shape | {"attention": "sdpa", "optimizer": "fused"}), 1)
    assert f"{lean.allocated / 2**30:.2f} GiB at the peak" in fill(page, attention="sdpa", optimizer="fused")
    fill(page, attention="eager", optimizer="foreach")
    assert "even whole number" in fill(page, num_heads=7)
    assert page.locator("#fits-size").input_value() == "custom" and page.locator("#fits-parts li").count() == 0
    assert "Batch: a whole number from 1" in fill(page, size="small", batch_size="1.5")
    assert page.locator("#fits-num_heads").input_value() == str(SIZES["small"].num_heads)
    fill(page, batch_size=4, blocks_per_checkpoint=0)


def test_a_size_says_whose_name_it_has():
    assert "2.7B (2026&#39;s xl)" in calculator([]).html and "xl (2025&#39;s)" in calculator([]).html


def test_what_is_left_free_is_what_the_runs_measured():
    runs = tables("memory")["runs"]
    measured = fragmentation(runs)["most"]["idle_share"]
    assert calculator([], {"memory.runs": runs}).data["allowance"] == measured
    half = runs.assign(steady_peak_allocated_mib=runs["steady_peak_allocated_mib"] / 2)
    assert calculator([], {"memory.runs": half}).data["allowance"] > measured
    assert calculator([]).data["allowance"] == accounting.ALLOWANCE


def test_the_gpu_to_begin_with_is_the_records_one(tiny):
    records = [record_of(tiny(seed=seed)).model_copy(update={"machine": machine}) for seed, machine in enumerate(
        [{}, {"device_name": "A small one", "gpu_memory_mib": 1024}, {"device_name": "<A> large one", "gpu_memory_mib": 2048}])]
    assert 'value="2.0"' in calculator(records).html and "&lt;A&gt; large one" in calculator(records).html
    assert [piece.place for piece in pieces(records, {})] == ["calculator"]  # no ladder was run


def test_the_ladder_of_a_shape_is_shown_to_the_products_asked_for(page):
    def rows():
        return [row.split("\t") for row in page.locator("#ladder-rows tbody tr").all_inner_texts()]
    assert page.locator("#ladder-products").input_value() == "bf16"  # the same arithmetic, to begin with
    page.locator("#ladder-products").select_option("fp8")
    shown_ = rows()
    assert [row[0] for row in shown_] == ["fp32, eager", "<b>bf16</b> autocast", "FP8 products", "batch fills memory"]
    assert [row[1] for row in shown_] == ["1,000", "250", "100", "900"] and shown_[1][3] == "4.02x"
    assert "1,000 ms to 100 ms a step: 10.2x faster, with FP8 products" in page.locator("#ladder-said").inner_text()
    page.locator("#ladder-products").select_option("bf16")
    assert "4x faster" in page.locator("#ladder-said").inner_text() and len(rows()) == 3
    page.locator("#ladder-context").select_option("2048")
    assert [row[0] for row in rows()] == ["fp32, eager"]
    page.locator("#ladder-size").select_option("small")  # which has no such context
    assert page.locator("#ladder-context").input_value() == "512" and len(rows()) == 2


def test_the_pickers_rows_are_the_ladders_rungs():
    rungs = tables("ladder")["rungs"]
    names = {f"{chapter.study}.{name}": table for chapter in chapters() if chapter.study == "ladder"
             for name, table in tables("ladder").items()}
    assert [piece.place for piece in pieces([], names)] == ["calculator", "ladder-picker"]
    rows = ladder_rows(rungs, {"cuda_graphs": "<One> graph"})
    assert {row["products"] for row in rows} <= set(PRODUCTS)
    assert {row["label"] for row in rows if row["rung"] == "cuda_graphs"} == {"<One> graph"}
    json.dumps(rows, allow_nan=False)
    done = rungs[(rungs["status"] == "ok") & (rungs["kind"] != "left_out")
                 & (rungs["vocab_size"] == rungs["vocab_size"].min())]
    assert [(row["size"], row["rung"]) for row in rows] == list(zip(done["size"].astype(str), done["rung"], strict=True))
    for row, (_, own) in zip(rows, done.iterrows(), strict=True):
        assert row["time_ms"] == pytest.approx(own["median_ms"], rel=1e-5)
        assert row["gain"] == (None if pd.isna(own["gain"]) else pytest.approx(own["gain"], rel=1e-5))
        assert row["beside"] == (own["kind"] == "beside" or own["rung"] in ("fill", "graph"))
    larger = rungs.assign(vocab_size=rungs["vocab_size"] * 2, median_ms=1.0)
    assert ladder_rows(pd.concat([rungs, larger], ignore_index=True), {"cuda_graphs": "<One> graph"}) == rows
    assert ladder_rows(pd.DataFrame(), {}) == [] and ladder_rows(rungs.assign(status="oom"), {}) == []
    assert ladder_rows(rungs.assign(kind="left_out"), {}) == []
    on_cpu = ladder_rows(rungs.drop(columns="peak_mib"), {})  # no memory is counted there
    assert len(on_cpu) == len(rows) and all(row["peak_gib"] is None for row in on_cpu)


def test_a_place_without_its_piece_keeps_its_words(tmp_path):
    assert "Elsewhere a form." in render_page(TEXT, tmp_path) and "fits-form" not in render_page(TEXT, tmp_path)
    assert "Elsewhere a form." not in render_page(TEXT, tmp_path, pieces=[calculator([])])


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "light"), (DESKTOP, "dark"), (PHONE, "dark")])
def test_forms_are_clean_and_fit_the_window(chromium, file, size, scheme):
    with shown(chromium, file, size, color_scheme=scheme) as (opened, said):
        opened.locator(".field summary").click()
        assert said == [] and too_wide(opened) == [] and violations(opened) == []

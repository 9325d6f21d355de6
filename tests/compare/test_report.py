import html
import io
import math
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from comparisons import (
    TEXTS,
    WINDOWS,
    a_comparison,
    a_comparison_of_series,
    a_method,
    a_passage,
    a_run,
    a_window,
    changed,
    of_series,
    rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from pages import Page

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report.aggregate import (
    assign_styles,
    average_curves,
    choose_loss_metric,
    compute_band,
    compute_colour_scale,
    compute_length_shares,
    describe_result,
    interpolate_flops,
    sort_methods,
)
from tokenv.compare.report.page import comparison_page, write_report
from tokenv.compare.report.pictures import draw_pictures
from tokenv.compare.report.report_tables import (
    boundaries_table,
    methods_table,
    print_comparison,
)
from tokenv.compare.run_evaluation import Agreement, Learned
from tokenv.compare.score_statistics import Difference, describe_difference

ALL = [
    "methods",
    "differences",
    "ranks",
    "loss-bytes",
    "loss-flops",
    "boundary-rate",
    "neg-log-prob",
    "token-lengths",
]
FINITE = st.floats(-1e6, 1e6)
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def compared():
    methods = [
        a_method("learned", 2.31, probability=0.4),
        a_method("uniform", 2.5, probability=0.0),
    ]
    return a_comparison([*methods, a_method("bpe", 2.3, probability=0.1)])


@pytest.fixture(scope="module")
def written(compared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "new"
    return folder, write_report(compared, folder)


def test_the_report_is_written_and_names_its_files(written):
    folder, paths = written
    tables = ["methods.csv", "runs.csv", "pairs.csv", "token-lengths.csv"]
    assert [path.name for path in paths] == [
        "report.html",
        *(f"{name}.png" for name in ALL),
        *tables,
    ]
    assert sorted(paths) == sorted(folder.iterdir())


def test_every_method_shows_every_passage_best_method_first(compared, written):
    page = Page((written[0] / "report.html").read_text(encoding="utf-8"))
    shown = [text.decode() for text in TEXTS for _ in compared.methods]
    assert page.texts == shown
    places = [page.cells.index(name) for name in ("bpe", "learned", "uniform")]
    assert places == sorted(places)
    assert {"2.3050 ± 0.0050", "2.3000 2.3100", "4.29e5", "0.333"} <= set(page.cells)


def test_the_page_stands_alone(written):
    source = (written[0] / "report.html").read_text(encoding="utf-8")
    assert not any(
        word in source for word in ("http:", "https:", "url(", "@import", "<script", 'src="/')
    )
    assert source.count("data:image/png;base64,") == 2 * len(ALL)
    assert 'name="viewport"' in source


@pytest.mark.parametrize(
    "markup",
    ["<script>alert(1)</script>", "\"'><s onclick=x>", "$\\frac{&amp;", "_{{ 7*7 }}</style>"],
)
def test_everything_is_escaped(markup):
    run = a_run(agreement={markup: Agreement(0.5, 0.5, 0.5)}, token_lengths=[], history={})
    run = changed(run, passages=[a_passage(markup.encode())])
    methods = [
        ComparedMethod(name, [run], {markup: markup}, bits, math.nan, 0.1)
        for name, bits in ((markup, 1.0), ("b", 2.0))
    ]
    differences = {(markup, "b"): Difference(-1.0, 0.1, math.nan, -2.0, -0.5, math.nan)}
    comparison = Comparison(markup, {markup: markup}, methods, differences, {markup: markup})
    page = Page(comparison_page(comparison, draw_pictures(comparison)))
    assert page.texts == [markup, markup]
    assert page.headings[:2] == [markup, markup]
    # two rows of facts and failures, a row in five tables, a reference
    assert page.cells.count(markup) == 10
    assert not page.tags & {"script", "s"}
    drawn = [of_series(method, windows=[a_window(markup)]) for method in methods]
    pictures = draw_pictures(replace(comparison, methods=drawn))
    assert markup in pictures["window-1"].caption
    assert not Page(comparison_page(comparison, pictures)).tags & {"script", "s"}


def test_learned_boundaries_have_figures_and_what_was_not_measured_is_a_dash(compared):
    old = replace(
        compared.methods[0],
        name="old",
        runs=[changed(run, learned=None) for run in compared.methods[0].runs],
    )
    other = Learned({"space": (0.25, 0.1), "digit": (0.75, 0.2)}, [])
    first, second = compared.methods[1].runs
    half = replace(compared.methods[1], name="half", runs=[first, changed(second, learned=other)])
    comparison = a_comparison([compared.methods[0], old, half])
    cells = dict(boundaries_table(comparison).cells())
    rows_of = [cells[method.name] for method in comparison.methods]
    assert list(rows_of[0])[2:-1] == ["space (25%)", "letter (75%)", "digit (75%)"]
    table = {
        name: list(row.values())
        for name, row in zip(("whole", "old", "half"), rows_of, strict=True)
    }
    assert table["whole"] == ["5.00", "0.333", "0.900", "0.050", "–", "def␣  ü␣<b>"]
    assert table["old"] == ["5.00", "0.333", "–", "–", "–", "–"]
    assert table["half"] == ["5.00", "0.333", "0.500", "0.050", "0.200", "def␣  ü␣<b>"]
    source = comparison_page(comparison, {})
    assert "ü␣&lt;b&gt;" in source
    series = a_comparison_of_series(compared.methods)
    assert not boundaries_table(series).columns


class Matrix(Page):
    """Collects (class, title) of the cells that say how two methods compare."""

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        if tag == "td" and "tip" in dict(attrs).get("class", ""):
            self.cell_attributes = [*getattr(self, "cell_attributes", []), dict(attrs)]


def test_the_matrix_agrees_with_the_pairs(compared):
    page = Matrix(comparison_page(compared, {}))
    names = [method.name for method in sort_methods(compared)]
    ordered = [(row, column) for row in names for column in names if row != column]
    assert len(page.cell_attributes) == len(ordered)
    pairs = compared.both_ways
    for (row, column), cell in zip(ordered, page.cell_attributes, strict=True):
        difference = pairs[row, column]
        assert describe_difference(row, column, difference, "bits per byte") in cell["title"]
        assert f"{row} − {column}" in cell["title"]
        assert cell["class"].split() == ["tip", difference.verdict.replace(" ", "-")]
        assert f"{difference.mean:+.4f}".replace("-", "−") in page.cells


@given(FINITE, st.floats(0, 10))
def test_a_pair_seen_from_the_other_side(gap, width):
    difference = Difference(gap, 0.1, 0.1, gap - width, gap + width, 0.5)
    both = a_comparison(
        [a_method("a"), a_method("b")], differences={("a", "b"): difference}
    ).both_ways
    there = both["a", "b"]
    back = both["b", "a"]
    assert there == difference
    assert back.mean == -gap
    assert (back.low, back.high) == (-difference.high, -difference.low)
    assert {there.verdict, back.verdict} in ({"better", "worse"}, {"not separable"})


def test_the_conclusion_names_the_best_method_and_how_sure_that_is(compared):
    conclusion = " ".join(describe_result(compared))
    assert "bpe has the lowest bits per byte: 2.3050 ± 0.0050" in conclusion
    assert "Not separable from it at 95%: learned (+0.0100)" in conclusion
    assert "better than uniform (difference: 0.2000)" in conclusion
    assert "At 95%, after Holm's correction for 3 pairs, it is better than uniform" in conclusion
    none = {
        pair: replace(difference, p_holm=0.06) for pair, difference in compared.differences.items()
    }
    assert "better than" not in " ".join(describe_result(replace(compared, differences=none)))
    alone = {
        pair: replace(difference, seed_error=math.nan)
        for pair, difference in compared.differences.items()
    }
    assert "better than" not in " ".join(describe_result(replace(compared, differences=alone)))
    assert "the certainty of this is unknown" in " ".join(
        describe_result(replace(compared, differences={}))
    )


def test_failed_runs_are_reported(compared, capsys):
    failed = replace(compared, failed={"bpe, seed 1": "no memory"})
    page = Page(comparison_page(failed, {}))
    assert {"bpe, seed 1", "no memory"} <= set(page.cells)
    print_comparison(failed)
    assert "bpe, seed 1: no memory" in capsys.readouterr().out


def test_tables_read_back_equal(compared, written):
    folder, _ = written
    for method, row in zip(sort_methods(compared), rows(folder / "methods.csv"), strict=True):
        assert row["method"] == method.name
        assert float(row["bits_per_byte"]) == method.loss
        assert float(row["seed_error"]) == method.seed_error
        assert float(row["whitespace_f1"]) == compared.mean(method.name, "whitespace f1")
    runs = [(method, run) for method in sort_methods(compared) for run in method.runs]
    for (method, run), row in zip(runs, rows(folder / "runs.csv"), strict=True):
        assert (row["method"], int(row["seed"]), row["folder"]) == (
            method.name,
            run.seed,
            run.folder,
        )
        assert (float(row["bits_per_byte"]), float(row["bits_per_byte_early"])) == (
            run.loss,
            run.evaluation.loss_early,
        )
        assert float(row["boundary_rate"]) == run.evaluation.boundary_rate
        assert (float(row["flops"]), float(row["seconds"])) == (run.flops, run.seconds)
    for (pair, difference), row in zip(
        compared.differences.items(), rows(folder / "pairs.csv"), strict=True
    ):
        assert (float(row["difference"]), float(row["low"]), float(row["high"])) == (
            difference.mean,
            difference.low,
            difference.high,
        )
        assert (row["first"], row["second"], row["verdict"]) == (*pair, difference.verdict)
        errors = (difference.seed_error, difference.document_error, difference.p, difference.p_holm)
        assert (
            tuple(float(row[name]) for name in ("seed_error", "document_error", "p", "p_holm"))
            == errors
        )


def test_flops_between_and_beyond_the_known_points():
    curve = ([100.0, 200.0], [1000.0, 4000.0])
    assert interpolate_flops([0, 50, 100, 150, 200, 400], curve).tolist() == [
        0,
        500,
        1000,
        2500,
        4000,
        8000,
    ]


@given(
    st.lists(st.floats(1, 1e9), min_size=1, max_size=20, unique=True).map(sorted), st.floats(1, 1e6)
)
def test_flops_in_proportion_stay_in_proportion(at, each):
    flops = interpolate_flops([x / 2 for x in at] + [2 * at[-1]], (at, [each * x for x in at]))
    assert flops == pytest.approx([each * x / 2 for x in at] + [2 * each * at[-1]])


def test_a_band_against_flops_keeps_its_values():
    method = a_method("m")
    by_bytes, by_flops = (
        compute_band(method, "validation/bits_per_byte", by_flops=flag) for flag in (False, True)
    )
    assert by_flops.x == pytest.approx(50 * by_bytes.x)
    assert by_flops.mean == pytest.approx(by_bytes.mean)


@given(st.lists(st.lists(FINITE, min_size=1, max_size=12), min_size=1, max_size=4))
def test_a_band_holds_its_mean_and_every_seed(values):
    band = average_curves([(list(range(len(y))), y) for y in values])
    shared = min(map(len, values))
    assert band.x.tolist() == list(range(shared))
    for i in range(shared):
        here = [y[i] for y in values]
        assert (band.low[i], band.high[i]) == (min(here), max(here))
        assert band.mean[i] == pytest.approx(np.mean(here))


def test_a_band_leaves_out_what_is_not_finite():
    assert average_curves([([1, 2, 3], [1.0, math.nan, 3.0])]).mean.tolist() == [1, 3]
    assert average_curves([([1], [math.inf]), ([], [])]) is None
    assert average_curves([([1, 2], [1.0, 1.0]), ([3, 4], [1.0, 1.0])]) is None


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=9), min_size=1, max_size=3))
def test_shares_of_lengths_add_up(counts):
    method = ComparedMethod(
        "m", [a_run(token_lengths=c, history={}, passages=[]) for c in counts], {}, 1.0, 0.0, 0.0
    )
    shares = compute_length_shares(a_comparison([method]), "m")
    assert bool(len(shares)) == any(map(sum, counts))
    assert sum(shares) == pytest.approx(1.0 if len(shares) else 0.0)


def test_the_validation_loss_is_drawn_where_there_are_points():
    both = a_comparison([a_method("a"), a_method("b")])
    assert choose_loss_metric(both) == "validation/bits_per_byte"
    history = {
        "train/bits_per_byte": ([1, 2], [3.0, 2.0]),
        "validation/bits_per_byte": ([2], [2.0]),
    }
    assert (
        choose_loss_metric(a_comparison([a_method("a", history=history), a_method("b")]))
        == "train/bits_per_byte"
    )


def test_the_scale_is_the_range_of_uncertain_probabilities():
    certain = a_method("uniform", probability=1.0)
    assert compute_colour_scale(a_comparison([certain])) == (0.0, 1.0)
    low, high = compute_colour_scale(
        a_comparison([certain, a_method("a", probability=0.1), a_method("b", probability=0.4)])
    )
    assert (low, high) == pytest.approx((0.1, 0.4))


def test_a_missing_metric_is_left_out():
    bare = a_method(
        "bare", 2.2, history={}, token_lengths=[], agreement={}, passages=[], learned=None
    )
    assert list(draw_pictures(a_comparison([bare, a_method("full")]))) == [
        name for name in ALL if name != "ranks"
    ]
    alone = a_comparison([bare, replace(bare, name="other")])
    pictures = draw_pictures(alone)
    assert list(pictures) == ["methods", "differences"]
    assert Page(comparison_page(alone, pictures)).headings == [
        "Title",
        "Title",
        "Methods, best first",
        "Robust to exceptional seeds",
        "Every pair",
        "Notes",
    ]


def test_the_in_context_score_is_the_last_validations():
    history = {"validation/in_context_score": ([1, 2], [0.25, 0.5])}
    scored = a_comparison([a_method("scored", history=history), a_method("unscored")])
    table = methods_table(scored)
    cells = {name: row["in-context score"] for name, row in table.cells()}
    assert cells == {"scored": "0.500", "unscored": "–"}
    assert list(table.frame["in_context_score"].dropna()) == [0.5]
    unscored = methods_table(a_comparison([a_method("a"), a_method("b")]))
    assert "in-context score" not in unscored.headers()


def test_one_method_with_one_seed(tmp_path, capsys):
    alone = a_comparison([a_method("only", seeds=1)])
    paths = write_report(alone, tmp_path)
    assert "differences.png" not in {path.name for path in paths}
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert "2.0000 ± –" in page.cells
    assert "Every pair" not in page.headings
    print_comparison(alone)
    assert "nothing to compare" in capsys.readouterr().out


def test_twelve_methods_look_different_whatever_their_rank():
    methods = [a_method(f"m{i}", 2 + i / 10, seeds=1, history={}) for i in range(12)]
    looks = assign_styles(a_comparison(methods, differences={}))
    assert (
        len(set(looks.values())) == len({(look.colour, look.line) for look in looks.values()}) == 12
    )
    swapped = [replace(method, loss=-method.loss) for method in methods]
    assert assign_styles(a_comparison(swapped, differences={})) == looks


def test_nothing_is_cut_at_a_pictures_edge():
    names = [
        "a method of a remarkably long name",
        "_x$^{",
        "方法",
        "short",
        "learned (REINFORCE)",
        "b",
        "gumbel",
    ]
    methods = [a_method(name, 2 + i / 10, points=12) for i, name in enumerate(names)]
    of_text = draw_pictures(a_comparison(methods))
    of_steps = draw_pictures(a_comparison_of_series(methods))
    for picture in [*of_text.values(), *(of_steps[name] for name in WINDOWS)]:
        light, dark = (imread(io.BytesIO(png))[..., :3] for png in (picture.light, picture.dark))
        assert light[0, 0].min() > 0.9
        assert dark[0, 0].max() < 0.1
        # No letter reaches the left or the lower edge, where names and legends stand.
        for edge in (light[:, 0], light[-1], dark[:, 0], dark[-1]):
            assert np.ptp(edge, axis=0).max() < 0.01


def test_the_terminal_shows_names_literally_and_the_pairs_of_the_best(capsys):
    methods = [a_method("[red]best", 1.0), a_method("b\x1b[31m", 2.0), a_method("c", 3.0)]
    print_comparison(a_comparison(methods))
    shown = capsys.readouterr().out
    assert "[red]best" in shown
    assert "\x1b" not in shown
    assert "- [red]best is better than b" in shown
    assert "- b" not in shown


@settings(max_examples=25)
@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True), st.floats(allow_nan=True)
)
def test_any_names_and_values_give_a_page(names, bits):
    methods = [replace(a_method(name, seeds=1, points=1), loss=bits) for name in names]
    assert len(Page(comparison_page(a_comparison(methods), {})).texts) == len(TEXTS) * len(names)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("kind", ["text", "series"])
def test_a_browser_shows_the_pictures_and_never_scrolls_sideways(compared, tmp_path, width, kind):
    make = a_comparison if kind == "text" else a_comparison_of_series
    long = [
        replace(method, name=method.name + " of a remarkably long name" * 3)
        for method in compared.methods
    ]
    wide = [a_method(f"number {i}", 2 + i / 10, seeds=5) for i in range(9)]
    shown = draw_pictures(make(compared.methods))
    source = html.escape(comparison_page(make([*long, *wide]), shown))
    # A frame may be as narrow as a phone, a window may not; the page itself runs no script.
    page = tmp_path / "page.html"
    page.write_text(
        f"""<!DOCTYPE html><meta charset="utf-8"><title></title>
        <script>function measure(page) {{
            const root = page.documentElement, shown = [...page.images].filter((image) => image.naturalWidth > 0);
            document.title = [root.clientWidth, root.scrollWidth, shown.length].join();
        }}</script>
        <iframe onload="measure(this.contentDocument)" style="width: {width}px; border: 0" srcdoc="{source}">
        </iframe>""",
        encoding="utf-8",
    )
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    flags = [
        "--headless",
        "--no-sandbox",
        "--no-first-run",
        *(f"--disable-{name}" for name in quiet),
    ]
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    visible_width, whole_width, pictures = map(int, title.split(","))
    assert whole_width <= visible_width <= width
    assert pictures == len(shown) == len(ALL) + (len(WINDOWS) if kind == "series" else 0)


def test_folders_with_odd_names_are_written(tmp_path):
    odd = a_comparison([a_method("m", seeds=1, history={}, folder="runs/\udce9")])
    write_report(odd, tmp_path)
    assert rows(tmp_path / "runs.csv")[0]["folder"] == "runs/\\udce9"

"""Write the tables of docs/results.md, docs/released.md and docs/bench.md, and three pictures, from stored figures.

    python docs/results/tables.py

Each table follows a comment with its name, such as ``<!-- table: books -->``.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy import stats

from tokenv.compare.robust_statistics import student_interval
from tokenv.compare.score_statistics import Difference, compare_scores
from tokenv.plotting.figures import save_png
from tokenv.plotting.theme import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, with_error

# a method, its runs, and its difference from the reference in words
Summary = tuple[str, pd.DataFrame, str]
FOLDER = Path(__file__).parent
DOCS = FOLDER.parent
REFERENCE = "learned, whitespace first"
NO_TOKENS = 0.01  # boundaries per byte of a transformer, whose one token is the first byte
BASELINE = "baseline"
# Rate, bits per byte and share of blanks with a boundary in one run each of the released code, on FineWeb.
RELEASED = {
    "baseline": (0.196, 1.548, 0.99),
    "gamma 1": (0.215, 1.542, 0.41),
    "no early exit in rewards": (0.200, 1.562, 0.72),
    "not centred over the batch": (0.208, 1.543, 0.99),
    "window 0": (0.196, 1.51, 0.99),
    "no rate loss": (1.0, 1.39, 1.0),
}
# Methods of docs/bench.md which have another name in the laboratory's table; a window's suffix has no part in it.
LABORATORY = {
    "early_exit": "early_exit(gamma=0.8)",
    "rloo": "rloo(reward_only=True)",
    "rloo K=4": "rloo(num_samples=4, reward_only=True)",
    "off_policy": "off_policy(rollouts=None)",
    "reinpatch": "reinpatch(gamma=0.8)",
    "branch": "branch(positions=16)",
}
STRAIGHT_THROUGH = ("straight", "gumbel", "reinmax", "gumbel_rao")
COLOURS = {"whitespace first": BLUE, "no imitation": ORANGE, "books": GREEN}
FLOPS = {  # of a training, attention included, by the models' width and budget
    64: {"2 MB": 1.73e12, "6 MB": 5.2e12},
    128: {"width 128": 7.25e12, "width 128, 6 MB": 2.17e13, "width 128, 20 MB": 7.25e13},
}
TICKS = [2e12, 5e12, 1e13, 2e13, 5e13]
# of the picture of loss against FLOPs: the beginning of their names, as windows differ, and their places beside others
FRONTIER = {
    "uniform": (ORANGE, 0.97),
    "transformer": (GREEN, 0.99),
    "learned, whitespace first": (BLUE, 1.01),
    "learned, linear critic, detached": (GREY, 1.0),
    "carried": (PINK, 1.03),
    "bpe, causal": (AMBER, 1.05),
}


def mean_and_error(value: pd.Series) -> str:
    """Return the mean over seeds and its standard error, which one seed has not."""
    return with_error(value.mean(), value.sem())


def compare_with(reference: str, runs: pd.DataFrame) -> dict[str, Difference]:
    """Return every other method's difference from a reference by paired t-tests over shared seeds, the best first.

    A run's loss counts as that of a single document, so that intervals and p-values account for the seeds alone.
    """
    losses = {}
    seeds = {}
    best_first = runs.groupby("method")["bits_per_byte"].mean().sort_values().index
    for method in [*best_first.drop(reference), reference]:
        own = runs[runs["method"] == method]
        losses[method] = own[["bits_per_byte"]]
        seeds[method] = list(own["seed"])
    pairs = compare_scores(losses, seeds=seeds, reference=reference).differences
    return {first: pairs[first, second] for first, second in pairs if second == reference}


def describe_test(test: Difference, p: float | None = None) -> str:
    """Return a difference with its 95% interval and a p-value, by default the test's; nothing for one seed."""
    if test.one_seed:
        return ""
    if p is None:
        p = test.p
    text = f"{test.mean:z.3f} ({test.low:z.3f} to {test.high:z.3f}), {p:.2g}"
    return text.replace("-", "−")


def with_several_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of methods with three seeds or more."""
    return runs.groupby("method").filter(lambda of_method: len(of_method) > 2)


def compare_methods(runs: pd.DataFrame, reference: str = REFERENCE) -> list[str]:
    """Return the lines of a table of methods with three seeds or more at one budget, the best first.

    The reference, of which the others' differences are, is in bold. The number of seeds is the same for all, and stands
    in the page's text.
    """
    runs = with_several_seeds(runs)
    assert runs.groupby("method").size().nunique() == 1
    lines = ["| | bits per byte | rate | behind the reference (95%), p |", "|---|---|---|---|"]
    summaries = summarise_methods(runs, reference, describe_test)
    for method, own, difference in best_first(summaries):
        name = method
        if method == reference:
            name = f"**{method}**"
            difference = "reference"
        mean_rate = own["boundary_rate"].mean()
        rate = "–"
        if mean_rate >= NO_TOKENS:
            rate = f"{mean_rate:.3f}"
        cells = [name, mean_and_error(own["bits_per_byte"]), rate, difference]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def describe_corrected_test(test: Difference) -> str:
    """Return a difference with p after Holm's correction, in bold where it is separable."""
    text = describe_test(test, test.p_holm)
    if test.verdict == "not separable":
        return text
    return f"**{text}**"


def released_figure(method: str, number: int) -> str:
    """Return a figure of the released code in italics; nothing for a method without one."""
    if method not in RELEASED:
        return ""
    return f" *{RELEASED[method][number]:g}*"


def summarise_methods(
    runs: pd.DataFrame,
    reference: str = BASELINE,
    describe: Callable[[Difference], str] = describe_corrected_test,
) -> list[Summary]:
    """Return the methods, the reference first, with their runs and their differences from it in words."""
    tests = compare_with(reference, runs)
    described = {reference: ""}
    for method, test in tests.items():
        described[method] = describe(test)
    return [(method, runs[runs["method"] == method], text) for method, text in described.items()]


def best_first(summaries: list[Summary]) -> list[Summary]:
    """Return methods by their mean loss."""
    return sorted(summaries, key=lambda summary: summary[1]["bits_per_byte"].mean())


def compare_ablations(runs: pd.DataFrame) -> list[str]:
    """Return the lines of the table of all ablations after an imitation of whitespace, the best first."""
    lines = [
        "| | rate at the end | bits per byte | blanks with a boundary | behind the baseline (95%), p |"
    ]
    lines.append("|---|---|---|---|---|")
    for method, own, difference in summarise_methods(runs):
        rate = f"{own['boundary_rate_raw'].mean():.3f}{released_figure(method, 0)}"
        bits = f"{mean_and_error(own['bits_per_byte'])}{released_figure(method, 1)}"
        blanks = f"{own['whitespace_recall'].mean():.2f}{released_figure(method, 2)}"
        lines.append(f"| {method} | {rate} | {bits} | {blanks} | {difference} |")
    return lines


def compare_conditions(runs: pd.DataFrame) -> list[str]:
    """Return the lines of the table of ablations without imitation, and on books."""
    lines = ["| | | bits per byte | blanks with a boundary | behind the baseline (95%), p |"]
    lines.append("|---|---|---|---|---|")
    for condition, of_condition in runs.groupby("protocol", sort=False):
        name = condition
        for method, own, difference in summarise_methods(of_condition):
            bits = mean_and_error(own["bits_per_byte"])
            blanks = f"{own['whitespace_recall'].mean():.2f}"
            lines.append(f"| {name} | {method} | {bits} | {blanks} | {difference} |")
            name = ""
    return lines


def draw_ablations(runs: pd.DataFrame, path: Path) -> None:
    """Draw the difference of every ablation from the baseline with its 95% interval, a colour for each protocol."""
    methods = list(compare_with(BASELINE, runs[runs["protocol"] == "whitespace first"]))
    figure = Figure(figsize=(7, 4.6), dpi=140, layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="grey", lw=0.8)
    for number, (protocol, of_protocol) in enumerate(runs.groupby("protocol", sort=False)):
        tests = compare_with(BASELINE, of_protocol)
        rows = [methods.index(method) + 0.22 * (number - 1) for method in tests]
        means = [test.mean for test in tests.values()]
        reach = [(test.high - test.low) / 2 for test in tests.values()]
        axes.errorbar(
            means, rows, xerr=reach, fmt="o", ms=4, color=COLOURS[protocol], label=protocol
        )
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte more than the baseline (95% interval)")
    axes.legend(frameon=False)
    save_png(figure, path)


def draw_frontier(by_budget: dict[str, pd.DataFrame], path: Path) -> None:
    """Draw bits per byte against FLOPs, with the 95% interval over seeds; a line for each method and width."""
    figure = Figure(figsize=(7, 4.2), dpi=140, layout="constrained")
    axes = figure.subplots()
    for (width, budgets), style in zip(FLOPS.items(), ("o--", "s-"), strict=True):
        for name, (colour, beside) in FRONTIER.items():
            points = []
            for budget, flops in budgets.items():
                of_budget = with_several_seeds(by_budget[budget])
                best = best_variant(of_budget, name)
                if best is not None:
                    points.append((flops * beside, best.mean(), interval(best)))
            if points:
                flops_P, loss_P, reach_P = zip(*points, strict=True)
                label = f"{name}, width {width}"
                axes.errorbar(
                    flops_P, loss_P, yerr=reach_P, fmt=style, ms=4, color=colour, label=label
                )
    axes.set(xscale="log", xlabel="FLOPs of the training", ylabel="bits per byte (95% interval)")
    axes.set_xticks(TICKS, [f"{flops:.0e}".replace("+", "") for flops in TICKS])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=8)
    save_png(figure, path)


def draw_in_context(runs: pd.DataFrame, path: Path) -> None:
    """Draw bits per byte against the in-context score, a point for each run."""
    figure = Figure(figsize=(7, 3.6), dpi=140, layout="constrained")
    axes = figure.subplots()
    for (method, own), marker in zip(runs.groupby("method"), "o^sDv", strict=True):
        colour = next(colour for name, (colour, _) in FRONTIER.items() if method.startswith(name))
        axes.scatter(
            own["in_context_score"],
            own["bits_per_byte"],
            label=method,
            color=colour,
            marker=marker,
            s=30,
        )
    axes.set(xlabel="in-context score (bits per byte)", ylabel="bits per byte")
    axes.legend(frameon=False, fontsize=8)
    save_png(figure, path)


def best_variant(runs: pd.DataFrame, name: str) -> pd.Series | None:
    """Return the losses of the best method of this name, or of this name and a window; None without any."""
    variants = re.compile(f"{name}(, window \\d+)?$")
    own = runs[runs["method"].map(lambda method: variants.match(method) is not None)]
    if own.empty:
        return None
    by_method = own.groupby("method")["bits_per_byte"]
    return by_method.get_group(by_method.mean().idxmin())


def interval(loss: pd.Series) -> float:
    """Return half the width of the 95% interval of a mean over seeds."""
    _, half = student_interval(0.0, [(loss.sem(), len(loss) - 1)])
    return half


def laboratory_costs(methods: pd.Index) -> pd.Series:
    """Return noise × FLOPs of those methods which the laboratory has measured, relative to `reinforce`.

    It is the geometric mean over the checkpoints, of the gradient with respect to the logits.
    """
    figures = pd.read_csv(DOCS / "variance.csv")
    figures = figures[figures["component"] == "logits"]
    products = (figures["noise"] * figures["flops"]).groupby(figures["estimator"])
    costs = products.apply(stats.gmean)
    measured = {}
    for method in methods:
        name = LABORATORY.get(method, method.removesuffix(" w=0"))
        if name in costs:
            measured[method] = costs[name] / costs["reinforce"]
    return pd.Series(measured)


def compare_estimators(runs: pd.DataFrame, heading: str, further: pd.Series) -> list[str]:
    """Return the lines of a table of estimators, the best first.

    Args:
        runs: their runs.
        heading: heading of the last column.
        further: figures of the last column by method; it is empty for a method without one.
    """
    lines = [f"| method | bits per byte | FLOPs | behind `reinforce` (95%), p | {heading} |"]
    lines.append("|---|---|---|---|---|")
    for method, own, difference in best_first(summarise_methods(runs, "reinforce")):
        figure = ""
        if method in further:
            figure = f"{further[method]:.2g}"
        flops = f"{own['flops'].mean() / 1e10:.1f}e10"
        cells = [method, mean_and_error(own["bits_per_byte"]), flops, difference, figure]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def correlate_ranks(costs: pd.Series, loss: pd.Series) -> list[str]:
    """Return the lines of the table of rank correlations between the laboratory's noise × FLOPs and the loss."""
    lines = ["| | estimators | Spearman's rank correlation, p |", "|---|---|---|"]
    rows = {"score function": costs.index.difference(STRAIGHT_THROUGH), "all": costs.index}
    for name, methods in rows.items():
        test = stats.spearmanr(costs[methods], loss[methods])
        lines.append(f"| {name} | {len(methods)} | {test.statistic:.2f}, {test.pvalue:.1g} |")
    return lines


def read_budgets() -> dict[str, pd.DataFrame]:
    """Return the runs on Python source by budget."""
    return dict(list(pd.read_csv(FOLDER / "python.csv").groupby("budget")))


def read_ablations() -> pd.DataFrame:
    """Return the runs of the ablations."""
    return pd.read_csv(FOLDER / "ablations.csv")


def make_tables(
    by_budget: dict[str, pd.DataFrame], ablations: pd.DataFrame
) -> dict[str, dict[str, list[str]]]:
    """Return the lines of all tables by page and name, from the runs on Python source by budget and the ablations."""
    books = pd.read_csv(FOLDER / "books-runs.csv")
    after_whitespace = ablations["protocol"] == "whitespace first"
    results = {
        "2 MB": compare_methods(by_budget["2 MB"]),
        "6 MB": compare_methods(by_budget["6 MB"]),
        "rewards and imitation": compare_methods(
            by_budget["2 MB, rewards and imitation"], "imitation alone"
        ),
        "rloo and imitation": compare_methods(
            by_budget["1.8 MB, rloo and imitation"], "imitation alone, 1.8 MB"
        ),
        "1,024 bytes, 2 sequences": compare_methods(by_budget["1,024 bytes, 2 sequences"]),
        "1,024 bytes, 8 sequences": compare_methods(by_budget["1,024 bytes, 8 sequences"]),
        "width 128, 1,024 bytes": compare_methods(by_budget["width 128, 1,024 bytes"], "carried"),
        "width 128": compare_methods(by_budget["width 128"]),
        "width 128, 6 MB": compare_methods(by_budget["width 128, 6 MB"], "carried"),
        "width 128, 20 MB": compare_methods(by_budget["width 128, 20 MB"], "carried"),
        "books": compare_methods(books),
    }
    released = {
        "ablations": compare_ablations(ablations[after_whitespace]),
        "other ablations": compare_conditions(ablations[~after_whitespace]),
    }
    bench = pd.read_csv(DOCS / "bench-estimators.csv")
    frozen = bench[bench["protocol"] == "A-words"].set_index("method")
    new_seeds = pd.read_csv(DOCS / "bench-new-seeds.csv")
    by_protocol = dict(list(new_seeds.groupby("protocol")))
    costs = laboratory_costs(frozen.index)
    word_f1 = by_protocol["B-words"].groupby("method")["true_tokens_f1"].mean()
    estimators = {
        "A-words": compare_estimators(by_protocol["A-words"], "laboratory", costs),
        "laboratory": correlate_ranks(costs, frozen["loss"]),
        "B-words": compare_estimators(by_protocol["B-words"], "F1", word_f1),
    }
    return {"results.md": results, "released.md": released, "bench.md": estimators}


def fill(page: str, tables: dict[str, list[str]]) -> str:
    """Return a page with the lines of each table after the comment with the table's name."""
    for name, lines in tables.items():
        comment = f"<!-- table: {name} -->\n"
        assert comment in page, f"no {comment}"
        written = comment + "\n".join(lines) + "\n"
        page = re.sub(f"{comment}(\\|.*\n)*", lambda _, new=written: new, page)
    return page


def main() -> None:
    """Write tables and pictures."""
    by_budget = read_budgets()
    ablations = read_ablations()
    for name, tables in make_tables(by_budget, ablations).items():
        path = DOCS / name
        path.write_text(fill(path.read_text(), tables))
    draw_ablations(ablations, FOLDER / "ablations.png")
    draw_frontier(by_budget, FOLDER / "frontier.png")
    draw_in_context(by_budget["width 128, 1,024 bytes"], FOLDER / "in-context.png")


if __name__ == "__main__":
    main()

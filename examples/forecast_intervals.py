"""Forecast a table of your own with conformal intervals, and measure what they cover.

    python examples/forecast_intervals.py runs/1 table.csv [WINDOWS]

Of WINDOWS (20) windows before the table's end, the earlier half sets the intervals' width, and the later half measures
which share of values they contain. Then the table is continued.
"""

import sys

import pandas as pd

import tokenv


def main(
    run: str, table: str, windows: int = 20, level: int = 80
) -> tuple[pd.DataFrame, pd.Series, pd.DataFrame]:
    """Return the scored windows, the coverage by step, and the continuation with its intervals."""
    model = tokenv.SeriesModel.from_pretrained(run)
    dates = None
    if date := model.config.data.options.date:
        dates = [date]
    frame = pd.read_csv(table, parse_dates=dates)
    horizon = model.lm.codec.horizon or 24
    known = model.cross_validation(frame, horizon, windows, quantiles=[0.1, 0.9])
    late = known.groupby(["unique_id", "cutoff"]).ngroup() % windows >= windows // 2
    scored = tokenv.conformal_intervals(known[late], known[~late], level=[level])
    inside = scored["y"].between(scored[f"tokenv-lo-{level}"], scored[f"tokenv-hi-{level}"])
    step = scored.groupby(["unique_id", "cutoff"]).cumcount().rename("step") + 1
    future = model.forecast(frame, horizon)
    return (
        scored,
        inside.groupby(step).mean(),
        tokenv.conformal_intervals(future, known, level=[level]),
    )


if __name__ == "__main__":
    scored, coverage, future = main(*sys.argv[1:3], *map(int, sys.argv[3:]))
    quantiles = scored["y"].between(scored["tokenv-q-10"], scored["tokenv-q-90"])
    print(
        f"the model's own quantiles cover {quantiles.mean():.1%}, conformal intervals {coverage.mean():.1%}"
    )
    print(coverage.to_string(float_format="{:.1%}".format))
    print(future.tail().to_string(index=False))

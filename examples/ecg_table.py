"""Write the tables of docs/patches.md from record 100 of the MIT-BIH Arrhythmia Database, with a clock as an input.

    python examples/ecg_table.py RECORD OUTPUT

RECORD is a Parquet table with a column ``mlii`` of 360 steps a second. OUTPUT gets its means of six steps as ``mlii``,
and columns which say how long ago the agent ``events`` saw a heartbeat: sine and cosine of the steps since then, with
periods of 16 to 128 steps.
"""

import math
import sys

import numpy as np
import pandas as pd

from tokenv.agents import Events

STEPS = 6  # which are averaged
PERIODS = (16, 32, 64, 128)


def steps_since_beat(value_L: np.ndarray, beats: Events) -> np.ndarray:
    """Return the steps since the newest jump which ``beats`` counts as a heartbeat: [L] -> int64 [L].

    The scale is the record's standard deviation; within a window, the agent takes that of the window's context.
    """
    jump_L = np.abs(np.diff(value_L, prepend=value_L[0])) > beats.threshold * value_L.std()
    since = beats.refractory
    result = []
    for jump in jump_L:
        since = since + 1
        if jump and since >= beats.refractory:
            since = 0
        result.append(since)
    return np.array(result)


def main(record: str, output: str) -> None:
    """Read the record and write the table."""
    value_L = pd.read_parquet(record)["mlii"].to_numpy()
    whole = len(value_L) // STEPS * STEPS
    value_L = value_L[:whole].reshape(-1, STEPS).mean(1)
    columns = {"mlii": value_L}
    since_L = steps_since_beat(value_L, Events())
    for period in PERIODS:
        phase_L = 2 * math.pi * np.minimum(since_L, max(PERIODS) - 1) / period
        columns[f"sin{period}"] = np.sin(phase_L)
        columns[f"cos{period}"] = np.cos(phase_L)
    pd.DataFrame(columns).to_parquet(output)
    beats = int((since_L == 0).sum())
    print(f"{len(value_L)} steps, {beats} heartbeats, {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])

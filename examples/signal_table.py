"""Write the tables of docs/patches.md: an electrocardiogram or a blood pressure.

    python examples/signal_table.py RECORD OUTPUT [STEPS]

RECORD is record 100 of the MIT-BIH Arrhythmia Database as a Parquet table with a column ``mlii``, 360 samples a second,
or ``03700181.dat`` among wfdb-python's samples (from the MIMIC database). OUTPUT gets the electrocardiogram as
``mlii``, 60 (default) or 360 STEPS a second, and a clock as an input: sine and cosine, of periods from 16/60 to 128/60
seconds, of the steps since the agent ``events`` saw a heartbeat; or the arterial blood pressure as ``abp``, in mmHg, 60
steps a second.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from tokenv.agents import Events

SAMPLES = 360  # a second of the electrocardiogram
PERIODS = (16, 32, 64, 128)  # steps, at 60 a second
# by steps a second, what the agent takes for a heartbeat
BEATS = {60: Events(), 360: Events(threshold=0.8, refractory=90)}
# of the record 03700181, as its header says: six samples of 12 bits a frame, of which the fifth is the pressure
FRAME, PRESSURE = 6, 4
GAIN, BASELINE = 12.84, -1605


def mean_of(value_L: np.ndarray, steps: int) -> np.ndarray:
    """Return the means of so many steps each."""
    whole = len(value_L) // steps * steps
    return value_L[:whole].reshape(-1, steps).mean(1)


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


def read_heart(record: Path, steps: int) -> dict[str, np.ndarray]:
    """Return the electrocardiogram and the clock, so many steps a second."""
    value_L = mean_of(pd.read_parquet(record)["mlii"].to_numpy(), SAMPLES // steps)
    columns = {"mlii": value_L}
    finer = steps // 60
    since_L = np.minimum(steps_since_beat(value_L, BEATS[steps]), max(PERIODS) * finer - 1)
    for period in PERIODS:
        phase_L = 2 * math.pi * since_L / (period * finer)
        columns[f"sin{period}"] = np.sin(phase_L)
        columns[f"cos{period}"] = np.cos(phase_L)
    return columns


def read_pressure(record: Path) -> dict[str, np.ndarray]:
    """Return the blood pressure. In WFDB's format 212, three bytes hold two samples in two's complement."""
    byte_P3 = np.fromfile(record, dtype=np.uint8).reshape(-1, 3).astype(int)
    first_P = byte_P3[:, 0] + (byte_P3[:, 1] % 16) * 256
    second_P = byte_P3[:, 2] + (byte_P3[:, 1] // 16) * 256
    sample_L = np.stack([first_P, second_P], 1).ravel()
    sample_L = np.where(sample_L < 2048, sample_L, sample_L - 4096)
    pressure_L = sample_L.reshape(-1, FRAME)[:, PRESSURE]
    return {"abp": mean_of((pressure_L - BASELINE) / GAIN, 2)}


def main(record: str, output: str, steps: str = "60") -> None:
    """Read the record and write the table."""
    if steps not in {str(known) for known in BEATS}:
        raise SystemExit(f"{steps} steps a second: expected 60 or 360")
    if record.endswith(".dat"):
        columns = read_pressure(Path(record))
    else:
        columns = read_heart(Path(record), int(steps))
    table = pd.DataFrame(columns)
    table.to_parquet(output)
    print(f"{len(table)} steps of {', '.join(table)}: {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])

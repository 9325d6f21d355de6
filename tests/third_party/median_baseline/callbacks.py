"""A callback: the largest weight of the model before and after training is written into a file."""

from pathlib import Path
from typing import Any

from tokenv.core.callbacks import Callback


class LargestWeight(Callback):
    def __init__(self, file: str = "weights.txt") -> None:
        self.file = Path(file)

    def on_train_begin(self, trainer: Any) -> None:
        self.write(trainer)

    def on_train_end(self, trainer: Any) -> None:
        self.write(trainer)

    def write(self, trainer: Any) -> None:
        largest = max(
            float(parameter.abs().max()) for parameter in trainer.components.lm.parameters()
        )
        with self.file.open("a") as file:
            file.write(f"{trainer.state.symbols} {largest}\n")

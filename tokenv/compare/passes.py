"""Equal passes through the decoder, for methods that take several samples of a text."""

from dataclasses import replace

import torch

from tokenv.config.schema import Config
from tokenv.run.parts import build_parts


def with_equal_passes(config: Config) -> Config:
    """The same run with ``train.batch_size`` passes through the decoder in an update, however many a text takes.

    Args:
        config: of a run that would take one text for a pass.
    """
    train, passes = config.train, build_parts(config, torch.device("meta"), pretrained=False).passes
    texts = max(train.batch_size // max(passes.learning + passes.reward_only + passes.relaxed, 1), 1)

    def scaled(symbols: int) -> int:
        return max(symbols * texts // train.batch_size, 1)

    return replace(
        config,
        train=replace(
            train, batch_size=texts, symbols=scaled(train.symbols), warmup_symbols=scaled(train.warmup_symbols)
        ),
        validation=replace(config.validation, every_symbols=scaled(config.validation.every_symbols)),
    )

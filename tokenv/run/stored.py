"""Looking at a trained model: load a run, segment a text, continue it."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tokenv import keys
from tokenv.config.convert import make
from tokenv.config.schema import Config
from tokenv.data.corpus import load_corpus
from tokenv.env.rollout import rollout
from tokenv.errors import UserError
from tokenv.lm.codecs.series import VALUE
from tokenv.report.characters import Character, characters
from tokenv.report.series import Patched
from tokenv.run.evaluate import held_out_rollouts
from tokenv.run.parts import Parts, build_parts
from tokenv.storage import checkpoints


@dataclass(frozen=True)
class Trained:
    """A model as a run left it.

    Attributes:
        parts: model and agent, in evaluation mode.
        config: of the run.
        path: the checkpoint.
        step: updates done.
    """

    parts: Parts
    config: Config
    path: Path
    step: int


def load_run(run: str, which: str = "best") -> Trained:
    """Load a run's model.

    Args:
        run: run folder, such as ``runs/7``.
        which: ``best`` by validation loss, or ``latest``.

    Raises:
        MissingFileError: there is no such run, or it has no checkpoint.
    """
    path = checkpoints.find(run, which)
    tensors, state = checkpoints.load_model(path)
    config = make(Config, state["config"])
    parts = build_parts(config, pretrained=False)
    parts.load_state_dict(tensors)
    parts.train(False)
    return Trained(parts, config, path, state["step"])


def check_text(config: Config) -> None:
    """Refuse what only text can be asked for.

    Raises:
        UserError: the run is of series.
    """
    if config.data.kind != "text":
        raise UserError(f"data.kind = {config.data.kind!r}: expected text, this command knows nothing else")


def held_out_patches(trained: Trained, count: int = 4) -> list[Patched]:
    """Draw token boundaries in held-out series, for a picture."""
    config = trained.config
    batch = load_corpus(config.data).validation(count)
    (td,) = held_out_rollouts(trained.parts, batch, batch_size=count)
    return [
        Patched(
            name=batch.origin[row],
            value_NC=batch.symbol_BN[row, :, :, VALUE].numpy(),
            boundary_T=td[keys.ACTION][row].bool().cpu().numpy(),
            probability_T=td[keys.BOUNDARY_PROB][row].float().cpu().numpy(),
            context=config.data.series.context,
            gold_N=None if batch.gold_BN is None else batch.gold_BN[row].numpy(),
        )
        for row in range(len(batch))
    ]


@torch.no_grad()
def segment(trained: Trained, text: bytes, *, seed: int = 0, threshold: bool = False) -> list[Character]:
    """Draw token boundaries in a text, in pieces of the length that the model was trained on.

    Args:
        trained: the model.
        text: at least one byte.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.

    Raises:
        UserError: the text is empty.
    """
    if not text:
        raise UserError("the text is empty: expected at least one byte in text=... or file=...")
    parts, length = trained.parts, trained.config.data.seq_len
    device = parts.lm.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    probability: list[float] = []
    boundary: list[bool] = []
    for start in range(0, len(text), length):
        symbol_N = torch.tensor(list(text[start : start + length]), device=device)
        # A rollout decides nothing at its last symbol, so one more is put there.
        symbol_BN = F.pad(symbol_N, (0, 1)).unsqueeze(0)
        noise = torch.full((1, len(symbol_N)), 0.5, device=device) if threshold else None
        td = rollout(parts.lm, parts.agent, symbol_BN, noise=noise, generator=generator)
        probability += td[keys.BOUNDARY_PROB][0].float().clamp(0, 1).tolist()
        boundary += td[keys.ACTION][0].bool().tolist()
    return characters(text, probability, boundary)


def probability_scale(passage: list[Character]) -> tuple[float, float]:
    """Ends of the colour scale: the 1st and 99th percentile, so that a cautious policy's structure is seen too."""
    if not passage:
        return (0.0, 1.0)
    values = torch.tensor([character.probability for character in passage[1:] or passage])
    low, high = torch.quantile(values, torch.tensor([0.01, 0.99])).tolist()
    return (low, high) if high - low > 1e-3 else (0.0, 1.0)

"""What a run's policy draws in held-out text, and how it came to that: its habits at the checkpoints that were kept."""

from __future__ import annotations

from tokenv import keys
from tokenv.data.pieces import SequenceBatch
from tokenv.errors import UserError
from tokenv.run.evaluate import held_out_rollouts, joined
from tokenv.run.habits import Habits, habits
from tokenv.run.stored import Trained, load_run
from tokenv.storage import checkpoints

MOST = 8  # checkpoints that are looked at, the first and the last among them


def habits_in(trained: Trained, batch: SequenceBatch) -> Habits:
    """Habits of a model in held-out sequences of text."""
    drawn = held_out_rollouts(trained.parts, batch, batch_size=trained.config.validation.batch_size)
    of = joined([{"action": td[keys.ACTION].cpu(), "prob": td[keys.BOUNDARY_PROB].float().cpu()} for td in drawn])
    return habits(batch.symbol_BN[:, :-1], of["action"], of["prob"])


def habits_over_training(trained: Trained, batch: SequenceBatch) -> dict[int, Habits]:
    """Training symbols to the habits that a run then had, as far as its checkpoints were kept and are sound.

    Args:
        trained: the run's last model.
        batch: held-out sequences of text, the same for all.
    """
    kept = checkpoints.complete(trained.path.parent)
    last = len(kept) - 1
    some = sorted({round(i * last / (MOST - 1)) for i in range(MOST)}) if last >= MOST else range(last + 1)
    found = {}
    for path in (kept[i] for i in some):
        try:
            earlier = trained if path == trained.path else load_run(str(path), fall_back=False)
        except UserError:  # damaged
            continue
        found[earlier.state.symbols] = habits_in(earlier, batch)
    return found

"""The in-context score: loss early in a sequence less loss late, of text alone."""

import pytest
import torch

from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.core import keys
from tokenv.core.sequences import SequenceBatch
from tokenv.evaluation.evaluator import evaluate, held_out_rollouts, in_context_scores


@pytest.mark.parametrize(
    ("length", "early", "late", "count"),
    [(4096, 224, 2016, 32), (512, 28, 252, 32), (128, 7, 63, 16)],
)
def test_it_compares_symbols_at_two_places_of_the_sequence(length, early, late, count):
    loss = torch.rand(3, length - 1, dtype=torch.float64)
    expected = [
        sum(row[early : early + count].tolist()) / count
        - sum(row[late : late + count].tolist()) / count
        for row in loss
    ]
    assert in_context_scores(loss).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("length", "known"), [(64, True), (63, False)])
def test_an_evaluation_has_the_mean_of_its_sequences(tiny_settings, length, known):
    components = build_components(resolve([], tiny_settings | {"agent": {"name": "uniform"}}))
    symbol_BN = torch.randint(256, (6, length))
    batch = SequenceBatch(symbol_BN, [""] * 6, None, torch.arange(6))
    evaluation = evaluate(components, batch)
    if not known:
        assert evaluation.in_context_score is None
        return
    (td,) = held_out_rollouts(components, batch)
    bits = -td[keys.LOG_LIKELIHOOD].double() / components.lm.codec.nats_per_unit
    assert evaluation.in_context_score == pytest.approx(
        in_context_scores(bits).mean().item(), abs=1e-9
    )
    assert evaluation.metrics()["in_context_score"] == evaluation.in_context_score

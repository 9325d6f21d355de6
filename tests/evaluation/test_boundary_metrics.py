"""Metrics of a validation's boundaries agree with plain counting, and a collapse is noticed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.config.components import build_components, build_references
from tokenv.config.schema import Config, DataConfig, ValidationConfig
from tokenv.core import keys
from tokenv.data.corpus import load_corpus
from tokenv.evaluation.boundary_metrics import (
    ENRICHMENT,
    enrichment_collapse,
    enrichment_sums,
    rates_by_class,
)
from tokenv.evaluation.evaluator import evaluate
from tokenv.lm.codecs.base import ByteCodec


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 9))
def test_the_enrichment_is_relative_to_the_mean_over_all_circular_shifts(seed, length):
    generator = torch.Generator().manual_seed(seed)
    likelihood_BT = -torch.rand(2, length, generator=generator, dtype=torch.float64)
    action_BT = (torch.rand(2, length, generator=generator) < 0.4).long()
    mask_BT = torch.ones(2, length, dtype=torch.bool)
    mask_BT[:, 0] = False
    mask_BT[1, length - 1] = False  # padding
    td = TensorDict(
        {
            keys.LOG_LIKELIHOOD: likelihood_BT,
            keys.ACTION: action_BT,
            keys.DECISION_MASK: mask_BT,
            ("next", keys.SYMBOL): torch.zeros(2, length, dtype=torch.long),
        },
        [2, length],
    )
    sums = enrichment_sums(td, ByteCodec(4))
    for row in range(2):
        loss_N = -likelihood_BT[row][mask_BT[row]]
        action_N = action_BT[row][mask_BT[row]]
        shifted = [(loss_N * action_N.roll(shift)).sum() for shift in range(len(loss_N))]
        assert sums["loss_after_B"][row] == pytest.approx(shifted[0].item())
        assert sums["loss_shifted_B"][row] == pytest.approx(torch.stack(shifted).mean().item())


def test_codecs_without_classes_have_no_rates_by_class():
    class Plain(ByteCodec):
        symbol_classes = ()

    assert rates_by_class(Plain, torch.zeros(1, 3), torch.zeros(1, 3)) == {}


def test_a_special_symbol_has_its_own_class():
    symbol_BT = torch.tensor([[256, 256, 97]])
    action_BT = torch.tensor([[1, 1, 0]])
    rates = rates_by_class(ByteCodec, symbol_BT, action_BT)
    assert rates == {"letter": (0.5, 0.0), "special": (0.5, 1.0)}


def history_of(values):
    symbols = [10 * (i + 1) for i in range(len(values))]
    return {ENRICHMENT: (symbols, values)}


@pytest.mark.parametrize(
    ("values", "imitated", "warns"),
    [
        ([1.0] * 10 + [0.2] * 10, 100, True),
        ([1.0] * 10 + [0.2] * 10 + [0.9] * 10, 100, False),  # it came back
        ([1.0] * 10 + [0.6] * 10, 100, False),
        ([1.0] * 10 + [0.2], 100, False),  # too early to say
        ([-1.0] * 10 + [-2.0] * 10, 100, False),  # nothing to lose
        ([1.0] * 10 + [0.2] * 10, 0, False),  # no imitation
        ([], 100, False),
    ],
)
def test_a_warning_tells_that_imitated_boundaries_lost_their_enrichment(values, imitated, warns):
    message = enrichment_collapse(history_of(values), imitated)
    assert bool(message) == warns
    if warns:
        assert "from 1.00 at the end of the imitation to 0.20" in message


def text_config(source="words", **validation):
    data = DataConfig(source=str(source), seq_len=64, validation=0.2)
    return Config(data=data, validation=ValidationConfig(sequences=8, **validation))


def test_a_validation_compares_boundaries_with_whitespace_and_on_request_with_bpe(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(10):
        text = " ".join(f"word{i} of text {i * number % 7}." for i in range(100))
        (folder / f"{number}.txt").write_text(text)
    config = text_config(folder, bpe_vocabulary=300)
    corpus = load_corpus(config.data)
    whitespace = replace(config, agent={"name": "whitespace"})
    components = build_components(whitespace)
    references = build_references(config, corpus)
    assert set(references) == {"whitespace", "bpe"}
    metrics = evaluate(components, corpus.validation(8), references=references).metrics()
    assert metrics["whitespace_precision"] == 1
    assert metrics["whitespace_f1"] == 1
    assert 0 < metrics["bpe_precision"] <= 1
    assert 0 < metrics["bpe_f1"] < 1
    assert metrics["boundary_rate_letter"] < metrics["boundary_rate_space"]


def test_series_have_no_bpe_tokens():
    config = text_config(bpe_vocabulary=300)
    data = DataConfig(kind="series", source="echoes", seq_len=64)
    with pytest.raises(
        ValueError, match=r"validation.bpe_vocabulary = 300: expected 0, for series"
    ):
        replace(config, codec={"name": "series"}, data=data)

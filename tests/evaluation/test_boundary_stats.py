"""Statistics of boundaries agree with counting by hand."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.evaluation import boundary_stats as module
from tokenv.evaluation.boundary_stats import CLASSES, compute_boundary_stats
from tokenv.lm.codecs.base import ByteCodec


def test_every_byte_has_the_class_that_people_would_say():
    expected = {
        "a": "letter",
        "Z": "letter",
        "7": "digit",
        " ": "space",
        "\t": "space",
        "\n": "line break",
        "_": "punctuation",
    }
    for character, name in expected.items():
        assert class_of(ord(character)) == name
    lead, *rest = "ß".encode()
    assert class_of(lead) == "UTF-8 lead"
    assert class_of(rest[0]) == "UTF-8 continuation"
    assert class_of(0) == "control"


def class_of(byte):
    return CLASSES[ByteCodec.classify(torch.tensor(byte))]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6))
def test_figures_are_plain_counts(seed, length, batch):
    generator = torch.Generator().manual_seed(seed)
    symbol_BT = torch.tensor(list(b"ab 1\n"))[
        torch.randint(5, (batch, length), generator=generator)
    ]
    prob_BT = torch.rand(batch, length, generator=generator)
    action_BT = (torch.rand(batch, length, generator=generator) < 0.5).long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_COUNT", 2)
        stats = compute_boundary_stats(symbol_BT, action_BT, prob_BT, most=1000)

    tokens = Counter()
    contexts = {}
    occurrences = Counter()
    drawn = Counter()
    for row in range(batch):
        text = bytes(symbol_BT[row].tolist())
        ends = action_BT[row].tolist()
        token = b""
        for i in range(1, length):
            token += text[i : i + 1]
            name = class_of(text[i])
            occurrences[name] += 1
            drawn[name] += ends[i]
            if ends[i]:
                tokens[token] += 1
                token = b""
        for i in range(2, length):
            contexts.setdefault(text[i - 2 : i + 1], []).append(prob_BT[row, i].item())
    assert Counter(dict(stats.tokens)) == tokens
    assert [count for _, count in stats.tokens] == sorted(tokens.values(), reverse=True)
    total = sum(occurrences.values())
    assert stats.classes == {
        n: (pytest.approx(occurrences[n] / total), pytest.approx(drawn[n] / occurrences[n]))
        for n in occurrences
    }
    often = {text: probs for text, probs in contexts.items() if len(probs) >= 2}
    assert {text: (pytest.approx(mean), count) for text, mean, count in stats.contexts} == {
        text: (pytest.approx(sum(probs) / len(probs)), len(probs)) for text, probs in often.items()
    }
    means = [mean for _, mean, _ in stats.contexts]
    assert means == sorted(means, reverse=True)

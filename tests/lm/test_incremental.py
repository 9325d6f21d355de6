"""Reading one symbol at a time equals the one-pass model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.lm import incremental
from tokenv.lm.config import UNetConfig
from tokenv.lm.incremental import CompiledLayers, Decoder
from tokenv.lm.unet import UNet

WINDOW = 4


def small_lm():
    return UNet(
        UNetConfig(width=16, heads=2, down_layers=2, mid_layers=2, up_layers=2, window=WINDOW)
    ).double()


def random_episode(length, rate):
    action_N = (torch.rand(length) < rate).long()
    action_N[0] = 1
    return torch.randint(256, (length,)), action_N


def one_pass(lm, symbol_N, action_N):
    with torch.no_grad():
        return lm.encode(symbol_N[None])[0], lm(symbol_N[None], action_N[None])[0]


def assert_same(stepped, expected):
    torch.testing.assert_close(torch.stack(stepped), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=15)
@given(st.integers(1, 5 * WINDOW), st.floats(0, 1), st.integers(0, 1000))
def test_stepping_equals_one_pass(length, rate, seed):
    torch.manual_seed(seed)
    lm = small_lm()
    symbol_N, action_N = random_episode(length, rate)
    decoder = Decoder(lm, 1, length)
    encodings = []
    parameters = []
    for symbol, action in zip(symbol_N, action_N, strict=True):
        encodings.append(decoder.encode(symbol[None]))
        parameters.append(decoder.decode(action[None]))
    expected_encodings, expected_parameters = one_pass(lm, symbol_N, action_N)
    assert_same([x[0] for x in encodings], expected_encodings)
    assert_same([x[0] for x in parameters], expected_parameters)
    assert decoder.count_B.tolist() == [action_N.sum()]
    assert decoder.position_B.tolist() == [length]


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(1, 5 * WINDOW), min_size=1, max_size=4), min_size=1, max_size=3),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_rows_start_anew_at_their_own_times(row_lengths, rate, seed):
    """As in the environment, a finished row reads one more symbol, is reset and reads its first one."""
    torch.manual_seed(seed)
    lm = small_lm()
    rows = [[random_episode(length, rate) for length in lengths] for lengths in row_lengths]
    batch = len(rows)
    longest = max(max(lengths) for lengths in row_lengths)
    decoder = Decoder(lm, batch, longest)
    at = [[0, 0] for _ in rows]  # episode and position of each row
    outputs = [[([], []) for _ in row] for row in rows]

    def now(b):
        """Symbol and action of a row; what a row that has no more episodes reads must not matter."""
        episode, position = at[b]
        if episode == len(rows[b]):
            return torch.tensor(7), torch.tensor(int(position % longest == 0))
        return tuple(x[position] for x in rows[b][episode])

    x_BD = decoder.encode(torch.stack([now(b)[0] for b in range(batch)]))
    while any(at[b][0] < len(rows[b]) for b in range(batch)):
        parameters_BP = decoder.decode(torch.stack([now(b)[1] for b in range(batch)]))
        finished_B = torch.zeros(batch, dtype=torch.bool)
        for b in range(batch):
            episode = at[b][0]
            over = episode == len(rows[b])
            if not over:
                outputs[b][episode][0].append(x_BD[b])
                outputs[b][episode][1].append(parameters_BP[b])
            at[b][1] += 1
            finished_B[b] = at[b][1] == (longest if over else len(rows[b][episode][0]))
            if finished_B[b]:
                at[b] = [episode + (not over), 0]
        x_BD = decoder.encode(torch.stack([now(b)[0] for b in range(batch)]))
        decoder.reset(finished_B)
        x_BD = decoder.encode(torch.stack([now(b)[0] for b in range(batch)]), finished_B)
    for row, row_outputs in zip(rows, outputs, strict=True):
        for episode, (encodings, parameters) in zip(row, row_outputs, strict=True):
            expected_encodings, expected_parameters = one_pass(lm, *episode)
            assert_same(encodings, expected_encodings)
            assert_same(parameters, expected_parameters)


def test_rows_left_out_keep_their_state():
    lm = small_lm()
    decoders = [Decoder(lm, 2, 10) for _ in range(2)]
    symbol_NB = torch.randint(256, (6, 2))
    action_NB = torch.ones(6, 2, dtype=torch.long)
    for i in range(6):
        for decoder in decoders:
            decoder.encode(symbol_NB[i])
            if decoder is decoders[1]:
                decoder.encode(symbol_NB[i] + 1, torch.zeros(2, dtype=torch.bool))
        parameters = [decoder.decode(action_NB[i]) for decoder in decoders]
        assert torch.equal(*parameters)


@pytest.mark.parametrize("softcap", [50.0, 200.0])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("pooling", ["select", "mean", "smooth"])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_token_level_layers_work_and_remember_where_tokens_end_alone(
    monkeypatch, pooling, rate, compiled, softcap
):
    """Several rows with growing caches equal the one-pass model, also by the layers themselves, as on a GPU."""
    monkeypatch.setattr(incremental, "INITIAL_SLOTS", 2)
    if not compiled:
        monkeypatch.setattr(incremental, "shares_memory_with_numpy", lambda device: False)
    batch, length = 3, 30
    sizes = {
        "width": 16,
        "heads": 2,
        "down_layers": 1,
        "mid_layers": 2,
        "up_layers": 1,
        "window": WINDOW,
    }
    lm = UNet(UNetConfig(**sizes, pooling=pooling, attention_softcap=softcap)).double()
    symbol_BN = torch.randint(256, (batch, length))
    action_BN = (torch.rand(batch, length) < rate).long()
    action_BN[:, 0] = 1
    decoder = Decoder(lm, batch, length)
    rows = []
    assert isinstance(decoder.tokens, CompiledLayers) == compiled
    step = decoder.tokens.step
    decoder.tokens.step = lambda token_RD, *rest: (
        rows.append(len(token_RD)) or step(token_RD, *rest)
    )
    parameters = []
    for symbol_B, action_B in zip(symbol_BN.T, action_BN.T, strict=True):
        decoder.encode(symbol_B)
        parameters.append(decoder.decode(action_B))
    steps = int(action_BN.any(0).sum())
    assert sum(rows) == action_BN.sum()
    assert decoder.tokens.size <= max(2, 2 * (steps + 1))
    with torch.no_grad():
        assert_same(parameters, lm(symbol_BN, action_BN).transpose(0, 1))

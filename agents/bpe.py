"""Boundaries from a trained BPE tokenizer (paper, appendix D.1)."""

from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Tokenizer
from torch import Tensor

from tokenv.agents.base import Agent, deterministic_output
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.core.trust import check_path


class BPE(Agent):
    """BPE guidance: a boundary at the last byte of every BPE token, and then all of them one byte later.

    An unshifted boundary would reveal that the next byte begins a token; a_i says that x_i has begun one. (The first
    byte, which the shift leaves without a boundary, always draws one here.) Deterministic: noise is ignored. The rate
    is that of the tokenizer; it can only be chosen through the size of the vocabulary.

    **It reads ahead.** The end of a BPE token depends on the bytes which follow, to the end of the word, so that even
    shifted boundaries reveal something of bytes not yet predicted, and its bits per byte are too low. It is the paper's
    baseline. For the same reason it cannot act one position at a time: stepping and generating raise an error.

    The state dict holds the tokenizer, so that a trained model needs neither file nor corpus.

    Args:
        vocabulary_size: tokens of a tokenizer which is trained on the training data when boundaries are first drawn
            (200,000 in the paper).
        tokenizer: file of a tokenizer to use instead, as ``tokenv.data.tokenizer.train_bpe`` writes it.
        train_tokenizer: function from a vocabulary size to such a file; ``tokenv train`` passes it.
        read_files: whether the file of ``tokenizer`` is read; not where a state dict brings the tokenizer.

    Raises:
        ValueError: neither ``tokenizer`` nor ``train_tokenizer`` is given, or the file holds another kind of tokenizer.
        FileNotFoundError: there is no such file.
    """

    in_keys = [keys.SYMBOL, keys.POSITION, keys.DECISION_MASK]
    reads_ahead = True

    def __init__(
        self,
        vocabulary_size: int = 200_000,
        tokenizer: str | Path | None = None,
        train_tokenizer: Callable[[int], Path] | None = None,
        read_files: bool = True,
    ) -> None:
        super().__init__()
        if tokenizer is None and train_tokenizer is None:
            raise ValueError(
                "agent.tokenizer is missing: expected the file of a tokenizer, as tokenv.data.tokenizer.train_bpe "
                "writes it"
            )
        self.vocabulary_size = vocabulary_size
        self._train_tokenizer = train_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._awaits_state = tokenizer is not None and not read_files
        if tokenizer is not None and read_files:
            self._tokenizer = _read_tokenizer(Path(tokenizer))

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer, trained at the first use if there is no file."""
        if self._tokenizer is None:
            assert self._train_tokenizer is not None
            assert not self._awaits_state, "the tokenizer of a stored agent is in its state dict"
            self._tokenizer = _read_tokenizer(Path(self._train_tokenizer(self.vocabulary_size)))
        return self._tokenizer

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Tokenize whole sequences, padding left out; K samples are K times the same."""
        symbol_BT = observation[keys.SYMBOL]
        decided_BT = observation[keys.DECISION_MASK]
        # a decision is made at all symbols but the first and the padding
        length_B = 1 + decided_BT.sum(-1)
        rows = zip(symbol_BT.tolist(), length_B.tolist(), strict=True)
        texts = [bytes(row[:length]).decode("latin-1") for row, length in rows]
        is_start_BT = torch.zeros(symbol_BT.shape, dtype=torch.bool)
        for is_start_T, encoding in zip(
            is_start_BT, self.tokenizer.encode_batch(texts), strict=True
        ):
            is_start_T[[start for start, _ in encoding.offsets]] = True
        boundary_BT = is_start_BT.to(symbol_BT.device)
        return deterministic_output(observation, boundary_BT.expand(noise.shape), noise.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raise an error: this agent cannot act at one position.

        Raises:
            UserError: always.
        """
        raise UserError(
            "agent.name=bpe draws the boundaries of whole sequences only, because a BPE token may end one way or "
            "another by what follows: roll out in one pass, or choose another agent to step or generate with"
        )

    def get_extra_state(self) -> Tensor:
        """Return the tokenizer as bytes, uint8 [..]; empty before its first use."""
        if self._tokenizer is None:
            return torch.zeros(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(self._tokenizer.to_str().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Set the tokenizer from the bytes of ``get_extra_state``.

        Raises:
            ValueError: the bytes are not a tokenizer of bytes.
        """
        if len(state):
            self._tokenizer = _parse_tokenizer(
                state.cpu().numpy().tobytes(), "the stored tokenizer"
            )


def _read_tokenizer(path: Path) -> Tokenizer:
    check_path(str(path))
    if not path.is_file():
        raise FileNotFoundError(f"agent.tokenizer = {str(path)!r}: there is no such file")
    return _parse_tokenizer(path.read_bytes(), f"agent.tokenizer = {str(path)!r}")


def _parse_tokenizer(content: bytes, origin: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{origin}: expected a tokenizer's JSON file: {error}") from error
    missing = [byte for byte in range(256) if tokenizer.token_to_id(chr(byte)) is None]
    if missing:
        raise ValueError(
            f"{origin} has no token for byte {missing[0]}: expected one whose symbols are the characters 0 to 255, one "
            "for each byte: train it with tokenv.data.tokenizer.train_bpe"
        )
    return tokenizer

"""The size of a U-Net."""

from dataclasses import dataclass, field

from tokenv.core.errors import COUNT, POSITIVE, UserError, bounds, check_bounds

MAX_LAYERS = 1000
LAYERS = bounds(f"1 to {MAX_LAYERS:,} layers", lambda value: 1 <= value <= MAX_LAYERS)
POOLINGS = ("select", "deviation", "mean", "smooth")
POOLING = bounds(
    "select (the paper's), deviation (its authors' other one), mean (Nawrot's) or smooth (H-Net's)",
    lambda name: name in POOLINGS,
)


@dataclass(frozen=True)
class UNetConfig:
    """Size and constants of the autoregressive U-Net (paper, section 2.2 and table 2).

    Args:
        width: model width D, the same at byte and token level.
        heads: attention heads; must divide ``width`` into an even head size.
        down_layers: byte-level layers before the boundaries are drawn (the encoder).
        mid_layers: token-level layers.
        up_layers: byte-level layers after upsampling (the decoder).
        window: bytes each byte-level position attends to, itself included.
        byte_mlp: hidden size of the byte-level MLP in units of ``width``.
        token_mlp: hidden size of the token-level MLP in units of ``width``.
        attention_softcap: attention scores s become ``cap * tanh(s / cap)`` (Gemma 2's value).
        output_softcap: the same for the output logits (Gemma 2's value).
        rope_base: base of the rotary frequencies.
        pooling: chunking of bytes to tokens and back: ``select`` (the paper's), ``deviation`` (the same, but
            adding only what the token-level layers change of a token), ``mean`` (Nawrot et al. 2023) or ``smooth``
            (H-Net, Hwang et al. 2025).
        elapsed: whether the decoder also reads how many symbols ago the newest token ended, as a learned embedding
            (``tokenv.lm.elapsed``), which starts at zero. No gradient reaches a boundary through it.

    Raises:
        UserError: a size is not positive, ``heads`` does not fit ``width``, or ``pooling`` is unknown.
    """

    width: int = field(default=128, metadata=COUNT)
    heads: int = field(default=4, metadata=COUNT)
    down_layers: int = field(default=2, metadata=LAYERS)
    mid_layers: int = field(default=4, metadata=LAYERS)
    up_layers: int = field(default=2, metadata=LAYERS)
    window: int = field(default=64, metadata=COUNT)
    byte_mlp: int = field(default=1, metadata=COUNT)
    token_mlp: int = field(default=4, metadata=COUNT)
    attention_softcap: float = field(default=50.0, metadata=POSITIVE)
    output_softcap: float = field(default=30.0, metadata=POSITIVE)
    rope_base: float = field(default=10_000.0, metadata=POSITIVE)
    pooling: str = field(default="select", metadata=POOLING)
    elapsed: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "model.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UserError(
                f"model.heads = {self.heads} does not divide model.width = {self.width} into an even head size: "
                "choose heads so that width / heads is an even whole number (64 in the paper)"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

"""The size of a U-Net."""

from dataclasses import dataclass, fields

from tokenv.core.errors import UserError

MAX_LAYERS = 1000
POOLINGS = ("select", "mean", "smooth")


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
        pooling: chunking of bytes to tokens and back: ``select`` (the paper's), ``mean`` (Nawrot et al. 2023) or
            ``smooth`` (H-Net, Hwang et al. 2025).
        horizon: symbols H which a direct head predicts at once from every position, besides the next one; 0 for no
            such head.
        direct: whether only the last ``horizon`` symbols of a sequence are predicted, at once and by that head, from
            the history before them: no boundary is drawn among them, and nothing of the history is predicted, so that
            an agent may read all of it. Every likelihood is then the direct head's.

    Raises:
        UserError: a size is not positive, ``heads`` does not fit ``width``, ``pooling`` is unknown, or ``direct``
            has no horizon.
    """

    width: int = 128
    heads: int = 4
    down_layers: int = 2
    mid_layers: int = 4
    up_layers: int = 2
    window: int = 64
    byte_mlp: int = 1
    token_mlp: int = 4
    attention_softcap: float = 50.0
    output_softcap: float = 30.0
    rope_base: float = 10_000.0
    pooling: str = "select"
    horizon: int = 0
    direct: bool = False

    def __post_init__(self) -> None:
        if self.horizon < 0:
            raise UserError(f"model.horizon = {self.horizon}: expected symbols to predict at once, or 0 for none")
        if self.direct and not self.horizon:
            raise UserError(
                "model.direct = True with model.horizon = 0: expected symbols to predict at once, such as 24"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_layers") and value > MAX_LAYERS:
                raise UserError(f"model.{field.name} = {value:,}: expected at most {MAX_LAYERS:,} layers")
            if field.name not in ("pooling", "horizon", "direct") and not value > 0:
                raise UserError(f"model.{field.name} = {value!r}: expected a positive number")
        if self.pooling not in POOLINGS:
            raise UserError(
                f"model.pooling = {self.pooling!r}: expected one of {', '.join(POOLINGS)}; "
                "select is the paper's, mean is Nawrot's, smooth is H-Net's"
            )
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UserError(
                f"model.heads = {self.heads} does not divide model.width = {self.width} into an even head size: "
                "choose heads so that width / heads is an even whole number (64 in the paper)"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

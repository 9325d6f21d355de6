"""The clock of ``model.elapsed``: the embedding of the number of symbols since the newest boundary.

Without it a byte more than a window after a boundary cannot tell how long ago that was: byte-level attention has
relative positions, and all bytes of a token add the same vector.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Smallest number of each class but that of 0: each number below 64 has a class, larger ones share 16 an octave, and
# 4,096 and all above one.
CLASS_STARTS = (*range(1, 64), *(round(64 * 2 ** (k / 16)) for k in range(6 * 16 + 1)))
CLASSES = len(CLASS_STARTS) + 1


class ElapsedEmbedding(nn.Module):
    """Embedding of a number of symbols, exact below 64, in classes 4% wide above; see ``CLASS_STARTS``.

    It starts at zero, which a model adds without effect, draws no random numbers, and is scaled by sqrt(D), as the
    embedding of bytes is.

    Args:
        width: model width D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(CLASSES, width))
        self.start: Tensor = nn.Buffer(torch.tensor(CLASS_STARTS), persistent=False)

    def forward(self, elapsed: Tensor) -> Tensor:
        """Embed in the parameters' precision: int64 [..] -> [.., D]."""
        index = torch.bucketize(elapsed, self.start, right=True)
        return F.embedding(index, self.weight) * math.sqrt(self.weight.shape[1])

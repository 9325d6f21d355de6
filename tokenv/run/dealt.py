"""Tensors of a model that is dealt out over processes: the whole of one, and a process's part."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, in each of the processes that hold it; these must ask together. Others are whole as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dealt_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every process has the part that it has of ``like``; all of it where that is not dealt out."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

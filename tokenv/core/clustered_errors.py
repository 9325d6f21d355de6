"""Standard errors of means over values which depend on one another within a document."""

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

Array: TypeAlias = np.ndarray[Any, Any]


def clustered_standard_error(
    value_B: ArrayLike, document_B: ArrayLike, weight_B: Array | None = None
) -> float:
    """Return the standard error of a mean when values of one document depend on one another.

    ``sqrt(sum_c (sum_{b in c} w_b (v_b - mean))^2 / (1 - h_c)) / sum_b w_b``, h_c being the share of the weight which
    document c has: the bias-reduced estimator CR2 (Bell & McCaffrey 2002; Imbens & Kolesar 2016). For C documents of
    one size it is ``sqrt(C / (C - 1) * sum_c (sum_{b in c} (v_b - mean))^2) / B`` (Liang & Zeger 1986).

    Args:
        value_B: values, [B].
        document_B: index of the document of every value, [B].
        weight_B: weights, [B]; None for equal ones.

    Returns:
        The standard error; NaN for one document.
    """
    value_B = np.asarray(value_B, dtype=float)
    if weight_B is None:
        weight_B = np.ones(len(value_B))
    share_C = _document_shares(document_B, weight_B)
    if len(share_C) < 2:
        return math.nan
    deviation_B = weight_B * (value_B - np.average(value_B, weights=weight_B))
    total_C = np.bincount(np.unique(document_B, return_inverse=True)[1], deviation_B)
    return math.sqrt((np.square(total_C) / (1 - share_C)).sum()) / float(weight_B.sum())


def clustered_degrees_of_freedom(document_B: ArrayLike, weight_B: Array | None = None) -> float:
    """Return the degrees of freedom of ``clustered_standard_error`` (Satterthwaite's, after Bell & McCaffrey 2002).

    With ``w_c = h_c^2 / (1 - h_c)``, ``1 / (sum_c h_c^2 + (sum_c w_c)^2 - sum_c w_c^2)``: twice the squared mean of the
    estimated variance over its variance, for independent values of one variance. C documents of one size have C - 1,
    unequal ones fewer.

    Returns:
        At least 1; NaN for one document.
    """
    document_B = np.asarray(document_B)
    if weight_B is None:
        weight_B = np.ones(len(document_B))
    share_C = _document_shares(document_B, weight_B)
    if len(share_C) < 2:
        return math.nan
    weight_C = np.square(share_C) / (1 - share_C)
    return float(
        1 / (np.square(share_C).sum() + np.square(weight_C.sum()) - np.square(weight_C).sum())
    )


def _document_shares(document_B: ArrayLike, weight_B: Array) -> Array:
    """Return the share of the weight which each of the C documents has, [C]."""
    return np.bincount(np.unique(document_B, return_inverse=True)[1], weight_B) / weight_B.sum()

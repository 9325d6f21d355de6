"""Compiled loops of incremental decoding on a CPU, where single operations of torch cost more than their arithmetic.

numba compiles them for each precision when they are first called, which takes seconds, and stores the result beside
this file, or in ``NUMBA_CACHE_DIR`` (``tokenv.lm.kernel_cache``). They compute what the modules of ``tokenv.lm.layers``
do, up to rounding, which rarely changes a drawn symbol (``ByteCodec.sample_noise``).
"""

import math
from typing import Any

import numpy as np

from tokenv.lm.kernel_cache import Function, compiled
from tokenv.lm.layers import EPSILON  # what numba has stored notices changes of this file alone

GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
# Sums may be computed in any order, which vectorises them; not-a-number stays what it is.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def _compiled(function: Function) -> Function:
    return compiled(function, nogil=True, fastmath=FASTMATH, error_model="numpy")


@_compiled
def normalise(x_RD: Any, weight_D: Any) -> Any:
    """Apply RMSNorm: [R, D] -> [R, D]."""
    out_RD = np.empty_like(x_RD)
    number = x_RD.dtype.type
    rows, width = x_RD.shape
    for r in range(rows):
        total = number(0)
        for i in range(width):
            total += x_RD[r, i] * x_RD[r, i]
        scale = number(1) / np.sqrt(total / number(width) + number(EPSILON))
        for i in range(width):
            out_RD[r, i] = x_RD[r, i] * scale * weight_D[i]
    return out_RD


@_compiled
def project(x_RD: Any, weight_D: Any, head_DP: Any) -> Any:
    """Apply RMSNorm and a linear map: [R, D] -> [R, P]."""
    return normalise(x_RD, weight_D) @ head_DP


@_compiled
def _store_rotated(
    qkv_RE: Any,
    cos_Rd: Any,
    sin_Rd: Any,
    store: Any,
    row_R: Any,
    slot_R: Any,
) -> None:
    """Rotate queries and keys in place, [R, 3 D], and store keys and values in the cache, [B, S, 2, H, d]."""
    heads, size = store.shape[3:]
    half = size // 2
    for r in range(len(qkv_RE)):
        cos_d = cos_Rd[r]
        sin_d = sin_Rd[r]
        stored = store[row_R[r], slot_R[r]]
        for part in range(2 * heads):
            x = qkv_RE[r, part * size : (part + 1) * size]
            for j in range(half):
                a = x[j]
                b = x[half + j]
                x[j] = a * cos_d[j] - b * sin_d[j]
                x[half + j] = b * cos_d[j] + a * sin_d[j]
        stored[:] = qkv_RE[r, heads * size :].reshape(2, heads, size)


@_compiled
def _attend(
    qkv_RE: Any,
    store: Any,
    row_R: Any,
    used_R: Any,
    softcap: float,
) -> Any:
    """Attend to the first ``used_R`` slots of each row: queries and more [R, 3 D], cache [B, S, 2, H, d] -> [R, D]."""
    number = qkv_RE.dtype.type
    _, slots, _, heads, size = store.shape
    out_RD = np.zeros((len(qkv_RE), heads * size), qkv_RE.dtype)
    score_S = np.empty(slots, qkv_RE.dtype)
    cap = number(softcap)
    scale = number(2) / (np.sqrt(number(size)) * cap)
    for r in range(len(qkv_RE)):
        used = used_R[r]
        for h in range(heads):
            query_d = qkv_RE[r, h * size : (h + 1) * size]
            out_d = out_RD[r, h * size : (h + 1) * size]
            for s in range(used):
                key_d = store[row_R[r], s, 0, h]
                product = number(0)
                for j in range(size):
                    product += query_d[j] * key_d[j]
                score_S[s] = product
            for s in range(used):  # cap * tanh, whose exponential is the faster function
                score_S[s] = cap - number(2) * cap / (np.exp(scale * score_S[s]) + number(1))
            highest = score_S[:used].max()
            total = number(0)
            for s in range(used):
                score_S[s] = np.exp(score_S[s] - highest)
                total += score_S[s]
            for s in range(used):
                value_d = store[row_R[r], s, 1, h]
                weight = score_S[s] / total
                for j in range(size):
                    out_d[j] += weight * value_d[j]
    return out_RD


@_compiled
def _gated(gate_up_RE: Any) -> Any:
    """Return ``gelu(gate) * up``, gelu in its tanh approximation: [R, 2 E] -> [R, E]."""
    number = gate_up_RE.dtype.type
    rows = gate_up_RE.shape[0]
    hidden = gate_up_RE.shape[1] // 2
    out_RE = np.empty((rows, hidden), gate_up_RE.dtype)
    for r in range(rows):
        for j in range(hidden):
            x = gate_up_RE[r, j]
            twice = number(2 * GELU_SCALE) * (x + number(GELU_CUBIC) * x * x * x)
            out_RE[r, j] = x / (number(1) + np.exp(-twice)) * gate_up_RE[r, hidden + j]
    return out_RE


@_compiled
def rotary_at(position_R: Any, frequency_d: Any) -> Any:
    """Return cosines and sines of rotary embeddings at some positions, [R, d/2] each, for angles [d/2] a position."""
    angle_Rd = position_R.astype(frequency_d.dtype).reshape(-1, 1) * frequency_d
    return np.cos(angle_Rd), np.sin(angle_Rd)


@_compiled
def step_layer(
    x_RD: Any,
    weights: Any,
    store: Any,
    cos_Rd: Any,
    sin_Rd: Any,
    order_R: Any,
    row_R: Any,
    softcap: float,
) -> Any:
    """Compute the next position of some rows by one layer: [R, D] -> [R, D].

    Args:
        x_RD: input of the layer.
        weights: its parameters, as ``CompiledLayers`` orders them, matrices transposed.
        store: its keys and values, [B, S, 2, H, d], which are extended.
        cos_Rd: cosines of the rotary embeddings, [R, d/2].
        sin_Rd: their sines.
        order_R: numbers of earlier positions.
        row_R: rows of the store.
        softcap: soft cap of attention.
    """
    pre_attention, qkv, out, post_attention, pre_mlp, gate_up, down, post_mlp = weights
    slots = store.shape[1]
    qkv_RE = normalise(x_RD, pre_attention) @ qkv
    _store_rotated(qkv_RE, cos_Rd, sin_Rd, store, row_R, order_R % slots)
    attended_RD = _attend(
        qkv_RE,
        store,
        row_R,
        np.minimum(order_R + 1, slots),
        softcap,
    )
    x_RD = x_RD + normalise(attended_RD @ out, post_attention)
    gated_RE = _gated(normalise(x_RD, pre_mlp) @ gate_up)
    return x_RD + normalise(gated_RE @ down, post_mlp)


@_compiled
def sample_bytes(
    logit_RV: Any,
    uniform_RV: Any,
    softcap: float,
    temperature: float,
    top_p: float,
) -> Any:
    """Draw the symbol of rank r, in the order of falling p, with the largest ``p_r / E_r``, ``E = -log(1 - u)``.

    Symbols which are too improbable to win at any rank are not sorted.

    Args:
        logit_RV: logits before their soft cap, float32 [R, V].
        uniform_RV: uniform numbers u, float64.
        softcap: soft cap of the logits.
        temperature: divisor of the capped logits.
        top_p: probability mass of the nucleus from which symbols are drawn.

    Returns:
        int64 [R].
    """
    rows, vocabulary = logit_RV.shape
    symbol_R = np.zeros(rows, np.int64)
    candidate_V = np.empty(vocabulary, np.int64)
    weight_V = np.empty(vocabulary, np.float32)
    loss_V = np.empty(vocabulary, np.float32)
    cap = np.float32(softcap / temperature)
    two = np.float32(2)
    for r in range(rows):
        uniform_V = uniform_RV[r]
        for v in range(vocabulary):  # cap * tanh
            weight_V[v] = cap - two * cap / (
                np.exp(two / np.float32(softcap) * logit_RV[r, v]) + np.float32(1)
            )
        highest = weight_V.max()
        total = np.float32(0)
        lowest = uniform_V[0]
        count = 0
        for v in range(vocabulary):
            weight_V[v] = np.exp(weight_V[v] - highest)
            total += weight_V[v]
            lowest = min(lowest, uniform_V[v])
        least = np.float32(np.log1p(-lowest) / np.log1p(-uniform_V[0])) * np.float32(1 - 1e-6)
        for v in range(vocabulary):
            if not weight_V[v] < least:
                candidate_V[count] = v
                loss_V[count] = -weight_V[v]
                count += 1
        order_C = np.argsort(loss_V[:count], kind="mergesort")  # stable
        best = np.float32(-1)
        mass = np.float32(0)
        for rank in range(count):
            v = candidate_V[order_C[rank]]
            ratio = weight_V[v] / np.float32(-np.log1p(-uniform_V[rank]))
            if ratio > best and (top_p >= 1 or mass < np.float32(top_p) * total):
                best = ratio
                symbol_R[r] = v
            mass += weight_V[v]
    return symbol_R

"""Attention (3.2) between short sentences in Triton: a program computes some tiles of one head of one sentence.

Triton comes with torch's CUDA builds and is no dependency: only `tiles` imports this, and only where it is wanted.
"""
# mypy: ignore-errors
# What stands here is Triton's language: its functions are compiled, and take no types

import triton
import triton.language as tl

# The grid: sentences, and after them what clears the rows of none; heads; programs that share the tiles of each
# T rows of queries, S of keys and values
# TILE queries or keys; K, V widths, and K_ROOM, V_ROOM the powers of two in which they stand
# Logarithms are to base 2, for which a GPU has an instruction: hence log2(e) in the scores

LOG2_E = tl.constexpr(1.4426950408889634)
COUNTS = ["sentences", "rows", "memory_rows"]
"""What differs from batch to batch: no reason to compile again."""


@triton.jit
def _span(offsets, number):
    """Where a sentence begins, in 64 bits as products with it may need, and how long it is."""
    begin = tl.load(offsets + number)
    return begin.to(tl.int64), tl.load(offsets + number + 1) - begin


@triton.jit
def _place(base, stride, first, length, WIDTH: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Where the tile from row `first` lies, and what of it there is."""
    rows, columns = first + tl.arange(0, TILE)[:, None], tl.arange(0, ROOM)[None, :]
    return base + rows * stride + columns, (rows < length) & (columns < WIDTH)


@triton.jit
def _load(base, stride, first, length, WIDTH: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    at, there = _place(base, stride, first, length, WIDTH, TILE, ROOM)
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def _store(tile, base, stride, first, length, WIDTH: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    at, there = _place(base, stride, first, length, WIDTH, TILE, ROOM)
    tl.store(at, tile.to(base.dtype.element_ty), mask=there)


@triton.jit
def _clear(base, stride, offsets, sentences, rows, WIDTH: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Zeros in this program's share of the rows that belong to no sentence."""
    tail = tl.load(offsets + sentences)
    number = (tl.program_id(0) - sentences) * tl.num_programs(2) + tl.program_id(2)
    programs = (tl.num_programs(0) - sentences) * tl.num_programs(2)
    nothing = tl.zeros((TILE, ROOM), tl.float32)
    base += tail.to(tl.int64) * stride
    for first in range(number * TILE, rows - tail, programs * TILE):
        _store(nothing, base, stride, first, rows - tail, WIDTH, TILE, ROOM)


@triton.jit
def _scores(q, k, first, first_key, num_keys, CAUSAL: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    """Q K^T / sqrt(d_k), (TILE, TILE): -inf where no key is, or none that the query may look at."""
    query, key = first + tl.arange(0, TILE)[:, None], first_key + tl.arange(0, TILE)[None, :]
    seen = key < num_keys
    if CAUSAL:
        seen = seen & (key <= query)
    scale: tl.constexpr = LOG2_E * K**-0.5
    return tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))


@triton.jit
def _inputs(queries, keys, values, offsets, memory_offsets, query_stride, key_stride, K: tl.constexpr, V: tl.constexpr):
    """Where this program's sentence begins, its queries, its keys and its values, and how many of them there are."""
    number, head = tl.program_id(0), tl.program_id(1)
    begin, length = _span(offsets, number)
    memory_begin, num_keys = _span(memory_offsets, number)
    queries += begin * query_stride + head * K
    keys += memory_begin * key_stride + head * K
    values += memory_begin * key_stride + head * V
    return begin, memory_begin, queries, keys, values, length, num_keys


@triton.jit(do_not_specialize=COUNTS)
def forward(
    queries,
    keys,
    values,
    output,
    logs,
    offsets,
    memory_offsets,
    sentences,
    rows,
    memory_rows,
    query_stride,
    key_stride,
    CAUSAL: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    K_ROOM: tl.constexpr,
    V_ROOM: tl.constexpr,
):
    """The output (T, H * V), and the logarithm of each softmax's denominator (H, T)."""
    number, head = tl.program_id(0), tl.program_id(1)
    stride = tl.num_programs(1) * V
    output += head * V
    if number >= sentences:
        _clear(output, stride, offsets, sentences, rows, V, TILE, V_ROOM)
        _clear(logs + head * rows, 1, offsets, sentences, rows, 1, TILE, 1)
    else:
        begin, _, queries, keys, values, length, num_keys = _inputs(
            queries, keys, values, offsets, memory_offsets, query_stride, key_stride, K, V
        )
        output += begin * stride
        logs += head * rows + begin
        for first in range(tl.program_id(2) * TILE, length, tl.num_programs(2) * TILE):
            q = _load(queries, query_stride, first, length, K, TILE, K_ROOM)
            highest = tl.full((TILE,), float("-inf"), tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            found = tl.zeros((TILE, V_ROOM), tl.float32)
            for first_key in range(0, tl.minimum(first + TILE, num_keys) if CAUSAL else num_keys, TILE):
                k = _load(keys, key_stride, first_key, num_keys, K, TILE, K_ROOM)
                v = _load(values, key_stride, first_key, num_keys, V, TILE, V_ROOM)
                scores = _scores(q, k, first, first_key, num_keys, CAUSAL, K, TILE)
                # Every query may look at the first key, so this is finite from the first tile on
                higher = tl.maximum(highest, tl.max(scores, 1))
                weights = tl.exp2(scores - higher[:, None])
                shrunk = tl.exp2(highest - higher)
                highest = higher
                total = total * shrunk + tl.sum(weights, 1)
                found = tl.dot(weights.to(v.dtype), v, found * shrunk[:, None], input_precision="ieee")
            _store(found / total[:, None], output, stride, first, length, V, TILE, V_ROOM)
            row = first + tl.arange(0, TILE)
            tl.store(logs + row, highest + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=COUNTS)
def backward_to_queries(
    queries,
    keys,
    values,
    to_queries,
    output,
    to_output,
    logs,
    deltas,
    offsets,
    memory_offsets,
    sentences,
    rows,
    memory_rows,
    query_stride,
    key_stride,
    CAUSAL: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    K_ROOM: tl.constexpr,
    V_ROOM: tl.constexpr,
):
    """The gradient of the queries, and `deltas` (H, T), output times its gradient, which those of the keys need."""
    number, head = tl.program_id(0), tl.program_id(1)
    to_queries += head * K
    if number >= sentences:
        _clear(to_queries, query_stride, offsets, sentences, rows, K, TILE, K_ROOM)
    else:
        begin, _, queries, keys, values, length, num_keys = _inputs(
            queries, keys, values, offsets, memory_offsets, query_stride, key_stride, K, V
        )
        stride = tl.num_programs(1) * V
        to_queries += begin * query_stride
        output += begin * stride + head * V
        to_output += begin * stride + head * V
        logs += head * rows + begin
        deltas += head * rows + begin
        for first in range(tl.program_id(2) * TILE, length, tl.num_programs(2) * TILE):
            row = first + tl.arange(0, TILE)
            q = _load(queries, query_stride, first, length, K, TILE, K_ROOM)
            to_o = _load(to_output, stride, first, length, V, TILE, V_ROOM)
            o = _load(output, stride, first, length, V, TILE, V_ROOM)
            delta = tl.sum(o.to(tl.float32) * to_o.to(tl.float32), 1)
            tl.store(deltas + row, delta, mask=row < length)
            log = tl.load(logs + row, mask=row < length, other=0.0)
            to_q = tl.zeros((TILE, K_ROOM), tl.float32)
            for first_key in range(0, tl.minimum(first + TILE, num_keys) if CAUSAL else num_keys, TILE):
                k = _load(keys, key_stride, first_key, num_keys, K, TILE, K_ROOM)
                v = _load(values, key_stride, first_key, num_keys, V, TILE, V_ROOM)
                weights = tl.exp2(_scores(q, k, first, first_key, num_keys, CAUSAL, K, TILE) - log[:, None])
                to_scores = weights * (tl.dot(to_o, tl.trans(v), input_precision="ieee") - delta[:, None])
                to_q = tl.dot(to_scores.to(k.dtype), k, to_q, input_precision="ieee")
            _store(to_q * K**-0.5, to_queries, query_stride, first, length, K, TILE, K_ROOM)


@triton.jit(do_not_specialize=COUNTS)
def backward_to_keys_and_values(
    queries,
    keys,
    values,
    to_keys,
    to_values,
    to_output,
    logs,
    deltas,
    offsets,
    memory_offsets,
    sentences,
    rows,
    memory_rows,
    query_stride,
    key_stride,
    CAUSAL: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    K_ROOM: tl.constexpr,
    V_ROOM: tl.constexpr,
):
    """The gradients of keys and values: tiles of keys here, and for each the queries that look at it."""
    number, head = tl.program_id(0), tl.program_id(1)
    to_keys += head * K
    to_values += head * V
    if number >= sentences:
        _clear(to_keys, key_stride, memory_offsets, sentences, memory_rows, K, TILE, K_ROOM)
        _clear(to_values, key_stride, memory_offsets, sentences, memory_rows, V, TILE, V_ROOM)
    else:
        begin, memory_begin, queries, keys, values, length, num_keys = _inputs(
            queries, keys, values, offsets, memory_offsets, query_stride, key_stride, K, V
        )
        stride = tl.num_programs(1) * V
        to_keys += memory_begin * key_stride
        to_values += memory_begin * key_stride
        to_output += begin * stride + head * V
        logs += head * rows + begin
        deltas += head * rows + begin
        for first_key in range(tl.program_id(2) * TILE, num_keys, tl.num_programs(2) * TILE):
            k = _load(keys, key_stride, first_key, num_keys, K, TILE, K_ROOM)
            v = _load(values, key_stride, first_key, num_keys, V, TILE, V_ROOM)
            to_k = tl.zeros((TILE, K_ROOM), tl.float32)
            to_v = tl.zeros((TILE, V_ROOM), tl.float32)
            for first in range(first_key if CAUSAL else 0, length, TILE):
                row = first + tl.arange(0, TILE)
                q = _load(queries, query_stride, first, length, K, TILE, K_ROOM)
                to_o = _load(to_output, stride, first, length, V, TILE, V_ROOM)
                log = tl.load(logs + row, mask=row < length, other=0.0)
                delta = tl.load(deltas + row, mask=row < length, other=0.0)
                # Where no query is, its gradient is 0, and so is what it adds
                weights = tl.exp2(_scores(q, k, first, first_key, num_keys, CAUSAL, K, TILE) - log[:, None])
                to_v = tl.dot(tl.trans(weights.to(to_o.dtype)), to_o, to_v, input_precision="ieee")
                to_scores = weights * (tl.dot(to_o, tl.trans(v), input_precision="ieee") - delta[:, None])
                to_k = tl.dot(tl.trans(to_scores.to(q.dtype)), q, to_k, input_precision="ieee")
            _store(to_k * K**-0.5, to_keys, key_stride, first_key, num_keys, K, TILE, K_ROOM)
            _store(to_v, to_values, key_stride, first_key, num_keys, V, TILE, V_ROOM)

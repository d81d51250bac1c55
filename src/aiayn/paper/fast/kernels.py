"""Layers without gradients and the choice of continuations in C (`kernels.c`), compiled for the processor at hand."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B sentences; W hypotheses of each; R = B * W rows; D d_model; H heads; K d_k; V d_v

COMPILER = shutil.which("cc")
SOURCE = Path(__file__).with_suffix(".c")
LANES = 16  # a room for columns is a multiple of it, and so of every processor's vectors
# Sums in any order, as vectors need them. Not -ffast-math, with which gcc before 13 would round the tiniest numbers of
# the whole process to zero, nor -ffinite-math-only: masks and scores of hypotheses that do not exist are -inf
COMPILER_FLAGS = (
    "-O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -shared -fPIC"
)

# Keys (B, H, K, room), values (B, H, room, V), a mask (B, 1, W or 1, columns) of 0 and -inf, the columns taken
Seen = tuple[Tensor, Tensor, Tensor | None, int]


class _Product(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("products", _Product * 7),
        ("norms", _Norm * 3),
        *((name, ctypes.c_int64) for name in ("heads", "d_k", "d_v", "widest")),
    )


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels; a ValueError where no compiler makes them."""
    if COMPILER is None:
        raise ValueError("decoding.compile=true: there is no C compiler cc here; install one, or use false")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        command = [COMPILER, *COMPILER_FLAGS.split(), "-o", str(path), str(SOURCE), "-lm"]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
            found = ctypes.CDLL(str(path))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
            raise ValueError(f"decoding.compile=true: {COMPILER} has failed: {reason}; use false") from None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    seen: list[Any] = [pointer, pointer, pointer, number, number]
    found.encode_layer.argtypes = [*[pointer] * 4, number, number]
    found.decode_layer.argtypes = [pointer, pointer, *seen, *seen, pointer, number, number]
    found.best_continuations.argtypes = [*[pointer] * 5, *[number] * 4]
    found.remember.argtypes = [*[pointer] * 6, number, number]
    for function in (found.encode_layer, found.decode_layer, found.remember, found.best_continuations):
        function.restype = None
    return found


class LayerKernel:
    """One layer's weights as they are now, in the order in memory that the functions of the source read."""

    def __init__(
        self, products: Sequence[nn.Linear], norms: Sequence[nn.LayerNorm], num_heads: int, d_k: int, d_v: int
    ) -> None:
        assert all(layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu" for layer in products)
        self._library = library()  # now, before there are several processes
        panel = ctypes.c_int64.in_dll(self._library, "panel").value
        weights = [
            (_panels(layer.weight, panel), F.pad(layer.bias.detach(), (0, -layer.out_features % panel)))
            for layer in products
        ]
        scales = [(norm.weight.detach().clone(), norm.bias.detach().clone()) for norm in norms]
        self._kept = weights, scales  # what the pointers point to
        self._layer = _Layer()
        for i, ((weight, bias), layer) in enumerate(zip(weights, products, strict=True)):
            self._layer.products[i] = _Product(
                weight.data_ptr(), bias.data_ptr(), layer.in_features, layer.out_features
            )
        for i, ((weight, bias), norm) in enumerate(zip(scales, norms, strict=True)):
            self._layer.norms[i] = _Norm(weight.data_ptr(), bias.data_ptr(), norm.eps)
        self._layer.heads, self._layer.d_k, self._layer.d_v = num_heads, d_k, d_v
        self._layer.widest = max(layer.out_features for layer in products)
        self._a_row = self._layer.widest + num_heads * d_v + products[1].out_features

    def encode(self, x: Tensor, offsets: Tensor) -> None:
        """Turns x (tokens or more, D) into the encoder layer's output."""
        room = _room(int(offsets.diff().max()))
        assert offsets.dtype == torch.int64
        a_column = self._layer.heads * (self._layer.d_k + self._layer.d_v) + 3
        scratch = torch.empty(len(x) * self._a_row + room * a_column)
        parts = x.data_ptr(), ctypes.byref(self._layer), offsets.data_ptr(), scratch.data_ptr()
        self._library.encode_layer(*parts, len(offsets) - 1, room)

    def remember(self, memory: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, H, K, room) and values (B, H, room, V) of the encoder's output, memory (tokens or more, D)."""
        sentences, room = len(offsets) - 1, _room(int(offsets.diff().max()))
        heads, d_k, d_v = self._layer.heads, self._layer.d_k, self._layer.d_v
        keys, values = torch.empty(sentences, heads, d_k, room), torch.empty(sentences, heads, room, d_v)
        scratch = torch.empty(len(memory) * heads * (d_k + d_v))
        parts = memory.data_ptr(), ctypes.byref(self._layer), offsets.data_ptr(), scratch.data_ptr()
        self._library.remember(keys.data_ptr(), values.data_ptr(), *parts, sentences, room)
        return keys, values

    def decode(self, x: Tensor, past: Seen, memory: Seen) -> None:
        """Turns x (R, D) into the decoder layer's output, and fills the last W columns of the past."""
        sentences, room = len(past[0]), max(past[0].size(3), memory[0].size(3))
        scratch = torch.empty(len(x) * self._a_row + 3 * room)
        parts = x.data_ptr(), ctypes.byref(self._layer), *_parts(*past), *_parts(*memory), scratch.data_ptr()
        self._library.decode_layer(*parts, sentences, len(x) // sentences)


def best_continuations(logits: Tensor, alive: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the function of the same name in `beam_search` gives, for float32 on a CPU."""
    sentences, width, words = logits.shape
    count = min(count, width * words)
    best = torch.empty(sentences, count)
    of, tokens = torch.empty(2, sentences, count, dtype=torch.int64)
    assert logits.dtype == alive.dtype == torch.float32
    tensors = best, of, tokens, logits, alive.contiguous()
    assert all(tensor.is_contiguous() for tensor in tensors)
    library().best_continuations(*(tensor.data_ptr() for tensor in tensors), sentences, width, words, count)
    return best, of, tokens


def _parts(keys: Tensor, values: Tensor, mask: Tensor | None, columns: int) -> tuple[int | None, ...]:
    return keys.data_ptr(), values.data_ptr(), None if mask is None else mask.data_ptr(), columns, keys.size(3)


def _room(columns: int) -> int:
    return -(-columns // LANES) * LANES


def _panels(weight: Tensor, panel: int) -> Tensor:
    outputs, inputs = weight.shape
    return F.pad(weight.detach(), (0, 0, 0, -outputs % panel)).view(-1, panel, inputs).transpose(1, 2).contiguous()

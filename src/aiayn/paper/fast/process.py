"""Threads and memory of this process: how many threads compute, and which freed memory tensors reuse."""

import ctypes
import gc

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
LARGEST_REUSED = 2**25 - 2**12
"""Bytes of the largest tensor whose memory glibc keeps when it is freed: that of larger ones is new each time."""


def compute_with(threads: int) -> None:
    """Sets the number of threads of this process, and has tensors reuse the memory of freed ones."""
    torch.set_num_threads(threads)
    # torch's default for LSTMs and convolutions is TF32; products have float32 as it is
    torch.backends.cudnn.allow_tf32 = False
    # What is imported by now stays: the collector need not look through it again. A model that is no longer used is
    # freed first: its accelerated layers refer to themselves, so that it would be frozen too
    gc.collect()
    gc.freeze()
    # glibc gives back to the system what was freed, and asks it for zeroed pages again: a fifth of the time of decoding
    # M_MMAP_MAX=0 would keep blocks of any size, but small ones then settle in their place: 4 GB more in 240 updates
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 2**25)  # no more is taken
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

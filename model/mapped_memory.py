"""What the kernel is told about memory that is mapped from a file."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor


def expect_random_reads(tensor: Tensor) -> None:
    """Of a contiguous tensor in mapped memory: a page that is not there is read alone. Unasked, the kernel reads around
    it as much as the disk's `read_ahead_kb` says, here and there megabytes. Elsewhere than on Linux it is not told."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is None or not sys.platform.startswith("linux") or not tensor.numel():
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))

"""The memory of a tensor. NumPy would give its bytes, but torch works without NumPy, and so does this package."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

from allranks._base.errors import UsageError

__all__ = ["bytes_of", "in_huge_pages", "view_of"]

_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_HUGE = 4 << 20  # bytes: two huge pages, so that one lies within the tensor wherever it begins
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of a dense tensor's elements, in the order of its dimensions. Cost: one copy, and 0.5 us.

    Args:
        tensor: of any shape and device; what is lazily conjugated or negated is resolved by the caller.
    """
    plain = tensor.cpu().contiguous()
    return bytes(view_of(plain)) if plain.nbytes else b""


def view_of(tensor: Tensor, writable: bool = False) -> memoryview:
    """The memory of a non-empty tensor on the CPU whose elements lie without gaps, without a copy.

    The view does not keep the tensor: the caller does, for as long as the view is used.

    Raises:
        UsageError: the tensor's storage was freed, or made smaller.
    """
    if tensor.storage_offset() * tensor.itemsize + tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UsageError(
            f"the memory of a tensor of shape {tuple(tensor.shape)} is smaller than that: its storage was freed, or"
            " resized"
        )
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.nbytes, _WRITE if writable else _READ)
    return view


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Ask the kernel for huge pages for a new tensor on the CPU that has not been written yet.

    The kernel clears each page when it is first written: 64 MB take 47 ms in pages of 4 KiB, and 13 ms in pages of
    2 MiB, of which copying takes 10. Where the kernel has no huge pages, nothing happens.

    Returns:
        The tensor.

    Cost:
        Nothing below 4 MiB, else one system call.
    """
    if tensor.nbytes >= _HUGE:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(begin, nbytes, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing but the time
    return tensor

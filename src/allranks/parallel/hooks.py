"""Communication hooks: user functions that replace the all-reduce of a bucket.

`GradBucket` is the argument of a hook and has the methods of torch's class. `CommHook` calls a hook and checks the
result. Ready-made hooks are in `allranks.algorithms.ddp_comm_hooks`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from allranks._base.errors import AllranksError, UsageError

__all__ = ["CommHook", "GradBucket"]

_FUTURE = re.compile(r"(.*\.)?Future\[(torch\.)?Tensor\]")  # text form of the annotation (postponed evaluation)

Hook = Callable[[Any, "GradBucket"], torch.futures.Future[Tensor]]


class GradBucket:
    """Argument of a communication hook: the gradients of one bucket in one flat tensor."""

    def __init__(self, index: int, buffer: Tensor, parameters: list[nn.Parameter], is_last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket, from 0, in the order in which backward completes the buckets."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, in one dimension. The hook may change it in place."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer. Later calls of `buffer` and `gradients` use the new tensor."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return views into the buffer, one for each of `parameters`, with its shape.

        Raises:
            UsageError: The tensor passed to `set_buffer` has another number of elements.
        """
        sizes = [parameter.numel() for parameter in self._parameters]
        if self._buffer.numel() != sum(sizes):
            raise UsageError(
                f"GradBucket.gradients: the bucket's parameters have {sum(sizes)} elements, "
                f"but the buffer that was set has {self._buffer.numel()}.\n"
                f"  Pass a tensor with {sum(sizes)} elements to set_buffer()."
            )
        parts = torch.split(self._buffer.view(-1), sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of these gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last


class CommHook:
    """A hook with its state."""

    def __init__(self, state: object, hook: Hook) -> None:
        check_hook(hook)
        self._state = state
        self._hook = hook

    def start(self, bucket: GradBucket) -> HookWork:
        """Call the hook for one bucket, and return its pending result."""
        message = bucket.buffer()
        where = (
            f"DistributedDataParallel: communication hook {getattr(self._hook, '__qualname__', self._hook)}, "
            f"bucket {bucket.index()}"
        )
        try:
            future: object = self._hook(self._state, bucket)
        # allranks's own errors keep their type, for example PeerLostError.
        except AllranksError:
            raise
        except Exception as error:
            raise UsageError(f"{where}: raised {type(error).__name__}: {error}") from error
        if not isinstance(future, torch._C.Future):  # the class of the result of then() on a torch.futures.Future
            raise UsageError(
                f"{where}: a callback must return a torch.futures.Future object, but got {type(future).__name__}"
            )
        return HookWork(future, message, where)


class HookWork:
    """A hook that was called and may still be running."""

    def __init__(self, future: torch._C.Future[Any], message: Tensor, where: str) -> None:
        self._future = future
        self._message = message
        self._where = where
        self._done = False

    def wait(self) -> None:
        """Block until the result of the hook is in the bucket."""
        if self._done:
            return
        # Set first: `_reset` waits again after an error, which must not be raised a second time.
        self._done = True
        try:
            result = self._future.wait()
        except AllranksError:
            raise
        except Exception as error:
            raise UsageError(f"{self._where}: its future failed with {type(error).__name__}: {error}") from error
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]  # the future of a collective holds a list with one tensor
        if not isinstance(result, Tensor):
            raise UsageError(f"{self._where}: its future must hold a tensor, but holds a {type(result).__name__}")
        if result.numel() != self._message.numel():
            raise UsageError(
                f"{self._where}: its future must hold {self._message.numel()} elements, as the bucket does, "
                f"but holds {result.numel()}"
            )
        # The result may be another tensor, or have 16 bits. Only then is a copy needed.
        if result.data_ptr() != self._message.data_ptr() or result.dtype != self._message.dtype:
            with torch.no_grad():
                self._message.copy_(result.reshape(-1))


def check_hook(hook: object) -> None:
    """Check that an object can be a hook. Raise the errors that torch raises.

    Raises:
        TypeError: The object is not callable.
        UsageError: The annotations are not those of a hook.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    nothing = inspect.Parameter.empty
    bucket = signature.parameters.get("bucket")
    # Compare names: a hook written for torch is annotated with torch.distributed.GradBucket.
    if bucket is not None and bucket.annotation is not nothing and not _name(bucket.annotation).endswith("GradBucket"):
        raise UsageError(
            f"Communication hook: bucket annotation should be allranks.GradBucket, but is {_name(bucket.annotation)}."
        )
    returned = signature.return_annotation
    if returned not in (nothing, torch.futures.Future[Tensor]) and not _FUTURE.fullmatch(_name(returned)):
        raise UsageError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"but is {_name(returned)}."
        )


def _name(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation))

"""The rendezvous methods: one file each, and one row each in ``BUILT_IN``, by the scheme of ``init_method``.

``env`` selects among methods that have no scheme of their own: ``launcher``, ``scheduler``, ``torchrun`` and ``port``.
A program or package adds a method with ``register_rendezvous_handler``, as with torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from allranks._base.errors import ConfigError, UsageError
from allranks._base.public import publish
from allranks._rendezvous.finders.env import ENV
from allranks._rendezvous.finders.file import FILE
from allranks._rendezvous.finders.interface import Method
from allranks._rendezvous.finders.store import HandlerFinder
from allranks._rendezvous.finders.tcp import TCP

__all__ = ["BUILT_IN", "forms", "method_of", "register_rendezvous_handler"]

BUILT_IN: dict[str, Method] = {method.scheme: method for method in (ENV, TCP, FILE)}
"""The methods of allranks, by scheme."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_registered: dict[str, Method] = {}


def register_rendezvous_handler(scheme: str, handler: Callable[..., Iterator[tuple[Any, int, int]]]) -> None:
    """Add a rendezvous method: ``init_process_group(init_method="scheme://...")``.

    Every rank calls this before ``init_process_group``.

    Args:
        scheme: The scheme of the URLs, in lower case. Those of allranks (``env``, ``tcp``, ``file``) are taken.
        handler: A generator function. It receives the URL, with ``rank=`` and ``world_size=`` in its query if the
            caller passed them, and ``timeout``, a timedelta. It yields once: a store that all ranks share (of allranks
            or with torch's methods), the rank and the world size. It is closed when the ranks have connected.

    Raises:
        UsageError: The scheme is invalid or taken, or the handler is not a function.

    Example:
        >>> import allranks as dist
        >>> def alone(url, timeout):
        ...     yield dist.HashStore(), 0, 1
        >>> dist.register_rendezvous_handler("alone", alone)
        >>> dist.init_process_group(init_method="alone://")
        >>> dist.get_world_size()
        1
        >>> dist.destroy_process_group()
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise UsageError(
            f"register_rendezvous_handler: {scheme!r} is not a URL scheme. Expected a scheme such as 'mine'."
        )
    if not callable(handler):
        raise UsageError(f"register_rendezvous_handler: the handler of {scheme}:// is {handler!r}, not a function.")
    if scheme in BUILT_IN or scheme in _registered:
        raise UsageError(f"register_rendezvous_handler: {scheme}:// already has a handler. Expected another scheme.")
    _registered[scheme] = Method(scheme, f"{scheme}://", functools.partial(HandlerFinder, handler=handler))


def method_of(scheme: str, init_method: str) -> Method:
    """Return the method of a scheme.

    Raises:
        ConfigError: No method has this scheme.
    """
    method = BUILT_IN.get(scheme) or _registered.get(scheme)
    if method is None:
        raise ConfigError(f"init_method={init_method!r} is not known. Expected one of {forms()}, or none.")
    return method


def forms() -> str:
    """Return the URLs of all methods, for error messages."""
    return ", ".join(method.form for method in (*BUILT_IN.values(), *_registered.values()))


publish(globals())

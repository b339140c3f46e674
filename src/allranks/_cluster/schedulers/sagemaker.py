"""SageMaker: one process on each host, in the place of a launcher.

Source: the documents of SageMaker's training toolkit. Not tested on a real system.
"""

from __future__ import annotations

import json

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots
from allranks._cluster.reading import Environ, Reader, node_or_hint
from allranks._cluster.schedulers.interface import Scheduler

__all__ = ["SCHEDULER"]


def _find_node(environ: Environ, launcher: bool) -> LaunchContext | None:
    if not environ.get("SM_HOSTS", "").strip() and not environ.get("SM_CURRENT_HOST", "").strip():
        return None
    read = Reader(environ, "sagemaker")
    read.require("SM_HOSTS", "SM_CURRENT_HOST")
    text = read.text("SM_HOSTS", "The hosts.")
    here = read.text("SM_CURRENT_HOST", "This host.")
    read.text("SM_NETWORK_INTERFACE_NAME", "The network interface between the hosts.")
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or here not in names:
        raise ConfigError(
            f"SM_HOSTS={text!r} and SM_CURRENT_HOST={here!r}: expected a JSON list of hosts that contains this host."
        )
    context = LaunchContext(
        "sagemaker",
        "node",
        node=names.index(here),
        nodes=len(names),
        leader=names[0],
        hosts=tuple(Slots(name) for name in names),
        why=read.why,
    )
    return node_or_hint(context, launcher)


SCHEDULER = Scheduler(
    name="sagemaker", title="SageMaker", interface=1, proof="SM_HOSTS", kinds=("sagemaker",), node=_find_node
)

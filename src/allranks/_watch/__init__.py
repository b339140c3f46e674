"""The watcher: reports why ranks wait in calls of torch.distributed, on torch's own backends and under any launcher.

- ``hooks``     starts the watcher of a process when its default process group is created
- ``watcher``   the thread that detects a long wait, collects the states of all ranks, and reports
- ``exchange``  the connections on which ranks request the state of other ranks, apart from the collectives that hang
- ``evidence``  the state of this rank: the calls that torch has recorded, its messages, and the places of its threads
- ``recorded``  calls from the dump of torch's Flight Recorder
- ``messages``  a record of ``isend`` and ``irecv``, which the Flight Recorder lacks on gloo
- ``arrivals``  which rank begins collectives last
- ``threads``   the places of this process's threads
- ``report``    the text and the file of a report

Groups of allranks's own engine record their calls themselves; see ``_trace/watcher.py``.
"""

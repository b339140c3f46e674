"""Prefix of scripts of elastic jobs that watch the slot table without a group."""

SLOT_WATCH = """
import os, signal, sys, time
from pathlib import Path
from allranks._base.errors import ExcludedError, PeerLostError, StateLostError
from allranks._elastic.slot_table import TABLE_KEY, SlotTable
from allranks._store import StoreClient

rank, start = int(os.environ["RANK"]), int(os.environ["ALLRANKS_START"])
_store = StoreClient.connect(os.environ["ALLRANKS_STORE"], os.environ.get("ALLRANKS_SECRET", "").encode(), 10)

def table():
    return SlotTable.decode(_store.get(TABLE_KEY, 10.0))

def slot(number):
    found = table().find(number)
    return found.start, found.state

def wait_for(number, *wanted):
    until = time.monotonic() + 20
    while slot(number) != wanted:
        assert time.monotonic() < until, table()
        time.sleep(0.002)

def tell(key):
    _store.set(key, b"")

def await_key(key):
    _store.wait([key], 20.0)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def say(*words):
    print(*words, flush=True)
"""

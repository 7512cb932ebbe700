"""Work that a forked child does for a test."""

from __future__ import annotations

import os
import pickle


def in_child(work):
    """What a forked child returned; an exception in it is an error here."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = pickle.dumps(work())
        except BaseException as error:
            told = pickle.dumps(error)
        os.write(writing, told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if isinstance(told, BaseException):
        raise told
    return told

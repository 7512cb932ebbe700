"""Makes wrong calls of the native functions in a child process, so that a crash is a result and not the end.

It prints a JSON object: the name of each call with what came of it, "ValueError" for an exception, "signal 11" for a
crash, "returned" for none of them, or "wrote" if memory was changed by a call that was refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import misuse_replay  # noqa: F401  (for its calls)
import misuse_rollouts  # noqa: F401  (for its calls)
import torch
from misuse import EDGES, MISUSES, OUTPUTS


def outcome(call: Callable[[], object]) -> str:
    """What a call came to, in this process."""
    before = [output.clone() for output in OUTPUTS]
    try:
        call()
    except Exception as error:
        same = all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(before, OUTPUTS, strict=True))
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return ",".join(kinds) if same else "wrote"
    return "returned"


def outcomes(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What each call came to, made in a child process; after a crash another child goes on."""
    found: dict[str, str] = {}
    while len(found) < len(calls):
        waiting = [name for name in calls if name not in found]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash may have much to say
            for name in waiting:
                os.write(writer, f"{outcome(calls[name])}\n".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found.update(zip(waiting, pipe.read().splitlines(), strict=False))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            found[waiting[len(found) - len(calls)]] = f"signal {os.WTERMSIG(status)}"
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    calls = {name: call for name, (_, call) in MISUSES.items()} | EDGES
    json.dump(outcomes(calls), sys.stdout)

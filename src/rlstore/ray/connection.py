"""What every user of a served storage holds: the actors, their names, and the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlstore.errors import PeerLostError
from rlstore.ray.calls import Deadline, GoneForGoodError, answer

# Between two questions to an actor that says at once that it is gone. Ray has no way to be told when it is back.
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Connection:
    """The actors of a served storage.

    Attributes:
        name: Of the served storage, in errors and in the cluster.
        ledger: The ledger's actor.
        shards: The shards' actors.
        places: Where each shard was when the storage was served.
        deadline: Seconds after which a wait is given up.
    """

    name: str
    ledger: Any
    shards: tuple[Any, ...]
    places: tuple[str, ...]
    deadline: float

    @property
    def who_keeps_the_ledger(self) -> str:
        """What the ledger is called in errors."""
        return f"the ledger of {self.name}"

    def who(self, shard: int) -> str:
        """What a shard is called in errors."""
        return f"shard {shard} of {self.name} (served at first from {self.places[shard]})"

    @property
    def patience(self) -> float:
        """Seconds after which a learner goes on without a shard that does not answer."""
        return max(self.deadline / 6, 0.5)

    def ask_ledger(self, method: str, *args: Any, wanted: Callable[[], bool] | None = None) -> Any:
        """Call the ledger; while it is being started again, again, until the deadline.

        It has the same deadline for permits, and says why it was not kept; so it may answer first.
        """
        deadline = Deadline(self.deadline + 1)
        while True:
            try:
                ref = getattr(self.ledger, method).remote(*args)
                return answer(ref, self.who_keeps_the_ledger, deadline.left, wanted)
            except PeerLostError as error:
                if not deadline.left or isinstance(error, GoneForGoodError):
                    raise
                self.pause(deadline)

    def pause(self, deadline: Deadline) -> None:
        """Wait a little before an actor that is gone is asked again."""
        time.sleep(min(_PAUSE_SECONDS, deadline.left))

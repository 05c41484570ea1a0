"""The clock of a case over ranks: a call takes as long as its slowest rank does, and all ranks read the same times.

What a measurement does next depends on its times alone, so all ranks then time the same arms in the same order, as
often as each other.
"""

from __future__ import annotations

import sys

from ffncli.bench.timing.clock import Call, Clock
from ffncli.bench.timing.ranks.channel import RankChannel


class RankClock:
    """Another clock, with the ranks of `channel` in step. With `each_call`, every call that has something to do before
    it starts at a barrier of its own, and is timed by itself: ranks that prepare for longer are not waited for inside.
    """

    def __init__(self, clock: Clock, channel: RankChannel, each_call: bool = True) -> None:
        self.clock, self._channel, self._each_call = clock, channel, each_call

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Seconds of `inner` calls on the slowest rank; of each call, where they are timed one by one."""
        if before is None or not self._each_call:
            self._channel.barrier()
            return self._channel.largest([self.clock.time(call, inner, before)])[0]
        seconds = []
        for _ in range(inner):
            before()
            self._channel.barrier()
            seconds.append(self.clock.time(call, 1))
        return sum(self._channel.largest(seconds))

    def now(self) -> float:
        """Seconds of rank 0's clock; on the way out of an error, when the others are elsewhere, of this rank's."""
        if sys.exc_info()[0] is not None:
            return self.clock.now()
        return self._channel.first(self.clock.now())

    def finish(self) -> None:
        """Wait until this rank's device has finished all its work."""
        self.clock.finish()

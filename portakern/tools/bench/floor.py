"""Turns on a device that several processes use: whoever has the floor is alone with it, and the others stand still."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from threading import Lock, Thread

from portakern.processes import stopped

__all__ = ["Floor", "Seat", "open_floor"]

SETTLED = 0.1
"""Seconds after which a device has finished what processes handed over before they were stopped: each waits for a call
before it makes another, and no call that is visited takes longer."""

TAKE, LEAVE, STOOD, ENOUGH = "take", "leave", "stood", "enough"
"""What a seat says: it wants to be alone, is no longer, and asks for the seconds that it stood still and whether it is
to end what it does beside."""


class Floor:
    """Hands out turns to processes that are seated by a number.

    Attributes:
      address: what a :class:`Seat` connects to. pools: the processes that stand still meanwhile: of a seat's number its
      own, which do not stop themselves; of the others nobody has a seat.
    """

    def __init__(self, pools: Mapping[int, ProcessPoolExecutor], enough: Callable[[], bool]) -> None:
        self.pools, self._enough = pools, enough
        self._turn, self._stood = Lock(), Counter[int]()
        self._listener = Listener()
        self.address = self._listener.address
        Thread(target=self._seat_all, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _seat_all(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                Thread(target=self._serve, args=(self._listener.accept(),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer one seat until it is gone, which is the end of its turn too."""
        with suppress(EOFError, OSError), connection, ExitStack() as turn:
            number = connection.recv()
            while True:
                asked, answer = connection.recv(), None
                if asked == TAKE:
                    turn.enter_context(self._alone(number))
                elif asked == LEAVE:
                    turn.close()
                elif asked == STOOD:
                    answer = self._stood[number]
                elif asked == ENOUGH:
                    answer = self._enough()
                connection.send(answer)

    @contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        with self._turn, ExitStack() as still:
            others, start = [n for n in self.pools if n != number], time.monotonic()
            try:
                for other in others:
                    still.enter_context(stopped(self.pools[other]))
                time.sleep(SETTLED)
                yield
            finally:
                still.close()
                self._stood.update(dict.fromkeys(others, time.monotonic() - start))


class Seat:
    """A process's place at a floor."""

    def __init__(self, address: str | tuple[str, int], number: int) -> None:
        self._connection = Client(address)
        self._connection.send(number)

    def _ask(self, what: str) -> float | bool | None:
        self._connection.send(what)
        found: float | bool | None = self._connection.recv()
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While inside, no other process of the floor uses the device."""
        self._ask(TAKE)
        try:
            yield
        finally:
            self._ask(LEAVE)

    def clock(self) -> float:
        """Seconds, without those that this process stood still for."""
        return time.perf_counter() - float(self._ask(STOOD) or 0.0)

    def enough(self) -> bool:
        """Whether there is something to do that is of more use than to get ready."""
        return bool(self._ask(ENOUGH))


@contextmanager
def open_floor(pools: Mapping[int, ProcessPoolExecutor], enough: Callable[[], bool]) -> Iterator[Floor]:
    """A floor that closes with the block."""
    floor = Floor(pools, enough)
    try:
        yield floor
    finally:
        floor.close()

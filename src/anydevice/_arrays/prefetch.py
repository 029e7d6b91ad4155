"""`prefetch`: batches moved ahead of the loop that uses them, by one thread per iteration.

The loop and its thread share two queues and nothing else. One has a token for each further batch
that may be pulled, and one at the end of the loop; the other has the batches. The thread does not
know the iterator that the loop holds, so an abandoned iterator is collected as any other object,
and collecting it ends the thread.
"""

from __future__ import annotations

import atexit
import operator
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

from anydevice._arrays.move import take_over, to_device
from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.locks import ForkSafeLock, started
from anydevice._core.record import Record
from anydevice._machine.choose.scope import one_device
from anydevice.errors import AnyDeviceError, ConfigurationError

GRACE = 1.0
"""Seconds that the end of the process waits for loaders that are in the middle of a batch."""

_NOTHING = object()
_pulling: WeakSet[_Pull] = WeakSet()


class Prefetch:
    """An iterable of placed batches, which can be iterated as often as its loader. See `prefetch`.

    It has the length of its loader, if the loader has one, and all attributes of the loader, as in
    `batches.dataset` or `batches.sampler.set_epoch(1)`.
    """

    def __init__(self, loader: Iterable[Any], device: Device, depth: int) -> None:
        self.loader = loader
        self.device = device
        self.depth = depth
        self._turn = ForkSafeLock()

    def __iter__(self) -> PrefetchIterator:
        # Not in the thread: a loader that forks workers must do so before the thread starts.
        source = iter(self.loader)
        one_shot = source is self.loader
        turn = self._turn if one_shot else ForkSafeLock()
        return PrefetchIterator(_Pull(source, self.device, self.depth, turn))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __length_hint__(self) -> int:
        return operator.length_hint(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # copying looks for special methods
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.loader, name)
        except AttributeError:
            raise AttributeError(
                f"neither this Prefetch nor its {type(self.loader).__name__} has an attribute "
                f"{name!r}"
            ) from None

    def __repr__(self) -> str:
        return f"Prefetch({self.loader!r}, {self.device!r}, depth={self.depth})"


class PrefetchIterator(Iterator[Any]):
    """One iteration: the batches in the loader's order; a context manager that closes itself."""

    def __init__(self, pull: _Pull) -> None:
        self._pull = pull
        self._ended = False
        pull.begin()

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            batch = self._pull.wait()
        except BaseException:  # such as Ctrl-C while waiting: no batch will be taken again
            self._ended = True
            self._pull.stop()
            raise
        if not isinstance(batch, _End):
            self._pull.hand_over(batch)
            return batch
        self.close()
        if batch.error is None:
            raise StopIteration
        try:
            if isinstance(batch.error, StopIteration):
                raise RuntimeError("placing a batch raised StopIteration") from batch.error
            raise batch.error
        finally:
            del batch  # else the error would hold this frame, and this frame the error

    def close(self) -> None:
        """End the iteration after the current batch, and drop the batches that are ready."""
        self._ended = True
        self._pull.stop()
        self._pull.conclude()

    def __enter__(self) -> PrefetchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without waiting, which dropping a reference should never do.
        self._pull.stop()


class _End(Record):
    """Follows the last batch: the loader has ended or failed."""

    error: BaseException | None = None


class _Pull(threading.Thread):
    """Pulls batches from a source, in the context of its creator, and places them."""

    def __init__(
        self, source: Iterator[Any], device: Device, depth: int, turn: ForkSafeLock
    ) -> None:
        # A daemon: a loader that never returns must not keep the process from ending.
        super().__init__(name="anydevice prefetch", daemon=True)
        self._source: Iterator[Any] | None = source
        self._device = device
        self._turn = turn
        self._context = copy_context()
        self._stopped = False
        self._is_beside = True
        # SimpleQueue may be used from a finalizer, at any point of the interrupted code.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth):
            self._tokens.put(None)

    def begin(self) -> None:
        """Start to pull; without a thread, each batch is pulled when the loop needs it."""
        self._is_beside = started(self)
        if self._is_beside:
            _pulling.add(self)

    def run(self) -> None:
        try:
            self._context.run(self._place_batches)
        except BaseException as error:  # every error is raised in the loop
            self._ready.put(_End(error))
        else:
            self._ready.put(_End())
        finally:
            self._source = None

    def _place_batches(self) -> None:
        while self._tokens.get() is None and not self._stopped:
            batch = self._place_batch()
            if batch is _NOTHING:
                return
            self._ready.put(batch)
            del batch  # while this thread waits, the batch is the loop's alone

    def _place_batch(self) -> Any:
        assert self._source is not None
        with self._turn.native:
            # It may have been stopped while it waited for its turn.
            batch = _NOTHING if self._stopped else next(self._source, _NOTHING)
        return batch if batch is _NOTHING else to_device(batch, self._device)

    def wait(self) -> Any:
        """Return the next batch, or the `_End`; one more may then be pulled."""
        if not self._is_beside:
            try:
                batch = self._context.run(self._place_batch)
            except Exception as error:
                return _End(error)
            return _End() if batch is _NOTHING else batch
        if not self.is_alive() and self._ready.empty():
            raise AnyDeviceError(
                "this iteration was begun before a fork, and its thread stayed in the parent "
                "process; begin a new one here with iter()"
            )
        batch = self._ready.get()
        self._tokens.put(None)
        return batch

    def hand_over(self, batch: Any) -> None:
        """Tell GPU libraries that the calling thread uses the batch."""
        if self._device.kind == "gpu":
            take_over(batch)

    def stop(self) -> None:
        """Pull no further batch, and drop the batches that are ready, without waiting."""
        self._stopped = True
        self._tokens.put(None)
        self._drain()

    def conclude(self) -> None:
        """Wait until the thread has ended, drop its last batch, and wake waiting threads."""
        if self._is_beside:
            self.join()
        self._drain()
        self._ready.put(_End())

    def _drain(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except Empty:
            pass


def prefetch(loader: Iterable[Any], device: Device | str, depth: int = 2) -> Prefetch:
    """Iterate over the batches of `loader` on `device`, with the next `depth` moved ahead.

    `loader` is anything that can be iterated: a list, a generator, a `torch.utils.data.DataLoader`.
    The loop gets the batches in order, moved by `to_device`, while a thread works on the next ones.
    Loading, copying and computing overlap as far as the loader releases the GIL.

    >>> [int(batch["x"].sum()) for batch in prefetch([{"x": numpy.ones(n)} for n in (1, 2)], "cpu")]
    [1, 2]

    At most `depth` batches are ready or in progress, in addition to the one that the loop has. An
    error of the loader, or of moving, is raised in the loop after the batches before it. A loop
    that stops early ends the thread after its current batch; if the loader can be iterated only
    once, the batches that were loaded ahead are lost. Raises `DeviceNotFoundError` if the device is
    not usable, and `ConfigurationError` for an invalid `loader` or `depth`.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ConfigurationError(
            f"prefetch: a {type(loader).__name__} cannot be iterated; give it a loader, such as a "
            f"list of batches, a generator or a DataLoader"
        )
    note = "it is the number of batches that are loaded ahead, and 2 is usually enough"
    depth = checks.integer("depth", depth, 1, owner="prefetch", note=note)
    target = device if isinstance(device, Device) and device.usable else one_device(device)
    return Prefetch(loader, target, depth)


@atexit.register
def _end_all() -> None:
    """End all threads: a thread that is killed inside a library may crash the process."""
    pulling = [pull for pull in _pulling if pull.is_alive()]
    for pull in pulling:
        pull.stop()
    until = time.monotonic() + GRACE
    for pull in pulling:
        pull.join(max(0.0, until - time.monotonic()))

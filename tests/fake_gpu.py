"""Define a fake GPU with a work queue and exactly known times."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from stepscope.measure import timing


class FakeGpu:
    """A simulated GPU and host clock; all times are in ms.

    A launch advances the host's clock by 1 ms. A synchronization advances the clock to the time at
    which the GPU has finished all its work.

    Args:
        modules: additional modules whose ``default_timer`` is replaced with the simulated host clock.
    """

    def __init__(self, monkeypatch, *modules):
        self.host_ms, self.done_ms, self.synchronized = 0.0, 0.0, 0
        self.log = []  # tuples: a range's name, "opens" or "closes", and the GPU work (ms) that remains then
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        for module in (timing, *modules):
            monkeypatch.setattr(module, "default_timer", lambda: self.host_ms / 1e3)

    @property
    def left_ms(self):
        return max(self.done_ms - self.host_ms, 0.0)

    def launch(self, work_ms):
        self.host_ms += 1
        self.done_ms = max(self.done_ms, self.host_ms) + work_ms

    def synchronize(self):
        self.host_ms += self.left_ms
        self.synchronized += 1

    def event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace()

        def record():
            event.ms = self.host_ms + self.left_ms
            event.synchronized = self.synchronized

        def elapsed_time(end):
            assert end.synchronized < self.synchronized, "the time was read before the device was idle"
            return end.ms - event.ms

        event.record, event.elapsed_time = record, elapsed_time
        return event

    @contextmanager
    def range(self, name):
        self.log.append((name, "opens", self.left_ms))
        yield
        self.log.append((name, "closes", self.left_ms))

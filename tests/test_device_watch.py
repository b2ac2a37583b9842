"""The device's state while steps run: what is said from readings, and that a CPU says nothing.

NVML is not here; a driver is stood in for by functions that give known numbers, as ``DeviceWatch`` takes them.
"""
import math
import time

import pytest
import torch

from stepscope.runs.device_watch import DeviceWatch, Poll, differences, from_polls, measure_watched
from stepscope.step import sm_clock
from stepscope.step.timing import WHOLE, keep_up, measure
from stepscope.step.training_step import build_step


def steady(seconds, every_s=0.02, power_w=500.0, clock_mhz=1800.0, counter_every_s=0.1):
    """Polls of a device at constant power whose energy counter is brought up to date now and then."""
    times = [i * every_s for i in range(round(seconds / every_s) + 1)]
    return [Poll(t, clock_mhz, power_w, 7e6 + power_w * counter_every_s * math.floor(t / counter_every_s + 1e-9))
            for t in times]


@pytest.mark.parametrize("seconds", [0.45, 0.5, 0.57, 2.0])
def test_a_stale_energy_counter_gives_the_true_power_between_its_changes(seconds):
    found = from_polls(steady(seconds))
    assert found["energy_j"] / found["energy_s"] == pytest.approx(500)
    assert found["energy_polled_j"] == pytest.approx(found["energy_j"])
    assert found["energy_s"] == pytest.approx(math.floor(seconds / 0.1 + 1e-9) * 0.1 - 0.1)


def test_median_and_least_clock_and_mean_power_are_of_all_polls():
    polls = [Poll(i, clock, 100.0 * i, 0.0) for i, clock in enumerate([1900, 1400, 1980])]
    found = from_polls(polls)
    assert (found["sm_clock_median_mhz"], found["sm_clock_least_mhz"], found["power_w"]) == (1900, 1400, 100)


def test_what_the_driver_does_not_say_is_none():
    nan = float("nan")
    assert from_polls([Poll(i, nan, nan, nan) for i in range(5)]) == {
        "polls": 5, "sm_clock_median_mhz": None, "sm_clock_least_mhz": None, "power_w": None,
        "energy_s": None, "energy_j": None, "energy_polled_j": None}
    assert differences({"a": 1.0, "b": None, "c": 5.0}, {"a": 4.0, "b": 2.0, "c": None}) == {
        "a": 3.0, "b": None, "c": None}


def counting(*readings, refused=None):
    values = iter(readings)
    return lambda: (next(values), refused or {})


def test_counters_are_read_before_and_after_and_a_short_window_gives_no_energy():
    counters = counting({"energy_j": 10.0, "throttled_power_cap_us": 5.0},
                        {"energy_j": 30.0, "throttled_power_cap_us": 905.0})
    with DeviceWatch("cuda", counters=counters) as watch:
        assert not watch.readings
    assert watch.readings["throttled_power_cap_us"] == 900
    assert watch.readings["energy_j"] is None and "less than" in watch.readings["unread"]


def test_a_refusal_is_kept_with_its_reason():
    counters = counting({"energy_j": None}, {"energy_j": None}, refused={"energy_j": "Not Supported"})
    with DeviceWatch("cuda", counters=counters) as watch:
        pass
    assert watch.readings["energy_j"] is None and watch.readings["unread"] == "energy_j: Not Supported"


def test_a_polling_watch_reads_from_a_thread_until_it_is_left():
    began, polls = time.monotonic(), []

    def read():
        at_s = time.monotonic() - began
        polls.append(at_s)
        return Poll(at_s, 1000.0, 200.0, 200.0 * at_s)
    counters = counting({"energy_j": 0.0}, {"energy_j": 1.0})
    with DeviceWatch("cuda", poll=True, counters=counters, read=read) as watch:
        while len(polls) < 6:
            time.sleep(0.01)
    read_so_far = len(polls)
    assert watch.readings["polls"] == read_so_far and not watch.thread.is_alive()
    assert watch.readings["energy_j"] / watch.readings["energy_s"] == pytest.approx(200)
    assert watch.readings["energy_polled_j"] == pytest.approx(watch.readings["energy_j"])


def test_a_cpu_has_the_same_samples_and_no_state(tiny):
    samples, state = measure_watched(build_step(tiny(warmup_steps=1, timed_steps=2)))
    assert state == {} and len(samples[samples["phase"] == WHOLE]) == 3


def test_the_watch_is_around_the_timed_steps_alone(tiny):
    seen, step = [], build_step(tiny(mode="forward", warmup_steps=2, timed_steps=3))
    step.model.register_forward_pre_hook(lambda model, args: seen.append("step"))

    class Watch:
        def __enter__(self):
            seen.append("on")

        def __exit__(self, *exception):
            seen.append("off")
    measure(step, watch=Watch())
    assert seen == ["step"] * 2 + ["on"] + ["step"] * 3 + ["off"]


def test_a_step_is_kept_up_at_least_once_and_as_long_as_asked(tiny):
    step = build_step(tiny(mode="forward_backward"))
    assert keep_up(step, 0.0) == 1
    began = time.monotonic()
    assert keep_up(step, 0.05) > 1 and time.monotonic() - began >= 0.05


def test_a_clock_is_read_only_where_the_process_uses_the_gpu(monkeypatch):
    """A CPU's run on a machine with a GPU: that one's clock is none of its steps'."""
    monkeypatch.setattr(sm_clock, "nvml_device", lambda: "a GPU beside")
    monkeypatch.setattr(sm_clock.pynvml, "nvmlDeviceGetClockInfo", lambda device, which: 345)
    for uses, clock_mhz in ((False, None), (True, 345.0)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda uses=uses: uses)
        assert sm_clock.sm_clock_mhz() == clock_mhz

"""Objects of the benchmark that a user's file changed."""

import os

from ffncli.bench.records import TimedBlock
from ffncli.bench.timing.cheating.instances import replaced_in_instances
from ffncli.bench.timing.clock import CpuClock


def test_ffn_in_a_user_s_project_is_not_the_user_s_code():
    """A project may have its environment in its own folder; its kernel's folder then has all of ffn's code."""
    clock = CpuClock()
    found = [
        (thing, key)
        for thing, key, value in replaced_in_instances({os.sep})
        if not any(of.startswith("tests.") for of in (type(thing).__module__, getattr(value, "__module__", None) or ""))
    ]  # without other tests' clocks and arms
    assert found == []
    clock.time = lambda call, inner, before=None: 1e-9
    assert (clock, "time") in [(thing, key) for thing, key, _ in replaced_in_instances({os.sep})]
    assert TimedBlock.__module__ == "ffncli.bench.records"

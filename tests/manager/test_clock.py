"""Clocks: the time of day never jumps, whatever becomes of the machine's."""

from __future__ import annotations

import pytest

from manager.clock import WallClock

DAY_S = 86400.0


class TwoClocks:
    """Both clocks of a machine, moved by hand."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1e9, 5.0

    def pass_s(self, passed_s: float) -> None:
        self.wall_s += passed_s
        self.monotonic_s += passed_s

    def clock(self) -> WallClock:
        return WallClock(lambda: self.wall_s, lambda: self.monotonic_s)


def test_it_tells_the_machine_s_time_while_nobody_sets_it() -> None:
    machine = TwoClocks()
    clock = machine.clock()
    for _ in range(100):
        machine.pass_s(0.1)
        assert clock() == pytest.approx(machine.wall_s)


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_jump_of_the_machine_s_clock_is_followed_slowly_and_never_backwards(jump_s: float) -> None:
    machine = TwoClocks()
    clock = machine.clock()
    before_s = clock()
    machine.wall_s += jump_s
    assert clock() == before_s
    machine.pass_s(10.0)
    assert 9.0 <= clock() - before_s <= 11.0


def test_it_is_right_again_in_the_end() -> None:
    machine = TwoClocks()
    clock = machine.clock()
    machine.wall_s += 30.0
    for _ in range(700):
        machine.pass_s(1.0)
        clock()
    assert clock() == pytest.approx(machine.wall_s)

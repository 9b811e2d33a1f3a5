"""What a batch takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Work, expected_s

seconds = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12)
marginals = st.floats(0.0, 1.0)


@given(seconds, marginals)
def test_a_batch_takes_no_less_than_its_longest_and_no_more_than_all_in_turn(
    alone_s: list[float], marginal: float
) -> None:
    took_s = Work.of(alone_s).seconds(marginal)
    assert max(alone_s) <= took_s <= sum(alone_s) * (1 + 1e-9)


@given(st.floats(0.01, 100.0), st.integers(1, 64), marginals)
def test_members_alike_each_add_the_marginal(alone_s: float, members: int, marginal: float) -> None:
    work = Work.of([alone_s] * members)
    assert work.seconds(marginal) == pytest.approx(alone_s * (1 + marginal * (members - 1)))
    assert work.size == pytest.approx(members)


@given(seconds, marginals)
def test_the_order_of_members_changes_nothing(alone_s: list[float], marginal: float) -> None:
    assert Work.of(sorted(alone_s)).seconds(marginal) == pytest.approx(Work.of(alone_s).seconds(marginal))


def test_a_member_of_unknown_duration_counts_as_the_mean_of_the_others() -> None:
    assert expected_s([None, None], 1.0) is None
    assert expected_s([2.0, None, 4.0], 1.0) == pytest.approx(9.0)
    assert expected_s([2.0, None, 4.0], 0.0) == pytest.approx(4.0)

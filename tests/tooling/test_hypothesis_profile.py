"""An example may take as long as it likes, wherever hypothesis runs."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.ranks import run_ranks


@settings(max_examples=1)
@given(st.just(0))
def example(_: int) -> None:
    pass


def in_force():
    return settings().deadline, HealthCheck.too_slow in settings().suppress_health_check


def test_nothing_of_hypothesis_waits_for_a_clock():
    """In this process, in a test that sets something else, and in a rank."""
    assert in_force() == (None, True)
    assert example._hypothesis_internal_use_settings.deadline is None
    assert run_ranks(1, in_force) == [(None, True)]

"""Settings of hypothesis for all tests, in pytest's processes and in the ranks they start."""

from hypothesis import HealthCheck, settings


def load() -> None:
    """Let an example take as long as it likes, and drawing it, too: machines are busy at times."""
    settings.register_profile(
        "tests", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")

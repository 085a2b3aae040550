"""Settings of hypothesis for all tests, in pytest's processes and in the ranks they start."""

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers


def load() -> None:
    """Let an example take as long as it likes, and drawing it, too: machines are busy at times.

    Examples are drawn without the numbers in this package's sources, for which every process would
    parse all of them, and which would let each edit change the examples of unrelated tests.
    """
    settings.register_profile(
        "tests", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")
    providers._get_local_constants = lambda: providers._local_constants

"""For all tests."""

from hypothesis import HealthCheck, settings

from tests.harness import loop_guard

loop_guard.install()

# The same examples every time, and no limit on the time of one: a busy machine is no failure.
settings.register_profile(
    "atoll",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("atoll")

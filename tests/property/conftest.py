"""Two profiles: a short deterministic one for every run, a long random one for nightly runs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "short",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("short")

"""The files in ops/ use metrics that exist, and the docs tell what the files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from persisting import metrics
from persisting.cli import metrics_exporter

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
DOCS = [ROOT / "docs/guide" / name for name in ("monitoring.md", "monitoring.zh.md")]

_NAME = re.compile(r"\bpersisting_[a-z_]+\b")
_ALERT = re.compile(r"^ +- alert: (\w+)$", re.MULTILINE)


def exported() -> dict[str, str]:
    """Metrics by the name that a scrape shows, with their types."""
    found = {}
    for family in vars(metrics._families()).values():
        registry = CollectorRegistry()
        registry.register(family)
        (metric,) = [m for m in family.collect() if not m.name.endswith("_created")]
        name = metric.name + ("_total" if metric.type == "counter" else "")
        found[name] = metric.type
    return found


def series() -> set[str]:
    """Every name that can stand in an expression."""
    found = set()
    for name, kind in exported().items():
        found |= (
            {f"{name}_{part}" for part in ("bucket", "count", "sum")}
            if (kind == "histogram")
            else {name}
        )
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    variables = [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    return variables + [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]


def names_in(text: str) -> set[str]:
    return set(_NAME.findall(text))


def test_every_metric_of_the_alerts_exists():
    used = names_in((OPS / "alerts.yml").read_text())
    assert used
    assert used <= series()
    assert names_in((OPS / "alerts.test.yml").read_text()) <= series()


def test_every_metric_of_the_dashboard_exists_and_every_metric_is_shown():
    dashboard = json.loads((OPS / "grafana-dashboard.json").read_text())
    used = names_in(" ".join(expressions(dashboard)))
    assert used <= series()
    for name in exported():
        assert any(shown.startswith(name) for shown in used), f"{name} is on no panel"


def test_the_dashboard_asks_for_a_data_source_and_filters_by_topic_and_bucket():
    dashboard = json.loads((OPS / "grafana-dashboard.json").read_text())
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "topic", "bucket"]
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identities)) == len(identities)
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert 'topic=~"$topic", bucket=~"$bucket"' in target["expr"]


def test_every_alert_is_tested_by_promtools_own_tests_or_has_none_to_fire():
    defined = _ALERT.findall((OPS / "alerts.yml").read_text())
    tested = set(re.findall(r"alertname: (\w+)", (OPS / "alerts.test.yml").read_text()))
    assert len(set(defined)) == len(defined)
    assert tested == set(defined)


def rules() -> dict[str, dict[str, str]]:
    """The rules by name, read line by line: the tests need no YAML library."""
    found: dict[str, dict[str, str]] = {}
    for line in (OPS / "alerts.yml").read_text().splitlines():
        key, colon, value = line.strip().removeprefix("- ").partition(":")
        if key == "alert":
            found[value.strip()] = {}
        elif colon and found and not line.lstrip().startswith("#"):
            found[list(found)[-1]][key] = value.strip().strip('"')
    return found


def test_every_rule_has_a_severity_and_says_which_bucket():
    for name, rule in rules().items():
        assert rule["severity"] in {"info", "warning", "critical"}, name
        assert "$labels.topic" in rule["summary"], name
        assert "$labels.bucket" in rule["summary"], name
        assert rule["description"], name
        assert rule["expr"], name


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_the_page_lists_every_metric_with_its_type(page: Path):
    rows = re.findall(r"^\| `(persisting_\w+)` \| (\w+) \|", page.read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == exported() | {name: kind for name, kind, _ in seen_from_outside()}
    assert len(rows) == len(exported()) + len(seen_from_outside())


def seen_from_outside() -> list[tuple[str, str, list[str]]]:
    """What `persisting metrics serve` exports: names, types and labels."""
    families = metrics_exporter._families().values()
    return [(one.name, one.type, list(one._labelnames)) for one in families]


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_the_page_lists_every_metric_seen_from_outside_with_its_labels(page: Path):
    row = re.compile(r"^\| `(persisting_\w+)` \| (\w+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
    rows = row.findall(page.read_text("utf-8"))
    listed = [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows]
    assert listed == seen_from_outside()


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_the_page_lists_every_alert(page: Path):
    listed = re.findall(r"^\| `(Persisting\w+)` \|", page.read_text("utf-8"), re.MULTILINE)
    assert listed == _ALERT.findall((OPS / "alerts.yml").read_text())


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_the_page_shows_the_scrape_config_as_it_is(page: Path):
    config = (OPS / "prometheus.yml").read_text()
    without_comments = re.sub(r"^#.*\n", "", config, flags=re.MULTILINE)
    assert f"```yaml\n{without_comments}```" in page.read_text("utf-8")


def test_the_alert_on_the_logs_size_has_the_default_of_the_option():
    from persisting.options import PersistingOptions

    assert PersistingOptions.max_wal_size == 100 * 1024 * 1024
    assert "persisting_wal_size_bytes > 100 * 1024 * 1024" in (OPS / "alerts.yml").read_text()

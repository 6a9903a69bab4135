"""The files in ops/ use existing metrics, and the docs match the files."""

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
    """Return the types of all metrics by the name that a scrape shows."""
    found = {}
    for family in vars(metrics._families()).values():
        registry = CollectorRegistry()
        registry.register(family)
        (metric,) = [m for m in family.collect() if not m.name.endswith("_created")]
        name = metric.name + ("_total" if metric.type == "counter" else "")
        found[name] = metric.type
    return found


def series() -> set[str]:
    """Return every name that an expression may use."""
    found = {name for name, _, _ in exporter_metrics() if name.startswith("persisting_work_")}
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


def test_alerts_use_existing_metrics():
    used = names_in((OPS / "alerts.yml").read_text())
    assert used
    assert used <= series()
    assert names_in((OPS / "alerts.test.yml").read_text()) <= series()


def test_dashboard_shows_every_metric_and_no_unknown_one():
    dashboard = json.loads((OPS / "grafana-dashboard.json").read_text())
    used = names_in(" ".join(expressions(dashboard)))
    assert used <= series()
    for name in [*exported(), *(name for name in series() if "_work_" in name)]:
        assert any(shown.startswith(name) for shown in used), f"{name} is on no panel"


def test_dashboard_has_a_data_source_and_filters_by_topic_and_bucket():
    dashboard = json.loads((OPS / "grafana-dashboard.json").read_text())
    assert [v["name"] for v in dashboard["templating"]["list"]] == [
        "datasource",
        "topic",
        "bucket",
        "group",
    ]
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identities)) == len(identities)
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            label = "group" if panel["title"].startswith("Work: ") else "bucket"
            assert f'topic=~"$topic", {label}=~"${label}"' in target["expr"]


def test_every_alert_has_a_promtool_test():
    defined = _ALERT.findall((OPS / "alerts.yml").read_text())
    tested = set(re.findall(r"alertname: (\w+)", (OPS / "alerts.test.yml").read_text()))
    assert len(set(defined)) == len(defined)
    assert tested == set(defined)


def rules() -> dict[str, dict[str, str]]:
    """Return the rules by name, parsed without a YAML library."""
    found: dict[str, dict[str, str]] = {}
    for line in (OPS / "alerts.yml").read_text().splitlines():
        key, colon, value = line.strip().removeprefix("- ").partition(":")
        if key == "alert":
            found[value.strip()] = {}
        elif colon and found and not line.lstrip().startswith("#"):
            found[list(found)[-1]][key] = value.strip().strip('"')
    return found


def test_every_alert_has_a_severity_and_names_its_bucket_unless_it_sums_over_buckets():
    for name, rule in rules().items():
        assert rule["severity"] in {"info", "warning", "critical"}, name
        assert "$labels.topic" in rule["summary"], name
        sums = "sum without (bucket)" in rule["expr"]
        label = "group" if "persisting_work_" in rule["expr"] else "bucket"
        assert (f"$labels.{label}" in rule["summary"]) != sums, name
        assert rule["description"], name
        assert rule["expr"], name


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_monitoring_page_lists_every_metric_with_its_type(page: Path):
    rows = re.findall(r"^\| `(persisting_\w+)` \| (\w+) \|", page.read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == exported() | {name: kind for name, kind, _ in exporter_metrics()}
    assert len(rows) == len(exported()) + len(exporter_metrics())


def exporter_metrics() -> list[tuple[str, str, list[str]]]:
    """Return names, types and labels of what `persisting metrics serve` exports."""
    families = metrics_exporter._families().values()
    return [(sample_name(one), one.type, list(one._labelnames)) for one in families]


def sample_name(family: Any) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_monitoring_page_lists_exporter_metrics_with_their_labels(page: Path):
    row = re.compile(r"^\| `(persisting_\w+)` \| (\w+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
    rows = row.findall(page.read_text("utf-8"))
    listed = [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows]
    assert listed == exporter_metrics()


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_monitoring_page_lists_every_alert(page: Path):
    listed = re.findall(r"^\| `(Persisting\w+)` \|", page.read_text("utf-8"), re.MULTILINE)
    assert listed == _ALERT.findall((OPS / "alerts.yml").read_text())


@pytest.mark.parametrize("page", DOCS, ids=["en", "zh"])
def test_monitoring_page_shows_the_scrape_configuration(page: Path):
    config = (OPS / "prometheus.yml").read_text()
    without_comments = re.sub(r"^#.*\n", "", config, flags=re.MULTILINE)
    assert f"```yaml\n{without_comments}```" in page.read_text("utf-8")


def test_log_size_alert_uses_the_default_of_max_wal_size():
    from persisting.options import PersistingOptions

    assert PersistingOptions.max_wal_size == 100 * 1024 * 1024
    expression = "sum without (bucket) (persisting_wal_size_bytes) > 100 * 1024 * 1024"
    assert expression in (OPS / "alerts.yml").read_text()

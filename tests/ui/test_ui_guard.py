"""Who may ask the console what: hosts, origins, tokens, paths, bounds."""

from __future__ import annotations

import http.client
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from support.console import RunningConsole, files_of, running_console
from support.waiting import until_true

from persisting.cli.app import run
from persisting.cli.commands.ui import _print_address
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.ui.app import routes
from persisting.ui.options import ConsoleOptions, is_loopback
from persisting.ui.sampler import Sampler
from persisting.ui.storage_view import StorageView
from persisting.ui.topic_rounds import TopicRounds, TopicUpdate

PROMETHEUS = "http://prometheus.example:9090/"
ODD_VALUES = [
    "%00",
    "%FF%FE",
    "-1",
    "9" * 19,
    "9" * 5000,
    "%D9%A3",
    "NaN",
    "%22%5Cud800%22",
    "9" * 40 + ":0",
    "[1e400,1]",
    "99999999999999999999d",
    "0001-01-01T00:00:00",
    "..%2F..",
    "(" * 300,
    "%0D%0A",
]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::1", "a b"])
def test_unknown_host_is_refused(console: RunningConsole, host: str) -> None:
    reply = console.ask("GET", "/", headers={"Host": host})
    assert reply.status in (400, 421)
    assert "runs" not in reply.text


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80"])
def test_loopback_names_are_answered_on_any_port(console: RunningConsole, host: str) -> None:
    assert console.ask("GET", "/", headers={"Host": host}).status == 200


def test_form_of_another_site_is_refused(unchanged: RunningConsole) -> None:
    path = "/topics/runs/versions/tags"
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{unchanged.port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        reply = unchanged.ask("POST", path, body="name=stolen", headers=headers)
        assert reply.status == 403, headers
    assert "stolen" not in unchanged.get("/topics/runs/versions").text


def test_script_of_another_site_cannot_start_a_query(console: RunningConsole) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert console.ask("GET", "/topics/runs/search?text=x", headers=headers).status == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert console.ask("GET", "/topics/runs", headers=link).status == 200
    frame = {**link, "Sec-Fetch-Dest": "iframe"}
    assert console.ask("GET", "/topics/runs/search?text=x", headers=frame).status == 403
    window = {**link, "Sec-Fetch-Dest": "document"}
    assert console.ask("GET", "/topics/runs", headers=window).status == 200


def test_browsers_keep_scripts_and_styles_but_no_page(console: RunningConsole) -> None:
    assert console.get("/topics/runs").headers["cache-control"] == "no-store"
    assert console.get("/topics/runs/records/0/0/json").headers["cache-control"] == "no-store"
    script = console.get("/static/app.js")
    assert script.headers["cache-control"] == "no-cache"
    known = {"If-None-Match": script.headers["etag"]}
    assert console.ask("GET", "/static/app.js", headers=known).status == 304


def test_every_answer_forbids_inline_scripts_and_frames(console: RunningConsole) -> None:
    for path in ("/", "/topics/runs/records", "/topics/nope", "/static/app.js", "/nope"):
        headers = console.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "same-origin"
    assert "<script>" not in console.get("/").text


def test_read_only_console_changes_nothing(console: RunningConsole) -> None:
    base = "/topics/runs"
    for path, fields in (
        (f"{base}/versions/tags", {"name": "mine"}),
        (f"{base}/versions/tags/delete", {"name": "v1"}),
        (f"{base}/versions/restore", {"tag": "v1", "confirm": "runs"}),
        (f"{base}/groups/reset", {"group": "trainers", "offsets": "0:0"}),
        (f"{base}/maintenance/compact", {}),
        (f"{base}/maintenance/retain", {"rows": "1"}),
        (f"{base}/maintenance/backup", {}),
    ):
        reply = console.post(path, **fields)
        assert reply.status == 403, path
        assert "--allow-changes" in reply.text


def test_every_route_that_changes_something_is_refused_by_a_read_only_console(
    console: RunningConsole, template: Path
) -> None:
    reading = {"/sign-in", "/language/{language}", "/topics/{topic}/tasks/{number}/stop"}
    paths = [route.path for route in routes() if "POST" in (getattr(route, "methods", None) or ())]
    assert reading < set(paths)
    before = files_of(template)
    for path in set(paths) - reading:
        for kind in ("compact", "retain", "backup", "nonsense", "VERIFY", "verify%00"):
            filled = path.replace("{topic}", "runs").replace("{kind}", kind)
            assert console.post(filled).status == 403, path
            assert console.post(filled.replace("runs", "nope")).status == 403, path
    assert console.post("/topics/runs/maintenance/verify").status == 303
    assert files_of(template) == before


def test_only_known_methods_are_answered(console: RunningConsole) -> None:
    reading = [r.path for r in routes() if "GET" in (getattr(r, "methods", None) or ())]
    for path in reading:
        filled = path.replace("{topic}", "runs").replace("{bucket}/{offset}", "0/0")
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            assert console.ask(method, filled).status == 405, (method, path)


def test_preview_of_a_change_is_refused_by_a_read_only_console(console: RunningConsole) -> None:
    for path in (
        "groups/reset?group=trainers",
        "groups/redrive?group=trainers",
        "versions/restore?tag=v1",
        "maintenance/retain?rows=1",
    ):
        assert console.ask("GET", f"/topics/runs/{path}").status == 403, path


@pytest.mark.parametrize(
    "path",
    [
        "/topics/..%2f..%2fetc%2fpasswd",
        "/topics/%2e%2e",
        "/topics/.hidden",
        "/topics/a%00b",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/topics/runs/versions/compare?first=..%2f..%2fx",
    ],
)
def test_no_path_leaves_the_storage_folder(console: RunningConsole, path: str) -> None:
    reply = console.ask("GET", path)
    assert reply.status in (400, 404)
    assert "import" not in reply.text


def test_topic_that_is_a_link_out_of_the_folder_is_not_shown(
    template: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "linked"
    storage.mkdir()
    (storage / "outside").symlink_to(template / "runs")
    view = StorageView(storage)
    assert view.names() == []
    with pytest.raises(NoSuchTopic, match="is a link out of"):
        view.folder("outside")


def test_topic_that_cannot_be_read_does_not_hide_the_others(template: Path, tmp_path: Path) -> None:
    for name in ("broken", "chat", "runs"):
        shutil.copytree(template / ("runs" if name == "broken" else name), tmp_path / name)
    shutil.rmtree(tmp_path / "broken" / "bucket_0")
    (tmp_path / "broken" / "bucket_0").write_text("no folder")
    view = StorageView(tmp_path)
    sampler, rounds = Sampler(view, 60.0, lambda topic, all_owners: {}), TopicRounds(view)
    for _ in range(2):
        for message in rounds.sample_all():
            sampler.take(message)
        samples = sampler.samples()
        assert "Not a directory" in (samples["broken"].problem or "")
        assert samples["runs"].problem is None
        assert samples["runs"].rows == 140


@pytest.mark.parametrize("inner", ["bucket_0", "bucket_0/data.lance", "bucket_0/data.lance/data"])
def test_link_inside_a_topic_that_leads_out_of_the_folder_is_refused(
    template: Path, tmp_path: Path, inner: str
) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(template / "runs", tmp_path / "queues" / "runs")
    shutil.move(tmp_path / "queues" / "runs" / inner, outside)
    (tmp_path / "queues" / "runs" / inner).symlink_to(outside)
    view = StorageView(tmp_path / "queues")
    with pytest.raises(NoSuchTopic, match="is a link out of"):
        view.read_now("runs", lambda source: source.snapshot(0))
    updates = [seen for seen in TopicRounds(view).sample_all() if isinstance(seen, TopicUpdate)]
    assert "is a link out of" in (updates[0].problem or "")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("records?limit=501", "limit must be a number from 1 to 500"),
        ("records?limit=-1", "limit must be"),
        ("records?offset=99999999999999999999999", "offset must be"),
        ("records?time=yesterday", "is not a time"),
        ("records?columns=nope", "has no field"),
        ("records?from=x", "bucket:offset"),
        ("records?tag=a&at=2h", "choose one of"),
        ("records?version=1", "choose a bucket too"),
        ("search?k=100000&text=a", "k must be"),
        ("search?text=" + "a" * 1001, "longer than 1,000"),
        ("search?vector=nope", "JSON list of numbers"),
        (f"search?vector=[1{'0' * 400}]", "too large for a float"),
        (f"search?like=0:{'9' * 39}", "bucket:offset"),
        ("search?like=0:%D9%A3", "bucket:offset"),
        (f"records/0/{'9' * 5000}", "offset must be a number"),
        (f"records/{'9' * 5000}/0/json", "bucket must be a number"),
        (f"trajectories/run?field=agent&value={'9' * 30}", "fits 64 bits"),
        ("trajectories/run?field=agent&value=%22%5Cud800%22", "surrogate"),
        ("search?where=nope%20%3E%201", "nope"),
        ("search?where=%3B%20DROP", "where"),
        ("search?like=0:99999999999999999", "there is no record at 0:99999999999999999"),
        ("search?like=77:0", "no bucket 77"),
        ("tail?rate=0", "rate must be"),
        ("trajectories?field=embedding", "cannot be grouped"),
        ("trajectories/run?field=agent&value=nope", "must be JSON"),
        ("versions/compare?first=nope", "there is no tag"),
    ],
)
def test_wrong_parameter_says_what_is_expected(
    console: RunningConsole, path: str, message: str
) -> None:
    reply = console.ask("GET", f"/topics/runs/{path}")
    assert reply.status == 400
    assert message in reply.text.replace("&#39;", "'")


def odd_requests() -> Iterator[str]:
    """Every page of a topic with odd values of its parameters."""
    given = {"search": "text=lock", "run": "field=agent&value=1", "compare": "first=v1"}
    names = [
        "bucket",
        "offset",
        "limit",
        "from",
        "until",
        "time",
        "at",
        "tag",
        "columns",
        "like",
        "vector",
        "k",
        "field",
        "value",
    ]
    for route in routes():
        if "GET" not in (getattr(route, "methods", None) or ()) or "events" in route.path:
            continue
        path = route.path.replace("{topic}", "runs").replace("{bucket}/{offset}", "0/3")
        query = given.get(path.rpartition("/")[2], "")
        for number, name in enumerate(names):
            value = ODD_VALUES[(number + len(path)) % len(ODD_VALUES)]
            yield f"{path}?{query}&{name}={value}"
    for value in ODD_VALUES:
        yield f"/topics/{value}"
        yield f"/topics/runs/records/0/{value}"


def test_odd_address_does_not_cause_a_server_error(unchanged: RunningConsole) -> None:
    failed = [path for path in odd_requests() if unchanged.ask("GET", path).status >= 500]
    assert failed == []


def test_large_form_is_refused(unchanged: RunningConsole) -> None:
    assert unchanged.post("/topics/runs/versions/tags", name="x" * 70_000).status == 400


def test_another_address_needs_the_token(template: Path) -> None:
    with running_console(template, "--host", "0.0.0.0", "--prometheus", PROMETHEUS) as console:
        assert console.token is not None
        assert len(console.token) >= 32
        refused = console.get("/")
        assert (refused.status, refused.headers["location"]) == (303, "/sign-in")
        assert console.get("/", token="wrong").status == 303
        for path in ("/sign-in", "/static/nope", "/sign-in/nope"):
            page = console.get(path).text
            assert str(template) not in page
            assert PROMETHEUS not in page
        assert console.get("/topics/runs/records/0/0/json").status == 303
        assert console.ask("GET", "/", headers={"Host": "evil.example"}).status == 421
        accepted = console.get("/topics/runs", token=console.token)
        assert (accepted.status, accepted.headers["location"]) == (303, "/topics/runs")
        cookie = accepted.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        headers = {"Cookie": cookie.partition(";")[0]}
        page = console.ask("GET", "/", headers=headers)
        assert page.status == 200
        assert str(template) in page.text
        assert PROMETHEUS in page.text
        others = {"Cookie": f'a=b; "broken; x[]={{}}; {headers["Cookie"]}'}
        assert console.ask("GET", "/", headers=others).status == 200
        assert console.post("/sign-in", token="wrong").status == 401
        assert console.post("/sign-in", token=console.token).status == 303
        console.process.send_signal(signal.SIGTERM)
        _, errors = console.process.communicate(timeout=90)
        assert "not encrypted" in errors


def test_number_of_live_tails_is_bounded_and_leaving_the_page_frees_one(
    console: RunningConsole,
) -> None:
    opened = []
    try:
        for _ in range(16):
            opened.append(tail_of(console))
            assert opened[-1].getresponse().readline() == b"event: start\n"
        refused = tail_of(console).getresponse()
        assert refused.status == 400
        assert b"live tails are already open" in refused.read()
    finally:
        for connection in opened:
            connection.close()
    until_true(lambda: tail_of(console).getresponse().status == 200, tries=600, interval=0.2)


def tail_of(console: RunningConsole) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=60)
    connection.request("GET", "/topics/runs/tail/events")
    return connection


def test_options_refuse_an_open_address_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="needs a token"):
        ConsoleOptions(str(tmp_path), host="0.0.0.0")
    for inner in (tmp_path, tmp_path / "backups", tmp_path / "x" / ".." / "y"):
        with pytest.raises(InvalidArgument, match="backups cannot go into the storage folder"):
            ConsoleOptions(str(tmp_path), allow_changes=True, backups=inner)
    with pytest.raises(InvalidArgument, match="http://"):
        ConsoleOptions(str(tmp_path), prometheus="javascript:alert(1)")
    with pytest.raises(InvalidArgument, match="at least 16 characters"):
        ConsoleOptions(str(tmp_path), host="0.0.0.0", token="short")
    with pytest.raises(InvalidArgument, match="printable ASCII"):
        ConsoleOptions(str(tmp_path), host="0.0.0.0", token="密" * 16)
    assert is_loopback("127.0.0.5")
    assert is_loopback("::1")
    assert not is_loopback("192.168.0.1")
    assert not is_loopback("example.org")


def test_printed_address_quotes_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = "a&b=c #%2F+d;e/f 16"
    _print_address(ConsoleOptions(str(tmp_path), token=token))
    address = capsys.readouterr().out.split()[1]
    assert dict(parse_qsl(urlsplit(address).query)) == {"token": token}


def test_missing_folder_and_taken_port_say_what_to_do(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ui", "-s", str(tmp_path / "nope")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["ui", "-s", str(template), "-p", str(taken.getsockname()[1])]) == 1
    assert "choose another --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster-address", "127.0.0.1:0"], "need --seeds"),
        (["--backups", "there"], "--backups needs --allow-changes"),
        (["--query-timeout", "0"], "must be more than 0"),
        (["--query-memory", "0"], "must be more than 0"),
        (["--token", "short"], "at least 16 characters"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    template: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ui", "-s", str(template), "-p", "0", *options]) == 2
    assert message in capsys.readouterr().err


def test_console_without_its_extra_says_which_to_install(template: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "hide = lambda name, *a: None if name == 'uvicorn' else find(name, *a)\n"
        "importlib.util.find_spec = hide\n"
        "from persisting.cli.app import run\n"
        "sys.exit(run(['ui', '-s', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(template)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "needs uvicorn: pip install 'persisting[ui]'" in done.stderr


def test_library_does_not_import_the_console() -> None:
    code = (
        "import sys, persisting, persisting.queue, persisting.cli.app\n"
        "print({'starlette', 'jinja2', 'uvicorn', 'persisting.ui'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 0, id="SIGTERM", marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
    ],
)
def test_signal_stops_the_console(template: Path, number: int, code: int) -> None:
    with running_console(template) as console:
        assert console.get("/").status == 200
        console.process.send_signal(number)
        assert console.process.wait(90) == code

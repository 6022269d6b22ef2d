"""The image, as its files tell it. No image is built here: what can be run of it without one is run."""

from __future__ import annotations

import fnmatch
import itertools
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from deployed import ANY_PORT, ROOT, Dockerfile, Service, environ, run, settings

from sglcache import config, ranks
from sglcache.server.child import KILL_S
from sglcache.server.supervisor import Timing

DOCKERFILE = Dockerfile((ROOT / "Dockerfile").read_text())
IMAGE = DOCKERFILE.image
CONFIG = ROOT / "configs" / "container.toml"


def moved(text: str, tmp_path: Path) -> str:
    """A path of the image, where it lies in the test."""
    for folder in ("/run", "/var/lib"):
        text = text.replace(folder, f"{tmp_path}{folder}")
    return text.replace("/etc/sglcache/sglcache.toml", str(CONFIG))


def environment(tmp_path: Path) -> dict[str, str]:
    """The image's, with its folders in the test's."""
    told = {name: moved(value, tmp_path) for name, value in DOCKERFILE.environment.items() if name != "PATH"}
    for folder in IMAGE.last("VOLUME").command:
        Path(moved(folder, tmp_path)).mkdir(parents=True)
    return environ(told)


def test_every_stage_is_built_on_the_base_that_was_asked_for() -> None:
    image, colon, tag = DOCKERFILE.arguments["BASE"].partition(":")
    assert image
    assert colon
    assert tag != "latest", "which base that is would change under us"
    names: set[str | None] = set()
    for stage in DOCKERFILE.stages:
        assert stage.base == "${BASE}" or stage.base in names, f"FROM {stage.base}"
        names.add(stage.name)
    for copy in (copy for stage in DOCKERFILE.stages for copy in stage.all("COPY")):
        assert copy.flags.get("from") in names | {None}


def test_it_does_not_run_as_root_and_says_so_by_a_number() -> None:
    """A cluster that wants runAsNonRoot can't look a name up."""
    user = DOCKERFILE.resolved(IMAGE.last("USER").text)
    assert user.isdigit()
    assert int(user) > 0
    assert IMAGE.instructions.index(IMAGE.last("USER")) > max(
        IMAGE.instructions.index(each) for each in (*IMAGE.all("RUN"), *IMAGE.all("COPY"))
    ), "what is installed after USER would be the daemon's to write"


def test_what_is_copied_is_there_and_not_ignored() -> None:
    for stage in DOCKERFILE.stages:
        for copy in stage.all("COPY"):
            if "from" in copy.flags:
                continue
            *sources, _ = copy.arguments
            for source in sources:
                assert (ROOT / source).exists(), copy
                assert source == "." or not ignored(source), f"{source} is in .dockerignore"


def test_the_build_gets_what_it_needs_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = ["pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]]
    for pattern in itertools.chain(*project["tool"]["setuptools"]["data-files"].values()):
        found = [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
        assert found, f"{pattern} names nothing"
        wanted += found
    sources = [path for path in (ROOT / "sglcache").rglob("*") if "__pycache__" not in path.parts and path.is_file()]
    for name in (*wanted, *(str(path.relative_to(ROOT)) for path in sources)):
        assert not ignored(name), f"the image would lack {name}"
    for name in (".git/config", ".venv/bin/python", "tests/test_cli.py", "sglcache/__pycache__/cli.cpython-311.pyc"):
        assert ignored(name), f"{name} would be sent to every build"


def ignored(name: str) -> bool:
    """As Docker reads .dockerignore: of the patterns that match the path or a folder above it, the last one says."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = name.split("/")
        above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        candidates = [*above, *parts] if "**/" in line else above
        if any(fnmatch.fnmatchcase(each, pattern) and each.count("/") == pattern.count("/") for each in candidates):
            out = not line.startswith("!")
    return out


def test_its_folders_are_volumes_of_the_users_own() -> None:
    env, volumes = DOCKERFILE.environment, IMAGE.last("VOLUME").command
    assert str(Path(env["SGLCACHE_SOCKET"]).parent) in volumes
    assert f"{env['XDG_STATE_HOME']}/sglcache" in volumes
    (made,) = (run.text for run in IMAGE.all("RUN") if "install --directory" in run.text)
    for folder in volumes:
        assert folder in made.partition("install --directory")[2], f"{folder} would be root's"


def test_its_configuration_is_the_default_but_for_who_can_reach_it() -> None:
    binds = {"events.endpoint": "tcp://*:5557", "events.replay_endpoint": "tcp://*:5657", "http.host": "0.0.0.0"}
    told = config.load(CONFIG)
    assert told == config.load(None, [f"{key}={value}" for key, value in binds.items()])
    ports = {told.events.endpoint.rpartition(":")[2], told.events.replay_endpoint.rpartition(":")[2]}
    assert set(IMAGE.last("EXPOSE").text.split()) == ports | {str(told.http.port)}
    (copy,) = (each for each in IMAGE.all("COPY") if "configs/container.toml" in each.arguments)
    assert copy.arguments[1] == DOCKERFILE.environment["SGLCACHE_CONFIG"]


def test_what_it_starts_serves_and_its_health_check_knows(tmp_path: Path) -> None:
    """ENTRYPOINT, CMD, ENV and HEALTHCHECK, word for word; the ports alone are others."""
    env = environment(tmp_path)
    command = [*IMAGE.last("ENTRYPOINT").command, *IMAGE.last("CMD").command, *settings()]
    check = IMAGE.last("HEALTHCHECK")
    socket = Path(env["SGLCACHE_SOCKET"])
    before = run(check.command, env)
    assert before.returncode == 69, before
    with Service(command, env, tmp_path / "log") as service:
        service.await_health(socket)
        done = run(check.command, env)
        assert (done.returncode, done.stdout) == (0, "ok\n")
        assert run([*IMAGE.last("ENTRYPOINT").command, "ping"], env).returncode == 0
        assert (tmp_path / "var/lib/sglcache/rank-0.json").exists()
        assert sorted(path.suffix for path in socket.parent.iterdir() if path.is_socket()) == [".http", ".sock"]
        assert service.stop() == 0
        assert "drained and stopped" in service.log.read_text()
    assert run(check.command, env).returncode == 69
    assert float(check.flags["timeout"].removesuffix("s")) > ranks.ANSWER_S, "a slow answer would not be heard"


def test_as_the_first_process_of_a_container_it_drains_and_leaves_nobody(tmp_path: Path) -> None:
    """PID 1 has no default for SIGTERM, and the kernel ends what is left in its namespace."""
    unshare = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGTERM"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace is to be had here")
    env = environment(tmp_path)
    inside = ["sh", "-c", 'echo $$ >"$0"; exec "$@"', str(tmp_path / "pid"), "sglcache", "serve", *settings()]
    with Service([*unshare, *inside], env, tmp_path / "log") as service:
        service.await_health(Path(env["SGLCACHE_SOCKET"]))
        assert (tmp_path / "pid").read_text() == "1\n"
        # In there the client's process has a number that nobody in here knows, and the other way round.
        done = run(["sglcache", "replay", "--limit", "20", "--verify"], env)
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 5):
            assert done.returncode == 0, done
        else:
            assert "PID namespace" in done.stderr
        (child,) = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
        os.kill(int(child), 15)
        assert service.process.wait(30) == 0
        assert "drained and stopped" in service.log.read_text()


def test_a_pod_shares_a_folder_and_a_user() -> None:
    yaml = pytest.importorskip("yaml")
    (pod,) = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    spec = pod["spec"]
    (daemon,) = spec["initContainers"]
    (runner,) = spec["containers"]
    assert spec["securityContext"]["runAsUser"] == int(DOCKERFILE.resolved(IMAGE.last("USER").text))
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(spec)
    for container in (daemon, runner):
        assert "runAsUser" not in container["securityContext"], "the daemon serves its own uid alone"
    places = [{mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]} for each in (daemon, runner)]
    socket = DOCKERFILE.environment["SGLCACHE_SOCKET"]
    assert places[0]["control"] == places[1]["control"] == str(Path(socket).parent)
    assert set(places[0].values()) == set(IMAGE.last("VOLUME").command), "the rest of the image is read-only"
    assert {each["name"]: each["value"] for each in runner["env"]} == {"SGLCACHE_SOCKET": socket}
    assert {str(port["containerPort"]) for port in daemon["ports"]} == set(IMAGE.last("EXPOSE").text.split())
    assert spec["terminationGracePeriodSeconds"] > Timing().drain + KILL_S
    asked = told(daemon["args"])
    assert mebibytes(daemon) > host_mib(asked) + 256
    assert {probe for probe in daemon if probe.endswith("Probe")} == {"startupProbe", "livenessProbe", "readinessProbe"}
    assert daemon["livenessProbe"]["httpGet"]["path"] == "/", "one dead rank would end the others"


def told(args: list[str]) -> config.Config:
    assert args[0] == "serve"
    assert set(args[1::2]) == {"--set"}
    return config.load(CONFIG, args[2::2])


def mebibytes(container: dict[str, Any]) -> float:
    limit: str = container["resources"]["limits"]["memory"]
    return float(limit.removesuffix("Gi")) * 1024


def host_mib(asked: config.Config) -> float:
    from sglcache.memory.geometry import Geometry

    return Geometry.of(asked).host_pool_bytes / 2**20


def test_a_test_daemon_binds_to_loopback_alone() -> None:
    assert all("127.0.0.1" in str(value) for key, value in ANY_PORT.items() if key.endswith(("endpoint", "host")))


def test_the_page_names_every_build_argument() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    table = page.partition("| build argument |")[2].partition("\n\n")[0]
    named = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    taken = {each.text.partition("=")[0] for stage in DOCKERFILE.stages for each in stage.all("ARG")}
    assert named == taken | set(DOCKERFILE.arguments)

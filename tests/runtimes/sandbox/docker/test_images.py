"""Images of a real registry: pulled once when they are needed, with a login, and within a bound of the disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded, InvalidConfig
from runtimes.sandbox.docker.engine import DockerEngine
from runtimes.sandbox.docker.images import ImageStore, told_of_pull
from runtimes.sandbox.spec import RegistryLogin
from runtimes.secrets import Secrets
from tests.registry import PASSWORD, USER, LoopbackRegistry, docker

pytestmark = [pytest.mark.docker, pytest.mark.slow]
MIB = 2**20
DEADLINE_S = 60.0


def served(directory: Path, *, login: bool = False) -> LoopbackRegistry:
    """A registry; skipped where there is none, but failed where ``CI=true``."""
    try:
        return LoopbackRegistry(directory, login=login)
    except RuntimeError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def registry(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackRegistry]:
    made = served(tmp_path_factory.mktemp("registry"))
    yield made
    made.stop()


@pytest.fixture
async def engine(docker: str, tmp_path: Path) -> AsyncIterator[DockerEngine]:
    made = DockerEngine.connect(timeout_s=60.0, workers=4)
    yield made
    await made.close()


@dataclass
class EachSecondLater:
    """The time of day, a second later whenever it is asked for."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@dataclass
class Stores:
    """Stores over one engine, and what they have pulled: all of it is removed."""

    engine: DockerEngine
    directory: Path
    made: list[ImageStore] = field(default_factory=list)

    def store(self, **given: object) -> ImageStore:
        options = {"record": self.directory / "images.json", "wall": EachSecondLater(), **given}
        self.made.append(ImageStore(self.engine, **options))  # type: ignore[arg-type]  # a test's own choice
        return self.made[-1]


@pytest.fixture
async def stores(engine: DockerEngine, tmp_path: Path) -> AsyncIterator[Stores]:
    made = Stores(engine, tmp_path)
    yield made
    for store in made.made:
        for state in await store.states():
            if state.pulled:
                with suppress(subprocess.CalledProcessError):
                    docker("rmi", "-f", state.image)
        await store.close()


async def test_an_image_is_pulled_when_it_is_first_needed_and_once(registry: LoopbackRegistry, stores: Stores) -> None:
    image, store = registry.push("tasks/one:1"), stores.store()
    async with asyncio.timeout(DEADLINE_S):
        first, second = await asyncio.gather(store.require(image), store.require(image))
    assert first == second == {"made": "here"}
    (state,) = [state for state in await store.states() if state.image == image]
    assert (state.state, state.pulled, state.kept) == ("present", True, False) and state.size_bytes >= MIB
    registry_gone = stores.store(pulls=1)
    async with registry_gone.held(image) as labels:
        assert labels == {"made": "here"}
        (state,) = [state for state in await registry_gone.states() if state.image == image]
        assert state.kept


async def test_a_pull_that_fails_is_told_in_the_registrys_words(registry: LoopbackRegistry, stores: Stores) -> None:
    store, image = stores.store(), f"{registry.host}/tasks/nothing:1"
    with pytest.raises(InvalidConfig, match=r"(?i)manifest unknown|not found"):
        await store.require(image)
    (state,) = [state for state in await store.states() if state.image == image]
    assert state.state == "failed" and "nothing" in state.problem
    with pytest.raises(CapacityExceeded, match="refused") as caught:
        await store.require("127.0.0.1:9/tasks/one:1")
    assert caught.value.retry_after_s


async def test_a_registry_that_asks_who_pulls_is_told_by_a_secret(
    docker_config: Path, stores: Stores, tmp_path: Path
) -> None:
    closed = served(tmp_path, login=True)
    try:
        closed.login()
        image = closed.push("private/one:1")
        docker("logout", closed.host)
        with pytest.raises(InvalidConfig, match=r"(?i)auth"):
            await stores.store().require(image)
        logins = {closed.host: RegistryLogin(username=USER, password="${secret:registry}")}
        secrets = Secrets(environ={"TANGRAM_SECRET_REGISTRY": PASSWORD})
        assert await stores.store(logins=logins, secrets=secrets).require(image) == {"made": "here"}
        with pytest.raises(InvalidConfig, match="TANGRAM_SECRET_REGISTRY"):
            await stores.store(logins=logins, secrets=Secrets(environ={})).require(f"{image}0")
    finally:
        closed.stop()


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker: str) -> Path:
    """A configuration of docker's client of its own, for its logins."""
    (tmp_path / "docker").mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return tmp_path / "docker"


async def test_beyond_the_bound_what_was_used_least_recently_goes_and_nothing_in_use(
    registry: LoopbackRegistry, stores: Stores
) -> None:
    names = ("function", "contained", "held", "old", "used")
    images = {name: registry.push(f"bound/{name}:1") for name in (*names, "new")}
    store = stores.store(bound_bytes=5 * MIB + MIB // 2)
    for name in names:
        await store.require(images[name])
    store.keep(images["function"])
    container = docker("create", images["contained"], "/x").strip()
    try:
        async with store.held(images["held"]):
            async with store.held(images["used"]):
                pass
            await store.require(images["new"])
        left = {state.image for state in await store.states()}
        assert {name for name in images if images[name] in left} == {"function", "contained", "held", "used", "new"}
    finally:
        docker("rm", container)
    await store.close()
    again = stores.store(bound_bytes=2 * MIB)
    assert {state.image for state in await again.states() if state.pulled} == {
        images[name] for name in ("function", "contained", "held", "used", "new")
    }, "the next gateway knows what was pulled"


async def test_no_more_than_the_bound_are_pulled_at_once(
    registry: LoopbackRegistry, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [registry.push(f"many/{number}:1") for number in range(3)]
    store, going, most = stores.store(pulls=1), 0, 0
    receive: Callable[..., None] = store._receive

    def counted(*given: object) -> None:
        nonlocal going, most
        going += 1
        most = max(most, going)
        receive(*given)
        going -= 1

    monkeypatch.setattr(store, "_receive", counted)
    for image in images:
        store.begin(image)
    await store.settled(images, DEADLINE_S)
    assert most == 1
    assert [state.state for state in await store.states() if state.image in images] == ["present"] * 3


async def test_snapshots_are_not_listed_among_images(engine: DockerEngine, tmp_path: Path) -> None:
    store, snapshot = ImageStore(engine, record=tmp_path / "images.json"), "tangram-snapshot:0123456789ab"
    docker("tag", "tangram-base:bookworm", snapshot)
    try:
        listed = {state.image for state in await store.states()}
    finally:
        docker("rmi", snapshot)
        await store.close()
    assert "tangram-base:bookworm" in listed and snapshot not in listed


async def test_a_container_is_not_had_by_the_name_of_an_image(engine: DockerEngine, tmp_path: Path) -> None:
    made = await engine.call(engine.api.create_container, "tangram-base:bookworm", "true")
    store = ImageStore(engine, record=tmp_path / "images.json")
    try:
        for name in (f"../containers/{made['Id']}", f"a/../../containers/{made['Id']}"):
            with pytest.raises(InvalidConfig, match="no name of an image"):
                await store.require(name)
            with pytest.raises(InvalidConfig, match="no name of an image"):
                store.begin(name)
    finally:
        await engine.call(engine.api.remove_container, made["Id"], force=True)
        await store.close()


@pytest.mark.parametrize(
    ("image", "said", "again"),
    [
        ("127.0.0.1:45031/tasks/nothing:1", "manifest for 127.0.0.1:45031/tasks/nothing:1 not found", False),
        ("hub.example/eof-502:503", "pull access denied for hub.example/eof-502, repository does not exist", False),
        ("hub.example/a:1", "received unexpected HTTP status: 503 Service Unavailable", True),
        ("hub.example/eof:1", 'Get "https://hub.example/v2/": EOF', True),
        ("hub.example/a:1", "dial tcp: lookup hub.example: no such host", True),
    ],
)
def test_a_name_with_the_words_of_a_disturbance_is_none(image: str, said: str, again: bool) -> None:
    error = told_of_pull(image, InvalidConfig(said))
    assert isinstance(error, CapacityExceeded if again else InvalidConfig), error
    assert said in error.message

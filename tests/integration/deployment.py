"""What `docker compose up` and `down` do, on a `Host`: dependencies, health checks, restarts, an orderly end."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.integration.compose_file import Project, Service
from tests.integration.containers import Container
from tests.integration.dockerfile import Image, read_image
from tests.integration.virtual_host import Host

STEP_S = 0.03
RESTART_PAUSE_S = 0.1
MOST_STARTS = 3  # Docker goes on for ever; a test need not
# Images that the compose file takes from elsewhere: what they run, and as whom.
FOREIGN = {
    "prom/prometheus": Image(("prometheus",), user=(65534, 65534), owned=("/prometheus",), workdir="/prometheus"),
}


class Deployment:
    """Services of a project on one host. `up`, `wait`, `down`; used by one thread.

    Named volumes are folders below `volumes`, which several deployments may share. Services whose image is neither
    built by the project nor in `images` are left out, and so is what `leave_out` names.
    """

    def __init__(
        self,
        project: Project,
        host: Host,
        volumes: Path,
        *,
        profiles: tuple[str, ...] = (),
        leave_out: tuple[str, ...] = (),
        images: Mapping[str, Image] = FOREIGN,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-compose-")
        self.host = host
        self.containers: dict[str, Container] = {}
        self._down = False
        self._restarts: dict[str, float] = {}
        self._images = images
        active = project.active(profiles)
        self._built = {service.image: service.build for service in active.values() if service.build}
        for name, service in active.items():
            image = self._image(service)
            if image is not None and name not in leave_out:
                folder = Path(self._folder.name, name)
                self.containers[name] = Container(service, image, host, volumes, folder)

    def _image(self, service: Service) -> Image | None:
        if build := self._built.get(service.image):  # also one that another service builds
            file = Path(build["context"], build["dockerfile"])
            return read_image(file, build["target"], build["args"])
        return self._images.get(service.image.rpartition(":")[0])

    def __getitem__(self, name: str) -> Container:
        return self.containers[name]

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.describe() + "\n")
        for container in self.containers.values():
            container.end()
        self._folder.cleanup()

    def describe(self) -> str:
        return "\n".join(container.describe() for container in self.containers.values())

    # -- what compose does -----------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publishes the ports of all services."""
        for container in self.containers.values():
            for port in container.service.ports:
                self.host.publish(port.published, _target(container, port.target))

    def outside(self, published: int) -> str:
        """Where the test finds a published port."""
        return self.host.proxies[published].address

    def step(self) -> None:
        """Starts what may start, looks after what runs."""
        for container in self.containers.values():
            if container.state == "created":
                if self._may_start(container.service):
                    container.start()
            elif container.look():
                if self._wants_restart(container):
                    if container.starts >= MOST_STARTS:
                        raise AssertionError(f"it ends again and again: {container.describe()}")
                    self._restarts[container.name] = time.monotonic() + RESTART_PAUSE_S
            elif self._restarts.get(container.name, float("inf")) < time.monotonic():
                del self._restarts[container.name]
                container.start()

    def _may_start(self, service: Service) -> bool:
        for name, dependency in service.depends_on.items():
            other = self.containers.get(name)
            if other is None:
                assert not dependency.required, f"{service.name} depends on {name}, which is not there"
                continue
            if dependency.condition == "service_started":
                fulfilled = other.state != "created"
            elif dependency.condition == "service_healthy":
                fulfilled = other.health == "healthy"
                if other.health == "unhealthy" and dependency.required:
                    raise AssertionError(f"{service.name} depends on {name}, which is unhealthy: {other.last_check}")
            else:
                fulfilled = other.state == "exited" and other.status == 0
                assert other.state != "exited" or fulfilled, f"{name} ended with {other.status}\n{other.log()}"
            if not fulfilled and not (not dependency.required and other.health == "unhealthy"):
                return False
        return True

    def _wants_restart(self, container: Container) -> bool:
        policy = container.service.restart
        return not self._down and (
            policy in ("always", "unless-stopped") or (policy == "on-failure" and container.status != 0)
        )

    def wait(self, what: str, done: Callable[[], object], limit_s: float) -> None:
        """Until `done()` is true, while everything is looked after. Raises TimeoutError with a description."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {limit_s:g} s\n{self.describe()}")
            self.step()
            time.sleep(STEP_S)

    def up(self, limit_s: float) -> None:
        """Until every service with a health check is healthy and the others have started or ended well."""

        def settled() -> bool:
            return all(
                container.health == "healthy" if container.service.health else container.state != "created"
                for container in self.containers.values()
            )

        self.wait("services to be healthy", settled, limit_s)

    def down(self, limit_s: float) -> dict[str, int | None]:
        """Stops services in the reverse order of their dependencies; returns the exit statuses by name.

        What does not end within its grace period is killed.
        """
        self._down = True
        left = {name for name, container in self.containers.items() if container.state == "running"}
        deadline = time.monotonic() + limit_s
        stopping: set[str] = set()
        while left:
            for name in sorted(left - stopping):
                if not any(name in self.containers[other].service.depends_on for other in left):
                    stopping.add(name)
                    self.containers[name].signal(getattr(signal, self.containers[name].image.stop_signal))
            for name in sorted(stopping & left):
                if self.containers[name].look():
                    left.discard(name)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(sorted(left))}: still there after {limit_s:g} s\n{self.describe()}")
            time.sleep(STEP_S)
        return {name: container.status for name, container in self.containers.items()}


def _target(container: Container, port: int) -> Callable[[], tuple[str, int] | None]:
    return lambda: (container.address, port) if container.state == "running" else None

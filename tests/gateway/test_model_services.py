"""The costs of model services, by the nodes that have told them."""

from __future__ import annotations

from typing import cast

from gateway.runtime_factory import ModelServices, Runtimes
from manager.config import ServiceSpec
from manager.engine import Engine
from manager.events import Reconfigured


class HeardServices:
    """Stands for the engine, of which only `tell` is asked, and for runtimes, whose models only keep who listens."""

    def __init__(self) -> None:
        self.events: list[Reconfigured] = []
        self.model = self

    def tell(self, event: Reconfigured) -> None:
        self.events.append(event)

    def report_residency(self, node: str, resident: object) -> None: ...


def service(restore_s: float, size_bytes: int = 40) -> ServiceSpec:
    return ServiceSpec(name="s", bytes_by_dop={1: size_bytes}, restore_s_by_dop={1: restore_s})


def test_a_service_is_known_by_the_mean_of_its_nodes_and_by_each_of_them() -> None:
    told = HeardServices()
    services = ModelServices(cast(Runtimes, told), "local")
    services.report_to(cast(Engine, told))
    services.learn("n1", (service(1.0),))
    services.learn("n2", (service(3.0, size_bytes=41),))
    services.learn("n2", (service(3.0, size_bytes=41),))
    assert len(told.events) == 2, "what is known already is not told again"
    found = services.services["s"]
    assert told.events[-1].services == {"s": found}
    assert (found.bytes_by_dop, found.restore_s_by_dop) == ({1: 41}, {1: 2.0})
    assert found.restore_s_by_node == {"n1": {1: 1.0}, "n2": {1: 3.0}}


def test_a_node_that_is_gone_counts_no_more_unless_it_was_the_only_one() -> None:
    told = HeardServices()
    services = ModelServices(cast(Runtimes, told), "local")
    services.report_to(cast(Engine, told))
    services.learn("n1", (service(1.0),))
    services.learn("n2", (service(3.0),))
    services.forget("n1")
    assert services.services["s"].restore_s_by_node == {"n2": {1: 3.0}}
    services.forget("n2")
    services.forget("unknown")
    assert services.services["s"].restore_s_by_node == {"n2": {1: 3.0}}, "what runs still has to be weighed"
    services.learn("n3", (service(5.0),))
    assert services.services["s"].restore_s_by_dop == {1: 5.0}
    services.learn("n2", (service(3.0),))
    services.learn("n3", (service(7.0),))
    assert services.services["s"].restore_s_by_node == {"n3": {1: 7.0}, "n2": {1: 3.0}}, "it has come back"

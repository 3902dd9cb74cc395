"""Room on a Ray cluster: what a process needs, a connection, and placement groups that hold it for a role.

A cluster that has no room is waited for, as it may be growing, and then named with what was asked and what there is.
Without a cluster a Ray of this machine is started for the run; its CPUs are counted generously, as `--cluster local`
does not count them either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotrow.errors import ServiceError, SettingsError
from hotrow.sizes import size_text

_STRATEGY = {"shard": "SPREAD", "trainer": "PACK"}
_AT_ONCE = 4
"""Calls that an actor answers at the same time: one listens, others start, stop and ask."""


@dataclass(frozen=True)
class Needs:
    """What one process is given of its host."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    """Bytes; 0 asks for none."""

    def bundle(self) -> dict[str, float]:
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return {name: amount for name, amount in asked.items() if amount}


def resources_text(resources: Mapping[str, float]) -> str:
    """As in "8 CPUs, 2 GPUs and 64.0 GiB of memory"."""
    count = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    parts = [f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in count.items() if amount]
    if resources.get("memory"):
        parts.append(f"{size_text(resources['memory'])} of memory")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "nothing"


@contextlib.contextmanager
def connect(address: str, needs: Mapping[str, Needs], counts: Mapping[str, int]) -> Iterator[Any]:
    """Ray, connected to "ray://HOST:PORT"; with "ray" to the cluster of this machine, or to one started for the run."""
    try:
        import ray
    except ImportError:
        raise SettingsError("--cluster ray needs Ray. Install it with: pip install 'hotrow[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if address != "ray":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray warns of what it raises right after
                ray.init(address, **quiet)
        else:
            try:
                ray.init("auto", **quiet)
            except ConnectionError:
                asked = sum(needs[role].cpus * count for role, count in counts.items())
                cores = max(os.cpu_count() or 1, int(asked + 1))
                ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
    except ImportError as error:
        raise SettingsError(f"{address} needs Ray's client: pip install 'ray[client]' ({error}).") from None
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ServiceError(
            f"The Ray cluster at {address} cannot be reached: {reason}. An address is ray://HOST:10001; "
            f"`ray status` on the head node says whether it runs. If it wants a token, set RAY_AUTH_MODE=token and "
            f"RAY_AUTH_TOKEN."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


class Room:
    """Places taken from a cluster, until it is left."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._groups = ray, list[Any]()

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:  # ends the actors in it
            self._ray.util.remove_placement_group(group)

    def take(self, role: str, needs: Needs, count: int, actor: type, wait: float) -> list[Any]:
        """So many actors with what they need, which Ray starts again without end."""
        if count == 0:
            return []
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = needs.bundle()
        if not bundle:
            raise SettingsError(f"A {role} needs something of its host; set --{role}-cpus above 0.")
        group = self._ray.util.placement_group([bundle] * count, strategy=_STRATEGY[role])
        self._groups.append(group)
        if not group.wait(wait):
            raise ServiceError(self._no_room(role, bundle, count, wait))
        kind = self._ray.remote(actor)
        return [
            kind.options(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                memory=needs.memory or None,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote()
            for number in range(count)
        ]

    def _no_room(self, role: str, bundle: Mapping[str, float], count: int, wait: float) -> str:
        hosts = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        there = {name: sum(host.get(name, 0) for host in hosts) for name in ("CPU", "GPU", "memory")}
        free = self._ray.available_resources()
        return (
            f"There is no room for {count} {role}{'' if count == 1 else 's'} with {resources_text(bundle)} each, after "
            f"{wait:g} s. The cluster has {resources_text(there)} on {len(hosts)} host{'' if len(hosts) == 1 else 's'}"
            f"; free of it: {resources_text(free)}. Ask for less, or add hosts."
        )

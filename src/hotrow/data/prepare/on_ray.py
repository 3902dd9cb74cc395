"""The same tasks on a Ray cluster, for logs beyond one machine.

Every machine must see the log and the output folder under the same path: a shared file system carries the samples, Ray
only places the tasks and starts those again whose machine was lost, which does no harm, as a task that is done
stays done. A task gets the memory limit divided by the cores of a machine. Ray is started here if no cluster is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotrow.data.prepare.duck import Share
from hotrow.data.prepare.engine import Inline, Limits, raised, told
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.spool import Report
from hotrow.data.prepare.tasks import run_task
from hotrow.errors import SettingsError


class OnRay(Inline):
    """Tasks as Ray tasks of one core each."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        try:
            import ray
        except ImportError:
            raise SettingsError("--engine ray needs Ray. Install it with: pip install 'hotrow[ray]'") from None
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        self._ray = ray

    def run(self, work: Work, stage: str, numbers: Sequence[int], report: Report) -> None:
        ray = self._ray
        machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        cores = max(1, int(max(machines, default=1)))
        at_once = 1 if len(numbers) == 1 else cores
        share = Share(memory=self.limits.memory // at_once, threads=max(1, cores // at_once))
        remote = ray.remote(num_cpus=1, max_retries=3)(_task)
        left, running, failed = iter(numbers), dict[Any, int](), dict[int, dict[str, Any]]()
        while True:
            while not failed and len(running) < 2 * max(1, int(sum(machines))):
                number = next(left, None)
                if number is None:
                    break
                running[remote.remote(str(work.path), stage, number, share.model_dump())] = number
            if not running:
                break
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            number, said = running.pop(done), ray.get(done)
            if "error" in said:
                failed[number] = said
            else:
                report(said["samples"], said["units"])
        if failed:
            raise raised(failed[min(failed)])


def _task(path: str, stage: str, number: int, share: dict[str, Any]) -> dict[str, Any]:
    done = [0, 0]

    def count(samples: int, units: int) -> None:
        done[0], done[1] = done[0] + samples, done[1] + units

    try:
        run_task(Path(path), stage, number, Share.model_validate(share), count)
    except Exception as error:
        return told(error)
    return {"samples": done[0], "units": done[1]}

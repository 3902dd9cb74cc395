"""examples/kuberay: the manifest has the fields that KubeRay knows, and what its job asks for fits on its pods."""

import copy
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from hotrow.cli import app
from hotrow.sizes import parse_size

pytest.importorskip("jsonschema", reason="jsonschema is not installed; Ray brings it: pip install 'hotrow[ray]'")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; Ray brings it: pip install 'hotrow[ray]'")
from jsonschema import Draft202012Validator  # noqa: E402

MANIFEST = Path(__file__).parents[2] / "examples" / "kuberay" / "rayjob.yaml"
SCHEMA = Draft202012Validator(json.loads((Path(__file__).parent / "rayjob.schema.json").read_text()))


@pytest.fixture
def manifest():
    return yaml.safe_load(MANIFEST.read_text())


def groups(manifest):
    return {group["groupName"]: group for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def pod(group):
    return group["template"]["spec"]


def asked(manifest):
    """The options of the job's command, read by the command line itself."""
    program, command, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert (program, command) == ("hotrow", "up")
    return typer.main.get_command(app).commands["up"].make_context("up", words).params


def test_the_manifest_has_the_fields_and_types_of_the_schema(manifest):
    Draft202012Validator.check_schema(SCHEMA.schema)
    assert [f"{error.json_path}: {error.message}" for error in SCHEMA.iter_errors(manifest)] == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job.update(apiVersion="ray.io/v1alpha1"),
        lambda job: job["spec"].update(entryPoint="hotrow up"),
        lambda job: job["spec"].update(shutdownAfterJobFinishes=False),
        lambda job: job["spec"]["rayClusterSpec"].pop("headGroupSpec"),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda job: groups(job)["gpu"].pop("groupName"),
        lambda job: groups(job)["gpu"].update(replicas="2"),
        lambda job: pod(groups(job)["memory"])["containers"][0]["resources"]["limits"].update(memory="64GiB"),
        lambda job: pod(groups(job)["memory"])["containers"][0].pop("image"),
    ],
)
def test_a_manifest_with_a_mistake_is_refused(manifest, spoil):
    spoilt = copy.deepcopy(manifest)
    spoil(spoilt)
    assert spoilt != manifest
    assert not SCHEMA.is_valid(spoilt)


def test_what_the_job_asks_for_fits_on_its_pods(manifest):
    options, found = asked(manifest), groups(manifest)
    assert options["cluster"] == "ray"
    for group, role, count in (("memory", "shard", "shards"), ("gpu", "trainer", "trainers")):
        limits = pod(found[group])["containers"][0]["resources"]["limits"]
        assert found[group]["replicas"] >= options[count]
        assert float(limits["cpu"]) >= options[f"{role}_cpus"]
    memory = {name: size(pod(group)["containers"][0]["resources"]["limits"]["memory"]) for name, group in found.items()}
    wanted = parse_size(options["shard_memory"])
    assert memory["gpu"] < wanted < memory["memory"]  # so that shards go to the pods with memory, and only there
    (rows,) = [volume["emptyDir"] for volume in pod(found["memory"])["volumes"] if "emptyDir" in volume]
    assert wanted <= size(rows["sizeLimit"]) < memory["memory"]
    assert float(pod(found["gpu"])["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) >= options["trainer_gpus"]


def test_every_pod_sees_the_folder_of_the_run_file(manifest):
    folder = str(asked(manifest)["run_file"].parent)
    for group in (manifest["spec"]["rayClusterSpec"]["headGroupSpec"], *groups(manifest).values()):
        spec = pod(group)
        mounted = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        claims = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
        assert mounted[folder] in claims
        assert set(mounted.values()) == {volume["name"] for volume in spec["volumes"]}


def size(quantity):
    """Kubernetes writes Gi where people write GiB."""
    return parse_size(re.sub(r"i$", "iB", quantity))

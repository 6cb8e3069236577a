"""`pw k8s` renders objects that fit Kubernetes' published schemas, and each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pw.cli.deploy import read
from pw.core import installed
from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.operating.deploy import kubernetes
from pw.transport.access.identity import uri_of
from tests.deploy.engines import pw_command

FILE = """
name: lab
islands:
  east: {hosts: 2, devices: 4, platform: cuda, spares: 1}
  west: {hosts: 1, options: {device-memory: 4GiB}}
kubernetes:
  image: registry.example.com/pw:0.1.0
  namespace: ml
  grace: 100
  trust_domain: prod.example.com
  resources: {requests: {cpu: "4"}}
  node_selector: {pool: spot}
  tolerations: [{key: spot, operator: Exists}]
"""
SCHEMAS = "1.30"


@pytest.fixture
def objects(tmp_path: Path) -> dict[tuple[str, str], Any]:
    """The objects by their kinds and names."""
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    rendered = list(yaml.safe_load_all(kubernetes.rendered(read(path))))
    return {(one["kind"], one["metadata"]["name"]): one for one in rendered}


def pod(objects: dict[tuple[str, str], Any], name: str) -> Any:
    return objects["StatefulSet", name]["spec"]["template"]["spec"]


def test_each_part_has_its_objects(objects: dict[tuple[str, str], Any]) -> None:
    names = {kind: sorted(n for k, n in objects if k == kind) for kind, _ in objects}
    assert names == {
        "Certificate": ["lab-client", "lab-controller", "lab-east", "lab-west"],
        "Service": ["lab-controller", "lab-east", "lab-west"],
        "StatefulSet": ["lab-controller", "lab-east", "lab-east-spare", "lab-west"],
        "PodDisruptionBudget": ["lab-east"],
        "NetworkPolicy": ["lab-network"],
    }
    assert objects["StatefulSet", "lab-east"]["spec"]["replicas"] == 2


def test_a_worker_runs_with_its_certificate_and_drains(objects: dict[tuple[str, str], Any]) -> None:
    (container,) = pod(objects, "lab-east")["containers"]
    command = " ".join(container["command"])
    assert "--controller tcp://lab-controller.ml.svc:7777 --island east --island-hosts 2" in command
    assert "--name east/$(POD_NAME) --bind tcp://$(POD_IP):7778" in command
    assert "--drain 85" in command
    assert pod(objects, "lab-east")["terminationGracePeriodSeconds"] == 100
    assert "kill -TERM 1" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    uris = objects["Certificate", "lab-east"]["spec"]["uris"]
    assert uris[0] == uri_of(Role.WORKER, "east", "", "prod.example.com")
    assert uris[1] == "spiffe://prod.example.com/pw/island/east"
    assert "--spare" in pod(objects, "lab-east-spare")["containers"][0]["command"]
    assert "--device-memory 4GiB" in " ".join(pod(objects, "lab-west")["containers"][0]["command"])


def test_what_objects_name_exists(objects: dict[tuple[str, str], Any]) -> None:
    secrets = {
        one["spec"]["secretName"] for (kind, _), one in objects.items() if kind == "Certificate"
    }
    for (kind, _), one in objects.items():
        if kind != "StatefulSet":
            continue
        spec = one["spec"]
        assert ("Service", spec["serviceName"]) in objects
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        mounts = spec["template"]["spec"]["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert volumes["credentials"]["secret"]["secretName"] in secrets


def test_a_file_without_an_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("islands: {east: {hosts: 1}}")
    with pytest.raises(Error, match=r"add kubernetes: \{image: "):
        kubernetes.rendered(read(path))


@pytest.mark.long
def test_objects_fit_the_published_schemas(objects: dict[tuple[str, str], Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    checked = 0
    for (kind, _), one in objects.items():
        if kind != "Certificate":  # of cert-manager
            validator.validate(one, SCHEMAS, strict=True)
            checked += 1
    assert checked == 9
    broken = pod(objects, "lab-west")["containers"][0]
    broken["image"] = 3
    with pytest.raises(validator.ValidationError):
        validator.validate(objects["StatefulSet", "lab-west"], SCHEMAS, strict=True)


@pytest.mark.long
@pytest.mark.processes
def test_the_command_prints_them(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    done = pw_command("k8s", path)
    assert done.stdout.startswith("# Written by pw k8s for the cluster lab")
    image = pw_command("k8s", path, "--container-file").stdout
    wheel = installed.wheel(installed.version(installed.DISTRIBUTION))
    assert image.startswith("FROM python:")
    assert f"COPY {wheel} /tmp/\n" in image
    assert f"/tmp/{wheel}[jax]" in image
    jax = installed.version("jax")
    assert f" 'jax[cuda12]=={jax}' jaxlib=={jax}\n" in image

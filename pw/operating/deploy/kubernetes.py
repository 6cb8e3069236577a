"""Renders a cluster file as objects of Kubernetes: `pw k8s`.

The controller and each island are StatefulSets; cert-manager issues and renews their certificates. A pod that
is deleted or evicted drains its host within its grace period.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from pw.core.errors import Error
from pw.core.installed import wheel
from pw.core.messages.roles import Role
from pw.operating.deploy.cluster_file import ClusterFile, IslandEntry
from pw.operating.deploy.daemons import CONTROLLER, controller_command, worker_command
from pw.transport.access.identity import uri_of

WORKER_PORT = 7778
CREDENTIALS = "/etc/pw/credentials"
HOME = "/var/pw"
USER = 1000
GPUS = {"cuda": "nvidia.com/gpu", "tpu": "google.com/tpu"}
DURATION, RENEW_BEFORE = "168h", "56h"
SLACK_S = 15
"""Seconds of the grace period that are left to end in after a drain."""

Object = dict[str, Any]


def objects(file: ClusterFile) -> list[Object]:
    """Return all objects of a cluster.

    Raises:
        Error: the file names no image, or an island is called as an object of the controller.
    """
    if not file.kubernetes.image:
        raise Error(
            "the cluster file names no image; add kubernetes: {image: registry.example.com/pw:0.1.0}, of a "
            "container that has pw (docs/deploy.md#kubernetes)"
        )
    return list(_objects(file))


def _objects(file: ClusterFile) -> Iterator[Object]:
    if not file.insecure:
        yield _certificate(file, CONTROLLER, Role.CONTROLLER)
        for name in file.islands:
            yield _certificate(file, name, Role.WORKER)
        yield _certificate(file, "client", Role.CLIENT)
    yield _service(file, CONTROLLER, file.controller.port, headless=False)
    port = file.controller.port
    command = controller_command(file, f"tcp://$(POD_IP):{port}", CREDENTIALS)
    yield _stateful_set(file, CONTROLLER, 1, command, port)
    for name, island in file.islands.items():
        yield _service(file, name, WORKER_PORT, headless=True)
        yield _island(file, name, island, spare=False)
        if island.spares:
            yield _island(file, name, island, spare=True)
        if island.workers > 1:
            yield _budget(file, name)
    yield _network_policy(file)


def object_name(file: ClusterFile, part: str) -> str:
    """Return the name of the objects of a part of the cluster."""
    return f"{file.name}-{part}"


def address_of(file: ClusterFile) -> str:
    """Return the controller's address inside of the Kubernetes cluster."""
    name, space = object_name(file, CONTROLLER), file.kubernetes.namespace
    return f"tcp://{name}.{space}.svc:{file.controller.port}"


def _island(file: ClusterFile, name: str, island: IslandEntry, *, spare: bool) -> Object:
    command = worker_command(
        file,
        name,
        address_of(file),
        f"{name}/$(POD_NAME)",
        f"tcp://$(POD_IP):{WORKER_PORT}",
        CREDENTIALS,
        spare=spare,
        drain_s=max(1, file.kubernetes.grace - SLACK_S),
    )
    part, count = (f"{name}-spare", island.spares) if spare else (name, island.size)
    return _stateful_set(file, part, count, command, WORKER_PORT, name, island)


def _meta(file: ClusterFile, part: str) -> Object:
    return {
        "name": object_name(file, part),
        "namespace": file.kubernetes.namespace,
        "labels": _labels(file, part),
    }


def _labels(file: ClusterFile, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "pw",
        "app.kubernetes.io/instance": file.name,
        "app.kubernetes.io/component": part,
    }


def _certificate(file: ClusterFile, part: str, role: Role) -> Object:
    settings = file.kubernetes
    uris = [uri_of(role, part, "operator" if role is Role.CLIENT else "", settings.trust_domain)]
    if role is Role.WORKER:
        uris.append(f"spiffe://{settings.trust_domain}/pw/island/{part}")
    # The keys of the controller stay: sessions of before its restart come back by them.
    rotation = "Never" if role is Role.CONTROLLER else "Always"
    return {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": _meta(file, part),
        "spec": {
            "secretName": object_name(file, part),
            "duration": DURATION,
            "renewBefore": RENEW_BEFORE,
            "uris": uris,
            "usages": ["digital signature", "client auth", "server auth"],
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": rotation},
            "issuerRef": {"name": settings.issuer, "kind": settings.issuer_kind},
        },
    }


def _service(file: ClusterFile, part: str, port: int, *, headless: bool) -> Object:
    spec: Object = {
        "selector": _labels(file, part),
        "ports": [{"name": "pw", "port": port, "targetPort": port}],
    }
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(file, part), "spec": spec}


def _stateful_set(
    file: ClusterFile,
    part: str,
    replicas: int,
    command: list[str],
    port: int,
    island_name: str = "",
    island: IslandEntry | None = None,
) -> Object:
    settings = file.kubernetes
    labels = _labels(file, part)
    variables: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
    ]
    variables_of_pod = {"HOME": HOME, "XDG_CACHE_HOME": f"{HOME}/cache"} | file.environment
    variables += [{"name": name, "value": value} for name, value in variables_of_pod.items()]
    container: Object = {
        "name": "pw",
        "image": settings.image,
        "command": command,
        "env": variables,
        "ports": [{"name": "pw", "containerPort": port}],
        "startupProbe": _probe(2, 60),
        "readinessProbe": _probe(5, 3),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "home", "mountPath": HOME},
            {"name": "shared", "mountPath": "/dev/shm"},
        ],
    }
    volumes: list[Object] = [
        {"name": "home", "emptyDir": {}},
        {"name": "shared", "emptyDir": {"medium": "Memory"}},
    ]
    if not file.insecure:
        mount = {"name": "credentials", "mountPath": CREDENTIALS, "readOnly": True}
        container["volumeMounts"].append(mount)
        secret = object_name(file, island_name or part)
        secret_volume = {"secretName": secret, "defaultMode": 0o440}
        volumes.append({"name": "credentials", "secret": secret_volume})
    pod: Object = {
        "securityContext": {
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": settings.grace if island else 30,
        "containers": [container],
        "volumes": volumes,
    }
    if island is not None:
        container["resources"] = _resources(file, island)
        # The host drains at the first signal; a second one, of Kubernetes itself, would end it.
        wait = "kill -TERM 1; while kill -0 1; do sleep 1; done"
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", wait]}}}
        same = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
        spread = [{"weight": 100, "podAffinityTerm": same}]
        pod["affinity"] = {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": spread}
        }
        if settings.node_selector:
            pod["nodeSelector"] = settings.node_selector
        if settings.tolerations:
            pod["tolerations"] = settings.tolerations
    else:
        container["livenessProbe"] = _probe(10, 6)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(file, part),
        "spec": {
            "serviceName": object_name(file, island_name or part),
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _probe(period: int, failures: int) -> Object:
    return {
        "tcpSocket": {"port": "pw"},
        "periodSeconds": period,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def _resources(file: ClusterFile, island: IslandEntry) -> Object:
    resources = {kind: dict(amounts) for kind, amounts in file.kubernetes.resources.items()}
    if device := GPUS.get(island.platform):
        resources.setdefault("limits", {}).setdefault(device, island.devices)
    return resources


def _budget(file: ClusterFile, part: str) -> Object:
    """One host at a time may be evicted: its data has to go somewhere."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(file, part),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(file, part)}},
    }


def _network_policy(file: ClusterFile) -> Object:
    """Pods of the cluster reach each other on all ports, as XLA's own traffic needs; others only pw's ports."""
    cluster = {"app.kubernetes.io/name": "pw", "app.kubernetes.io/instance": file.name}
    ports = [
        {"protocol": "TCP", "port": port} for port in sorted({file.controller.port, WORKER_PORT})
    ]
    clients = {"podSelector": {"matchLabels": {"pw-client": file.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(file, "network") | {"labels": cluster},
        "spec": {
            "podSelector": {"matchLabels": cluster},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": cluster}}]},
                {"from": [clients], "ports": ports},
            ],
        },
    }


def rendered(file: ClusterFile) -> str:
    """Return all objects as one YAML file."""
    import yaml

    head = f"# Written by pw k8s for the cluster {file.name}; clients use {address_of(file)}\n"
    return head + str(yaml.safe_dump_all(objects(file), sort_keys=False))


def container_file(version: str, jax: str, platform: str = "cpu") -> str:
    """Return a Containerfile of an image with these versions of pw and jax, built beside the wheel of pw."""
    plugin = "[cuda12]" if platform == "cuda" else ""
    file = wheel(version)
    packages = shlex.join([f"/tmp/{file}[jax]", f"jax{plugin}=={jax}", f"jaxlib=={jax}"])
    return (
        "FROM python:3.12-slim\n"
        f"COPY {file} /tmp/\n"
        f"RUN pip install --no-cache-dir {packages}\n"
        f"RUN useradd --uid {USER} --create-home --home-dir {HOME} pw\n"
        f"USER {USER}\n"
    )

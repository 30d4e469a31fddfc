"""socket_encryption=on: there is nothing to read on the wire, and nothing that is changed on it becomes a value."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from harness.socket_ranks import free_port, started

MARK = b"values that others might read..."  # the bytes of eight float32
SOCKETS = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
ON = {**SOCKETS, "RINGTRAIN_SOCKET_ENCRYPTION": "on"}

SUMS = """
for size in (1, 7, 1000, 40_000, 3_000_001):
    own = (np.arange(size) % 97).astype("float32")
    for step in range(int(os.environ.get("STEPS", 1))):
        total = hvd.allreduce(own * (hvd.rank() + 1) + step, op=hvd.Sum, name=f"sum {size}")
        assert (total == own * sum(range(1, hvd.size() + 1)) + hvd.size() * step).all(), size
"""
PROGRAM = f"""
import os
import numpy as np, ringtrain as hvd
from ringtrain import kvstore

hvd.init()
marked = np.frombuffer({MARK!r} * 2000, "float32")
assert (hvd.broadcast(marked if hvd.rank() == 0 else np.zeros_like(marked), 0) == marked).all()
assert (hvd.allgather(marked) == np.tile(marked, hvd.size())).all()
{SUMS}
if "STORE" in os.environ:
    store = kvstore.create("dist_sync")
    store.init("key", marked)
    out = np.zeros_like(marked)
    store.pull("key", out=out)
    assert (out == marked).all()
    store.push("key", marked)
    store.pull("key", out=out)
    assert (out == marked * hvd.size()).all()
print("done")
"""


@contextlib.contextmanager
def all_that_is_sent():
    """Every packet of the loopback meanwhile, as one text."""
    try:
        sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
    except PermissionError:
        pytest.skip("only root may read the packets of others")
    sniffer.bind(("lo", 0))
    sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 28)
    sniffer.settimeout(0.1)
    packets, ended = [], threading.Event()

    def read():
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                packets.append(sniffer.recv(1 << 17))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield packets
    finally:
        ended.set()
        reader.join()
        sniffer.close()


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize("encryption", ["off", "on"])
def test_nothing_can_be_read_on_the_wire(encryption, with_store, tmp_path):
    variables = {**SOCKETS, "RINGTRAIN_SOCKET_ENCRYPTION": encryption}
    if with_store:
        variables |= {"RINGTRAIN_KV_SERVERS": "1", "STORE": "yes"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with all_that_is_sent() as packets:
        command = [sys.executable, "-m", "ringtrain.run", "-np", "3", sys.executable, str(program)]
        job = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("done") == (2 if with_store else 3)
    assert sum(map(len, packets)) > 1 << 22
    assert any(MARK in packet for packet in packets) == (encryption == "off")


# --- somebody on the way ----------------------------------------------------------------------------------------------

# Each rank is reached through a proxy of its own, which treats some of what comes as it is told to, by chance.
THROUGH_PROXIES = f"""
import os, random, socket, sys, threading, time
import numpy as np, ringtrain as hvd
from ringtrain.job import sockets
from ringtrain.job.world import Address

draw = random.Random(os.environ["SEED"] + os.environ["RINGTRAIN_RANK"])
faults, most = [], 3

def treated(data):
    # A fault in a hundred pieces; the first ones may be of a handshake.
    if len(faults) == most or draw.random() > 0.01 or len(data) < 8:
        return [data]
    kind, cut = os.environ["FAULT"], draw.randrange(1, len(data))
    faults.append(kind)
    if kind == "changed":
        return [data[:cut] + bytes([data[cut] ^ 1 << draw.randrange(8)]) + data[cut + 1:]]
    if kind == "repeated":
        return [data, data]
    if kind == "reordered":
        return [data[cut:], data[:cut]]
    return [data[:cut], None]  # cut off

def carry(one, other):
    try:
        while data := one.recv(1 << draw.randrange(10, 17)):
            for part in treated(data):
                if part is None:
                    raise OSError
                other.sendall(part)
    except OSError:
        pass
    for end in (one, other):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def serve(server, target):
    while True:
        near, _ = server.accept()
        far = socket.create_connection(target)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=carry, args=ends, daemon=True).start()

class Listeners(sockets.Listeners):
    def open(self, hosts):
        proxied = []
        for address in super().open(hosts):
            server = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=serve, args=(server, tuple(address)), daemon=True).start()
            proxied.append(Address("127.0.0.1", server.getsockname()[1]))
        return proxied

sockets.Listeners = Listeners
hvd.init()
{SUMS}
print("done after", len(faults), "faults")
"""


@pytest.mark.parametrize("fault", ["changed", "repeated", "reordered", "cut"])
def test_bytes_that_are_changed_on_their_way_are_never_a_value(fault, tmp_path):
    seed = str(random.randrange(1 << 30))
    print(f"seed {seed}")
    with started(THROUGH_PROXIES, 3, tmp_path, FAULT=fault, SEED=seed, STEPS="8", **ON) as ranks:
        texts = ranks.outputs()
    faults = sum(int(text.split("done after ")[1].split()[0]) for text in texts)
    assert faults > 2, texts


PLAIN = """
import os, socket, struct
import numpy as np, ringtrain as hvd
from ringtrain.job import session

hvd.init()
network = session._joined().network
for is_sealed, answer in ((1, 48), (0, 0)):
    with socket.create_connection(network.addresses[1 - hvd.rank()][0], timeout=20) as sock:
        sock.sendall(b"ringtrn\\x04" + struct.pack("<iiii", hvd.rank(), 1 - hvd.rank(), 0, is_sealed) + os.urandom(16))
        handle = hvd.allreduce_async(np.ones(1), name=f"so that the other one looks {is_sealed}")
        assert len(sock.recv(48, socket.MSG_WAITALL)) == answer, is_sealed
        hvd.synchronize(handle)
print("done")
"""


def test_a_rank_that_encrypts_takes_no_plain_connection(tmp_path):
    with started(PLAIN, 2, tmp_path, **ON) as ranks:
        assert all(text.endswith("done\n") for text in ranks.outputs())


# --- who cannot encrypt -----------------------------------------------------------------------------------------------


def test_ranks_that_do_not_agree_are_told_so(tmp_path):
    which = "'off' if os.environ['RINGTRAIN_RANK'] == '0' else 'on'"
    program = f"import os, ringtrain as hvd\nhvd.init(socket_encryption={which})"
    with started(program, 2, tmp_path, **SOCKETS) as ranks:
        texts = ranks.outputs([1, 1])
    for text in texts:
        assert "SettingsError: socket_encryption must be the same on all ranks: rank 0 has off, rank 1 has on" in text


@pytest.mark.ranks(2, initialised=False)
def test_mpi_is_not_encrypted():
    import ringtrain as hvd

    with pytest.raises(ValueError, match="encrypts sockets, and nothing that MPI sends: leave out network=mpi"):
        hvd.init(network="mpi", socket_encryption="on")
    hvd.init(socket_encryption="on")
    assert not hvd.mpi_enabled()
    hvd.shutdown()


def test_without_libcrypto_an_error_names_the_package(tmp_path):
    """In a mount namespace where it is an empty file. All ranks are told."""
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    paths = {line.split("=> ")[1] for line in found.splitlines() if "libcrypto.so" in line}
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("no mount namespace can be made here")
    hide = " && ".join(f"mount --bind /dev/null {path}" for path in sorted({os.path.realpath(path) for path in paths}))
    command = [sys.executable, "-c", "import ringtrain as hvd; hvd.init()"]
    place = f"127.0.0.1:{free_port()}"
    ranks = [
        subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", f'{hide} && exec "$@"', "sh", *command] if rank else command,
            env={**os.environ, **ON, "RINGTRAIN_RENDEZVOUS": place, "RINGTRAIN_SIZE": "2", "RINGTRAIN_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    for text in texts:
        assert "RingtrainError: rank 1: socket_encryption=on needs OpenSSL's libcrypto" in text and "libssl3" in text

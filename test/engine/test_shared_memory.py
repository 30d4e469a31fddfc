"""Segments in /dev/shm while signals, slow pages, other processes and the files of others are in the way."""

import os
import shlex
import subprocess
import sys
import time

import pytest
from harness.ringrun_job import needs_mpi, ringrun
from preloaded import library

pytestmark = needs_mpi

# Pages come when the file PAGES_MAY_COME is there, or after PAGES_TAKE_MS. As with the tmpfs of an older kernel, none
# come if a signal does so meanwhile.
SLOW_PAGES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int posix_fallocate(int file, off_t offset, off_t bytes) {
  int (*real)(int, off_t, off_t) = dlsym(RTLD_NEXT, "posix_fallocate");
  const struct timespec pause = {0, 1000000};
  for (int ms = atoi(getenv("PAGES_TAKE_MS")); ms > 0 && access(getenv("PAGES_MAY_COME"), F_OK) != 0; --ms)
    if (nanosleep(&pause, NULL) != 0) return errno;
  return real(file, offset, bytes);
}
"""

# No page is left from when NO_PAGES is set.
FULL = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

int posix_fallocate(int file, off_t offset, off_t bytes) {
  int (*real)(int, off_t, off_t) = dlsym(RTLD_NEXT, "posix_fallocate");
  return getenv("NO_PAGES") ? ENOSPC : real(file, offset, bytes);
}
"""

# A process that opens a file of another one finds that it has ended, and that one with a file as large has its number.
REUSED_PID = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, "open");
  const int theirs = real(path, flags, mode);
  int pid;
  struct stat status;
  if (theirs < 0 || sscanf(path, "/proc/%d/fd/", &pid) != 1 || fstat(theirs, &status) != 0) return theirs;
  const int other = real("/dev/shm", O_TMPFILE | O_RDWR, 0600);
  if (ftruncate(other, status.st_size) != 0) return -1;
  close(theirs);
  return other;
}
"""

PROGRAM = """
import os, signal, sys, threading, warnings
import numpy as np
import ringtrain as hvd
from ringtrain import _core

warnings.simplefilter("error")  # "ringtrain.empty gives ordinary memory"

def check_sum(array):
    array[...] = 1
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    assert (array == hvd.size()).all() and _core.last_operations()[-1]["group"] == "shm"
"""


def test_a_timer_of_the_script_does_not_keep_a_job_from_shared_memory(tmp_path):
    program = """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
hvd.init()
array = hvd.empty(100_000)
signal.setitimer(signal.ITIMER_REAL, 0)
check_sum(array)
"""
    require_success(program, LD_PRELOAD=library(tmp_path, SLOW_PAGES), PAGES_TAKE_MS="20", PAGES_MAY_COME="never")


def test_a_full_dev_shm_is_told_with_the_remedy(tmp_path):
    program = """
hvd.init()
os.environ["NO_PAGES"] = "1"
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert hvd.empty(100_000).size == 100_000
said = str(told[0].message)
assert "No space left on device; give it more memory, in a container by --shm-size" in said, said
assert "RINGTRAIN_SHARED_MEMORY=off" in said, said
"""
    require_success(program, LD_PRELOAD=library(tmp_path, FULL))


def test_nobody_waits_for_the_pages_of_another_thread(tmp_path):
    program = """
hvd.init()
array = hvd.empty(100_000)
os.environ.update(PAGES_TAKE_MS="20000", PAGES_MAY_COME=sys.argv[1] + str(hvd.rank()))
has_begun, has_ended = threading.Event(), threading.Event()

def take():
    has_begun.set()
    hvd.empty(1000)
    has_ended.set()

thread = threading.Thread(target=take)
thread.start()
has_begun.wait()
for _ in range(10):
    check_sum(array)
assert not has_ended.is_set()
open(os.environ["PAGES_MAY_COME"], "w").close()
thread.join()
"""
    preloaded = library(tmp_path, SLOW_PAGES)
    require_success(program, str(tmp_path / "gate"), LD_PRELOAD=preloaded, PAGES_TAKE_MS="0", PAGES_MAY_COME="never")


SETS = """
def kilobytes():
    files = [os.stat(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if "/dev/shm/#" in where(fd)]
    return sum(file.st_blocks for file in files) // 2

def where(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""

hvd.init()
large = np.arange(1 << 17, dtype=np.float64)
"""


def test_a_process_set_takes_little_memory_before_its_first_large_operation():
    program = """
before = kilobytes()
pairs = [hvd.add_process_set([one, other]) for one in range(4) for other in range(one)]
own = [pair for pair in pairs if pair.included()]
hvd.barrier()
of_sets = kilobytes() - before
assert of_sets < len(own) * 100, of_sets
used = next(pair for pair in own if pair.ranks in ([0, 1], [2, 3]))
for _ in range(2):
    assert (hvd.allreduce(np.ones(8), op=hvd.Sum, process_set=used) == 2).all()
    assert (hvd.allreduce(large, op=hvd.Sum, process_set=used) == 2 * large).all()
    assert (hvd.allgather(large, process_set=used) == np.concatenate([large, large])).all()
    root = used.ranks[1]
    assert (hvd.broadcast(large + hvd.rank(), root, process_set=used) == large + root).all()
grown = kilobytes() - before - of_sets
hvd.barrier()
assert 100 < grown < 2048, grown
"""
    require_success(SETS + program, ranks=4)


def test_a_process_set_for_which_no_memory_is_left_says_so_on_all_ranks(tmp_path):
    program = """
small = hvd.add_process_set([0, 1])
hvd.barrier()
if hvd.rank() == 1:
    os.environ["NO_PAGES"] = "1"
try:
    if hvd.rank() == 2:
        hvd.allreduce(np.ones(1), name="last")
    hvd.allreduce(large, op=hvd.Sum, process_set=small)
except hvd.RingtrainError as error:
    assert "cannot reserve 256 KB of shared memory" in str(error) and "--shm-size" in str(error), error
else:
    raise AssertionError("no error")
"""
    require_success(SETS + program, ranks=3, LD_PRELOAD=library(tmp_path, FULL))


def test_memory_of_another_process_is_not_taken_for_that_of_a_rank(tmp_path):
    program = """
hvd.init()
check_sum(hvd.empty(100_000))
with open("/proc/self/maps") as maps:
    is_by_name = any("/dev/shm/ringtrain-" in line for line in maps)
assert is_by_name == (hvd.rank() != 0)  # rank 0 has made it
"""
    require_success(program, LD_PRELOAD=library(tmp_path, REUSED_PID))


def test_shared_memory_of_others_stays(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root with the right to mount: other jobs must not find these files")
    target = tmp_path / "target"
    target.write_bytes(bytes(4096))
    hour_ago = time.time() - 3600
    os.utime(target, (hour_ago, hour_ago))
    job = shlex.join([sys.executable, "-m", "ringtrain.run", "-np", "2", sys.executable, "-c", PROGRAM + "hvd.init()"])
    script = f"""
mount -t tmpfs tmpfs /dev/shm && cd /dev/shm || exit 1
ln -s {target} ringtrain-link
for name in own foreign; do head -c 4096 /dev/zero > ringtrain-$name; touch --date @{hour_ago} ringtrain-$name; done
chown nobody ringtrain-foreign
{job} && ls
"""
    result = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    names = [name for name in result.stdout.split() if name.startswith("ringtrain-")]
    assert names == ["ringtrain-foreign", "ringtrain-link"], result.stdout + result.stderr


def require_success(program, *arguments, ranks=2, **environment):
    job = ringrun("-np", str(ranks), "python", "-c", PROGRAM + program, *arguments, **environment)
    assert job.returncode == 0 and "warning" not in job.stderr, job.stdout + job.stderr

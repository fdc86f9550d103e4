"""Runs one command as a container: namespaces, a root of its own, limits, a user without rights, an init.

Started by containers.py with the standard library alone, as root. One JSON line on stdin says what to do. It answers
`unshared` when its namespaces exist, waits for a line (the network is connected meanwhile), and answers `started PID`
with the process's number outside once its command runs, in a root of its own. Whatever happens to whoever started it
happens to the container: the kernel kills it, and with the last process the namespaces go.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
LAST_CAPABILITY = 40
MNT_DETACH = 2
FIRST_KEPT = 64  # descriptors below, but for the three of every process, are closed in the container
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # a system call that the C library has no function for
DEVICES = ("null", "zero", "full", "random", "urandom")
# What programs of this machine look up below /etc; the rest of it is none of the container's business.
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl", "nsswitch.conf", "localtime", "mime.types")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    """A folder or file of this machine at a place that is made for it."""
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    _mount(source, target, "", MS_BIND | MS_REC)
    if read_only:
        _mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY)


def _make_root(spec: dict[str, Any], root: str) -> None:
    _mount("", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID, "mode=755")
    # First, since the checkout may lie below one of them
    for name, mode in (("proc", "555"), ("dev", "755"), ("tmp", "1777"), ("run", "755")):
        Path(root, name).mkdir()
        if name != "proc":
            _mount("tmpfs", f"{root}/{name}", "tmpfs", MS_NOSUID, f"mode={mode}")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_symlink():
            Path(root, name).symlink_to(Path("/", name).readlink())
        elif Path("/", name).exists():
            _bind(f"/{name}", f"{root}/{name}")
    for place in ("/usr", "/sys", *spec["shared"]):
        _bind(place, root + place)
    for name in ETC:
        if Path("/etc", name).exists():
            _bind(f"/etc/{name}", f"{root}/etc/{name}")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    Path(root, "dev/shm").mkdir()
    _mount("shm", f"{root}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={spec['shm_bytes']}")
    for path in spec["owned"]:  # what the image gives to its user
        Path(root + path).mkdir(parents=True, exist_ok=True)
        os.chown(root + path, spec["uid"], spec["gid"])
    for path, target in spec["links"].items():
        _bind(target, root + path)
    for mount in spec["mounts"]:
        _bind(mount["source"], root + mount["target"], read_only=mount["read_only"])
    for path, content in spec["files"].items():
        Path(root + path).parent.mkdir(parents=True, exist_ok=True)
        Path(root + path).write_text(content)


def _enter_root(root: str) -> None:
    os.chdir(root)
    Path("old").mkdir()
    if _libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"old") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root failed")
    os.chdir("/")
    _call("umount2", b"/old", MNT_DETACH)
    Path("/old").rmdir()
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)


def _limit(kind: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(kind, (soft, hard))
    except ValueError:  # Docker may raise a limit; this machine's root need not have that right
        _, most = resource.getrlimit(kind)
        within = [most if most >= 0 and not 0 <= each <= most else each for each in (soft, hard)]
        resource.setrlimit(kind, (within[0], within[1]))


def _give_up_rights(spec: dict[str, Any]) -> None:
    for name, limits in spec["ulimits"].items():
        _limit(getattr(resource, f"RLIMIT_{name.upper()}"), *limits)
    if spec["drop_capabilities"]:
        for capability in range(LAST_CAPABILITY + 1):
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(spec["gid"], spec["gid"], spec["gid"])
    os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    if spec["no_new_privileges"]:
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _execute(spec: dict[str, Any]) -> NoReturn:
    try:
        os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])
    except OSError as error:
        sys.stderr.write(f"exec {spec['argv'][0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _run_init(spec: dict[str, Any], runs: int) -> NoReturn:
    """As Docker's init: the command is a child, signals are passed on to it, and orphans are reaped."""
    signals = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _execute(spec)
    os.close(runs)
    while True:
        number = signal.sigwait(signals)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            if pid == 0:
                break


def _be_container(spec: dict[str, Any], root: str, runs: int) -> NoReturn:
    """`runs`: a descriptor that closes itself when the command takes the place of this program."""
    try:
        _make_root(spec, root)
        _enter_root(root)
        _call("sethostname", spec["hostname"].encode(), len(spec["hostname"]))
        os.chdir(spec["workdir"])
        _give_up_rights(spec)
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        nothing = os.open("/dev/null", os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)  # both go where the logs go
        os.closerange(3, FIRST_KEPT)
        if spec["init"]:
            _run_init(spec, runs)
        _execute(spec)
    except BaseException as error:
        sys.stderr.write(f"container: {error}\n")
        sys.stderr.flush()
        os._exit(125)


def main() -> int:
    """Ends with the status of the container's first process; 125 when it could not be made."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    spec = json.loads(sys.stdin.readline())
    root = spec["root"]
    namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID
    if spec["network"]:
        descriptor = os.open(spec["network"], os.O_RDONLY)
        _call("setns", descriptor, CLONE_NEWNET)
        os.close(descriptor)
    else:
        namespaces |= CLONE_NEWNET
    _call("unshare", namespaces)
    print("unshared", flush=True)
    if sys.stdin.readline() != "go\n":
        return 125
    os.umask(0o022)
    read, write = os.pipe()
    runs = fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, FIRST_KEPT)
    os.close(write)
    child = os.fork()
    if child == 0:
        _be_container(spec, root, runs)
    os.close(runs)
    os.read(read, 1)  # nobody writes: until its command runs, or it has ended
    print(f"started {child}", flush=True)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

"""Confines itself, then runs Python code: `python -I guard.py LIMITS`, with the code on standard input. See
`sandbox.py`.

Standard library only: it runs alone, in a process of its own.

Decision: locks of the kernel, none of which needs root. Namespaces: no network but an empty one, no process but its
own, a disk of its own in memory. Landlock: nothing can be read but the interpreter and the system's libraries, nothing
written but that disk. Seccomp: no further process (the limit on their number does not hold root), and none of the
calls by which one gets out. Limits: time, memory, size of files. What one lets through another holds.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
ALL = (1 << 15) - 1
"""Every right to files that the second version of Landlock knows of, and truncation, which the third added."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
LEAST_VERSION = 3
PR_SET_SECCOMP = 22
LOAD, JUMP_EQUAL, JUMP_ANY, RETURN = 0x20, 0x15, 0x45, 0x06
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
CLONE_THREAD, CLONE3 = 0x00010000, 435
CALLS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 56, (57, 58, 101, 165, 250, 272, 298, 308, 321, 323, 425)),
    "aarch64": (0xC00000B7, 220, (117, 40, 219, 97, 241, 268, 280, 282, 425)),
}
"""For each architecture: its number, that of clone, and of fork, vfork (where there are), ptrace, mount, keyctl,
unshare, perf_event_open, setns, bpf, userfaultfd and io_uring_setup."""
TIMED_OUT = 124
"""Exit status, as of `timeout`."""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    limits = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read()
    die_with_parent()
    enter_namespaces(limits["directory"], limits["disk_mb"])
    inner = os.fork()
    if inner:
        return awaited(inner, limits["seconds"])
    die_with_parent()
    os.chdir(limits["directory"])
    limit(limits)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    shut_files(limits["directory"])
    shut_calls()
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        return 1
    return 0


def awaited(inner: int, seconds: float) -> int:
    """Wait for the first process of a namespace; its exit status, as in a shell. When it ends, the others there die."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(inner, os.WNOHANG)
        if found:
            ended = os.waitstatus_to_exitcode(status)
            return ended if ended >= 0 else 128 - ended
        if time.monotonic() > end:
            os.kill(inner, signal.SIGKILL)
            os.waitpid(inner, 0)
            return TIMED_OUT
        time.sleep(0.005)


def version() -> int:
    """The version of Landlock here; below 1 where there is none."""
    return int(libc.syscall(CREATE_RULESET, None, 0, 1))


def enter_namespaces(directory: str, disk_mb: int) -> None:
    """Raises OSError where the kernel does not let this user."""
    user, group = os.getuid(), os.getgid()
    call(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC), "unshare")
    for file, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(content)
    options = f"size={disk_mb}m,nr_inodes=4096".encode()
    call(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None), "mount")  # changes stay in here
    call(libc.mount(b"tmpfs", directory.encode(), b"tmpfs", 0x2 | 0x4, options), "mount")


def shut_files(directory: str) -> None:
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    asked = struct.pack("=Q", ALL)
    rules = call(libc.syscall(CREATE_RULESET, asked, len(asked), 0), "landlock_create_ruleset")
    allowed = [(path, READ) for path in (*SYSTEM, sys.prefix, sys.base_prefix)]
    allowed += [(path, READ_FILE | WRITE_FILE) for path in DEVICES] + [(directory, ALL)]
    for path, rights in allowed:
        if not Path(path).exists():
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        held = rights if Path(path).is_dir() else rights & ~READ_DIR
        rule = struct.pack("=Qi", held, opened)
        call(libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
        os.close(opened)
    call(libc.syscall(RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


def shut_calls() -> None:
    """Raises OSError for a processor whose calls are not known here."""
    if os.uname().machine not in CALLS:
        raise OSError(0, f"calls of {os.uname().machine} are not known")
    architecture, clone, refused = CALLS[os.uname().machine]
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for number in refused:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    program += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]  # libc then takes clone
    program += [(JUMP_EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (JUMP_ANY, 1, 0, CLONE_THREAD)]
    program += [(RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(packed, len(packed))
    asked = struct.pack("@HP", len(program), ctypes.addressof(held))
    call(libc.prctl(PR_SET_SECCOMP, 2, asked, 0, 0), "seccomp")


def limit(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, limits["seconds"] + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def call(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    sys.exit(main())

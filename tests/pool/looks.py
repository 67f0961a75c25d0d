# Looks for a secret in every place a kernel can reach. The secret is given with each byte
# incremented, and compared with incremented data, so this process does not contain it itself.
# Prints `found PLACE` and `looked KIND TIMES`.
import ctypes
import os
import re
import socket
import stat

RAISED = bytes((byte + 1) % 256 for byte in range(256))
FILES = 50_000
BYTES = 1 << 20
PIECE = 4 << 20
found, looked = [], {}


def look(kind, place, data):
    looked[kind] = looked.get(kind, 0) + 1
    if SHIFTED in data.translate(RAISED):
        found.append(kind + " " + place)


def memory():
    with open("/proc/self/maps") as maps:
        spans = [(line.split("-", 1)[0], re.split("[- ]", line, maxsplit=2)[1:], line) for line in maps]
    with open("/proc/self/mem", "rb", 0) as mem:
        for begin, (end, rest), line in spans:
            at, end = int(begin, 16), int(end, 16)
            while rest.startswith("r") and at < end:
                try:
                    mem.seek(at)
                    look("memory", line.split()[-1], mem.read(min(end - at, PIECE + len(SHIFTED))))
                except (OSError, OverflowError, ValueError):
                    break
                at += PIECE


def files():
    seen = 0
    for folder, folders, names in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys", "usr", "opt", "nix")]
        for name in folders + names:
            seen += 1
            if seen > FILES:
                return found.append("more files than are looked at, at " + folder)
            file(os.path.join(folder, name))


def file(path):
    look("names", path, os.fsencode(path))
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            look("links", path, os.fsencode(os.readlink(path)))
            return
        for name in os.listxattr(path):
            look("xattrs", path, os.fsencode(name) + os.getxattr(path, name))
        if stat.S_ISREG(mode):
            with open(path, "rb") as opened:
                look("files", path, opened.read(BYTES))
    except OSError:
        looked["closed"] = looked.get("closed", 0) + 1


def told(kind, path):
    try:
        with open(path, "rb") as opened:
            data = opened.read(BYTES)
    except OSError:
        return b""
    look(kind, path, data)
    return data


def processes():
    for process in filter(str.isdigit, os.listdir("/proc")):
        for kind in ("environ", "cmdline", "comm", "maps", "mountinfo", "status"):
            told(kind, f"/proc/{process}/{kind}")
        for kind in ("cwd", "root", "exe"):
            try:
                look(kind, process, os.fsencode(os.readlink(f"/proc/{process}/{kind}")))
            except OSError:
                pass
        try:
            for number in os.listdir(f"/proc/{process}/fd"):
                leads = os.readlink(f"/proc/{process}/fd/{number}")
                look("descriptors", leads.split(SHIFTED.decode("latin-1"))[0][:12], os.fsencode(leads))
        except OSError:
            pass


def objects():
    for kind in ("shm", "msg", "sem"):
        if told("sysvipc", "/proc/sysvipc/" + kind).count(b"\n") > 1:
            found.append("sysvipc " + kind + " in the list")
    for line in told("unix", "/proc/net/unix").splitlines():
        if SHIFTED in line.translate(RAISED):
            found.append("unix @")
    for name in ("locks", "keys", "net/tcp", "net/netlink"):
        told("lists", "/proc/" + name)
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, number in [("shm", libc.shmget(KEY, 0, 0)), ("msg", libc.msgget(KEY, 0)), ("sem", libc.semget(KEY, 0, 0))]:
        if number >= 0:
            found.append("sysvipc " + kind + " by its key")


def by_name():
    secret = bytes((byte - 1) % 256 for byte in SHIFTED)
    if ctypes.CDLL(None, use_errno=True).mq_open(b"/" + secret, os.O_RDONLY) >= 0:
        found.append("queue")
    for place, family, address in [
        ("abstract", socket.AF_UNIX, b"\0" + secret),
        ("listens", socket.AF_INET, ("127.0.0.1", PORT)),
    ]:
        with socket.socket(family) as asks:
            asks.settimeout(5)
            if asks.connect_ex(address) == 0:
                found.append(place)


memory()
for name, value in list(globals().items()):
    look("variables", name, repr(value)[:10_000].encode())
for name, value in os.environ.items():
    look("environment", name, os.fsencode(value))
files()
processes()
objects()
by_name()
for place in found:
    print("found", place)
for kind, times in looked.items():
    print("looked", kind, times)

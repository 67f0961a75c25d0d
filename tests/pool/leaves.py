# Leaves SECRET in every place a kernel can reach; prints the places that accepted it, by their
# names in looks.py.
import ctypes
import os
import socket
import subprocess

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
kept, left = [], []


def leave(place, what):
    try:
        kept.append(what())
        left.append(place)
    except OSError as error:
        print("not", place, error)


def called(result):
    if result in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def written(path):
    with open(path, "w") as file:
        file.write(SECRET)


def shared_memory():
    shared = called(libc.shmget(KEY, 4096, 0o1600))
    ctypes.memmove(called(libc.shmat(shared, None, 0)), SECRET.encode(), len(SECRET))


def messages():
    queue = called(libc.msgget(KEY, 0o1600))
    message = (ctypes.c_char * 64)(1, 0, 0, 0, 0, 0, 0, 0, *SECRET.encode()[:56])
    called(libc.msgsnd(queue, message, 56, 0))


def named_queue():
    queue = called(libc.mq_open(b"/" + SECRET.encode(), os.O_CREAT | os.O_RDWR, 0o600, None))
    called(libc.mq_send(queue, SECRET.encode(), len(SECRET), 0))


def memory_file():
    file = os.memfd_create("kept-" + SECRET)
    os.write(file, SECRET.encode())


def listens(family, address):
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    return listener


def runs():
    return subprocess.Popen(["/bin/sh", "-c", "sleep 600; :", SECRET], env={"KEPT": SECRET})


for folder in ["/workspace", "/tmp", "/dev/shm", "/var/tmp", "/run", os.path.expanduser("~/.cache")]:
    if folder.endswith(".cache"):
        os.makedirs(folder)
    # A directory may be a link to another.
    leave("files " + os.path.realpath(folder) + "/kept", lambda: written(folder + "/kept"))
leave("names /tmp/", lambda: os.mkdir("/tmp/" + SECRET))
leave("links /workspace/link", lambda: os.symlink(SECRET, "/workspace/link"))
leave("xattrs /workspace/kept", lambda: os.setxattr("/workspace/kept", "user.kept", SECRET.encode()))
leave("names /dev/shm/", lambda: called(libc.shm_open(SECRET.encode(), os.O_CREAT | os.O_RDWR, 0o600)))
leave("sysvipc shm", shared_memory)
leave("sysvipc msg", messages)
leave("sysvipc sem", lambda: called(libc.semget(KEY, 1, 0o1600)))
leave("queue", named_queue)
leave("descriptors /memfd:", memory_file)
leave("abstract", lambda: listens(socket.AF_UNIX, "\0" + SECRET))
leave("unix @", lambda: None if "abstract" in left else called(-1))
leave("listens", lambda: listens(socket.AF_INET, ("127.0.0.1", PORT)))
leave("cmdline", runs)
leave("environ", lambda: None if "cmdline" in left else called(-1))
leave("environment KEPT", lambda: os.environ.__setitem__("KEPT", SECRET))
leave("variables SECRET", lambda: SECRET)
leave("memory", lambda: SECRET)
for place in left:
    print("left", place)

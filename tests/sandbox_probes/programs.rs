//! Real programs work inside.

use super::Starter;

#[track_caller]
fn works(script: &str, prints: &str) {
    for starter in Starter::all() {
        starter.shell(script).prints(prints);
    }
}

#[test]
fn shells_work_in_sandbox() {
    works("bash -c 'cat <(echo a) && (echo b & wait) && echo ${BASH_VERSION:0:1}'", "a\nb\n5");
    works("seq 1000 | sort -rn | head -1; find /usr/bin -name env; awk 'BEGIN{print 6*7}'", "1000\n/usr/bin/env\n42");
    works("echo $HOME $USER $TMPDIR $(whoami) $(hostname) $(pwd)", "/workspace guest /tmp guest kernel /workspace");
    works(
        "echo a | tee /dev/stderr > /dev/stdout 2>/dev/null; echo x > /var/tmp/y && cat /tmp/y; tty || true",
        "a\nx\nnot a tty",
    );
    works(
        "tar cf a.tar /etc/hosts 2>/dev/null && tar xf a.tar && gzip a.tar && zcat a.tar.gz | wc -c | tr -d ' '",
        "10240",
    );
}

#[test]
fn git_works_in_sandbox() {
    works(
        "git init -q r && cd r && git config user.name x && git config user.email x@y && echo a > f && git add f \
         && git commit -qm one && git branch b && git log --format=%s && git clone -q . ../c && ls ../c",
        "one\nf",
    );
}

#[test]
fn compilers_work_in_sandbox() {
    works(
        "printf '#include <stdio.h>\\n#include <pthread.h>\\nvoid*f(void*x){return x;}int main(){pthread_t t;pthread_create(&t,0,f,0);\
         pthread_join(t,0);puts(\"built\");}' > a.c && gcc -O1 -o a a.c -lpthread && ./a",
        "built",
    );
}

#[test]
fn python_works_in_sandbox() {
    let script = "
import asyncio, json, sqlite3, subprocess, tempfile, threading, time, ctypes, select, pwd
import multiprocessing as m, concurrent.futures as c
def double(x): return x * 2
if __name__ == '__main__':
    print(pwd.getpwuid(os.getuid()).pw_name)
    t = threading.Thread(target=lambda: print('thread')); t.start(); t.join()
    print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout.strip())
    print(m.get_context('fork').Pool(2).map(double, [1, 2]))
    print(list(c.ThreadPoolExecutor(4).map(double, [3])))
    print(asyncio.run(asyncio.wait_for(asyncio.sleep(0, 'async'), 5)))
    q = m.Queue(); q.put(5); print(q.get())
    with tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').write('y')
    d = sqlite3.connect('a.db'); d.execute('pragma journal_mode=wal'); d.execute('create table t(a)'); print('db')";
    let prints = "guest\nthread\nchild\n[2, 4]\n[6]\nasync\n5\ndb";
    for starter in Starter::all() {
        starter.python(script).prints(prints);
        // Needs a file, since the server imports the main module again.
        let file = "cat > s.py <<'E'\nimport multiprocessing as m\ndef f(x): return x * 2\n\
                    if __name__ == '__main__':\n    for k in ('forkserver', 'spawn'):\n        \
                    with m.get_context(k).Pool(2) as p: print(p.map(f, [1, 2]))\nE\n/usr/bin/python3 s.py";
        starter.shell(file).prints("[2, 4]\n[2, 4]");
    }
}

#[test]
fn node_works_in_sandbox() {
    if !std::path::Path::new("/usr/bin/node").exists() {
        return;
    }
    let script = "const {Worker} = require('worker_threads'); const http = require('http'); const cp = require('child_process'); \
        console.log(cp.execSync('echo child').toString().trim()); require('fs').writeFileSync('x', 'y'); \
        new Worker(\"require('worker_threads').parentPort.postMessage(7)\", {eval: true}).on('message', n => { console.log(n); \
        const s = http.createServer((q, r) => r.end('hello')).listen(0, () => http.get({port: s.address().port}, r => \
        r.on('data', d => { console.log(String(d)); process.exit(0); }))); });";
    for starter in Starter::all() {
        starter.probe(&[], &["/usr/bin/node", "-e", script]).prints("child\n7\nhello");
    }
}

#[test]
fn loopback_network_works() {
    works(
        "echo hi > f && (python3 -m http.server 8123 > /dev/null 2>&1 &) ; \
         for i in $(seq 150); do curl -sf http://localhost:8123/f && break; sleep 0.3; done",
        "hi",
    );
}

#[test]
fn sqlite_works_in_sandbox() {
    works(
        "sqlite3 a.db 'pragma journal_mode=wal; create table t(a); insert into t values(42); select a from t'",
        "wal\n42",
    );
}

#[test]
fn private_pseudo_terminals() {
    for starter in Starter::all() {
        starter
            .python("import pty; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['/bin/sh', '-c', 'tty'])))")
            .prints("/dev/pts/0");
    }
}

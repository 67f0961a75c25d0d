//! The same programs in the language of each engine.

use ryokan::core::engine::EngineName;

/// Code with the same effect in each language.
pub struct Dialect {
    pub engine: EngineName,
    /// Writes `hi`.
    pub hi: &'static str,
    /// Fails ...
    pub fails: &'static str,
    /// ... with this status.
    pub fails_with: i32,
    /// Is not a valid program.
    pub wrong: &'static str,
    /// Is an incomplete program.
    pub begun: &'static str,
    /// Sets `x` to 41.
    pub set: &'static str,
    /// Changes `x`.
    pub spoils: &'static str,
    /// Writes `x`.
    pub show: &'static str,
    /// Exits with 3.
    pub leaves: &'static str,
    /// Writes 1, 2 and 3 on lines, and waits after each for a file `go`.
    pub slowly: &'static str,
    /// Sleeps for long.
    pub sleeps: &'static str,
    /// Is busy forever.
    pub loops: &'static str,
    /// Writes its standard input.
    pub reads: &'static str,
    /// The output of that without input.
    pub reads_nothing: &'static str,
    /// Writes the environment variable ONCE.
    pub env: &'static str,
    /// The output of that without the variable.
    pub env_absent: &'static str,
    /// Defines a function.
    pub function: &'static str,
    /// Calls the function; writes `called you`.
    pub calls: &'static str,
    /// Changes to a new directory `sub`.
    pub goes: &'static str,
    /// Writes the working directory.
    pub where_: &'static str,
    /// Makes a variable `remarkable`.
    pub long_name: &'static str,
    /// Code that completes to that name.
    pub completes: &'static str,
    /// Leaves `/bin/sleep 86421` running after its end.
    pub job: &'static str,
    /// Creates state that cannot be saved ...
    pub unsaved: &'static str,
    /// ... with this key.
    pub unsaved_key: &'static str,
}

impl Dialect {
    /// The dialect of an engine.
    pub const fn of(engine: EngineName) -> Dialect {
        match engine {
            EngineName::Kaish => KAISH,
            EngineName::Bash => BASH,
            EngineName::Python => PYTHON,
            EngineName::Node => NODE,
        }
    }
}

const KAISH: Dialect = Dialect {
    engine: EngineName::Kaish,
    hi: "echo hi",
    fails: "/bin/sh -c 'exit 7'",
    fails_with: 7,
    wrong: "for in do",
    begun: "if true; then",
    set: "x=41",
    spoils: "x=0",
    show: "echo $x",
    leaves: "exit 3",
    slowly: "for i in 1 2 3; do echo $i; /bin/sh -c 'until test -e go; do sleep 0.05; done'; done",
    sleeps: "sleep 30",
    loops: "while true; do y=1; done",
    reads: "cat",
    reads_nothing: "",
    env: "/bin/sh -c 'echo ${ONCE-none}'",
    env_absent: "none",
    function: "greet() { echo \"called $1\"; }",
    calls: "greet you",
    goes: "mkdir -p /workspace/sub; cd /workspace/sub",
    where_: "pwd",
    long_name: "remarkable=1",
    completes: "echo $remar",
    job: "/bin/sleep 86421 &",
    // Everything else in a kaish session can be saved.
    unsaved: "for n in 1 2; do /usr/bin/head -c 40000000 /dev/zero > \"/v/blobs/large$n\"; done",
    unsaved_key: "file/v/blobs/large2",
};

const BASH: Dialect = Dialect {
    engine: EngineName::Bash,
    wrong: "for in do; fi",
    loops: "while :; do y=1; done",
    env: "echo \"${ONCE-none}\"",
    unsaved: "exec 7< /etc/hosts",
    unsaved_key: "descriptor/7",
    ..KAISH
};

const PYTHON: Dialect = Dialect {
    engine: EngineName::Python,
    hi: "print('hi')",
    fails: "1 / 0",
    fails_with: 1,
    wrong: "for in x:",
    begun: "if True:",
    set: "x = 41",
    spoils: "x = 0",
    show: "print(x)",
    leaves: "import sys; sys.exit(3)",
    slowly: "import os, time\nfor i in (1, 2, 3):\n    print(i, flush=True)\n    while not os.path.exists('go'): time.sleep(0.05)",
    sleeps: "import time; time.sleep(30)",
    loops: "while True: pass",
    reads: "import sys\ntry: print(sys.stdin.read(), end='')\nexcept StdinNotGiven: print('none')",
    reads_nothing: "none",
    env: "import os; print(os.environ.get('ONCE', 'none'))",
    env_absent: "none",
    function: "def greet(who): print('called', who)",
    calls: "greet('you')",
    goes: "import os; os.makedirs('/workspace/sub', exist_ok=True); os.chdir('/workspace/sub')",
    where_: "import os; print(os.getcwd())",
    long_name: "remarkable = 1",
    completes: "print(remar",
    job: "import subprocess; child = subprocess.Popen(['/bin/sleep', '86421'])",
    unsaved: "numbers = (n for n in range(3))",
    unsaved_key: "var/numbers",
};

const NODE: Dialect = Dialect {
    engine: EngineName::Node,
    hi: "console.log('hi')",
    fails: "throw new Error('no')",
    fails_with: 1,
    wrong: "for (in x) {}",
    begun: "if (true) {",
    set: "let x = 41",
    spoils: "x = 0",
    show: "console.log(x)",
    leaves: "process.exit(3)",
    slowly: "for (const i of [1, 2, 3]) {\n  console.log(i)\n  while (!require('fs').existsSync('go')) await new Promise(done => setTimeout(done, 50))\n}",
    sleeps: "await new Promise(done => setTimeout(done, 30000))",
    loops: "while (true) {}",
    reads: "process.stdout.write(require('fs').readFileSync(0))",
    reads_nothing: "",
    env: "console.log(process.env.ONCE ?? 'none')",
    env_absent: "none",
    function: "function greet(who) { console.log('called', who) }",
    calls: "greet('you')",
    goes: "require('fs').mkdirSync('/workspace/sub', { recursive: true }); process.chdir('/workspace/sub')",
    where_: "console.log(process.cwd())",
    long_name: "let remarkable = 1",
    completes: "console.log(remar",
    job: "let child = require('child_process').spawn('/bin/sleep', ['86421'])",
    unsaved: "let later = new Promise(() => {})",
    unsaved_key: "var/later",
};

//! Tests over whole configuration files, including that `config.example.toml` is complete and
//! correct.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::core::info::McpTransport;
use crate::core::pattern::Pattern;
use crate::mcp::allow::ServerEntry;

const FILE: &str = "/etc/ryokan/config.toml";
const EXAMPLE: &str = include_str!("../../config.example.toml");

fn parse(text: &str) -> Result<Config, Vec<Problem>> {
    Config::parse(text, Path::new(FILE))
}

/// Problems as lines, without the file's name.
fn problems(text: &str) -> Vec<String> {
    let problems = parse(text).expect_err("the case must be refused");
    problems.iter().map(|problem| problem.to_string().replacen(FILE, "", 1)).collect()
}

#[test]
fn example_config_is_default() {
    let defaults = check::check(Config::default()).expect("the defaults pass their own check");
    assert_eq!(parse(""), Ok(defaults.clone()));
    assert_eq!(parse(EXAMPLE), Ok(defaults.clone()));
    assert_eq!(Config::default(), defaults);
    assert_eq!((defaults.limits.kernels, defaults.limits.clients), (20_000, 2_000));
    assert!(defaults.mcp.servers.is_empty());
}

/// The example with every key enabled: `#key = …` and `#[section]` lose their `#`, prose (`# …`)
/// stays.
fn activated() -> String {
    let switch = |line: &'static str| match line.strip_prefix('#') {
        Some(rest) if !rest.starts_with(' ') => rest,
        _ => line,
    };
    EXAMPLE.lines().map(switch).collect::<Vec<_>>().join("\n")
}

#[test]
fn example_values_match_defaults() {
    let mut config = parse(&activated()).expect("every key of the example is right");
    let entry = |name: &str, transport, variable: &str| ServerEntry {
        name: name.into(),
        transport,
        pass_env: vec![variable.into()],
        kernels: vec![Pattern::new("*")],
        timeout: Server::default().timeout,
        max_instances: Server::default().max_instances,
    };
    let files = McpTransport::Stdio {
        command: "mcp-server-filesystem".into(),
        args: vec!["/srv/shared".into()],
        env: vec![("FILES_TOKEN".into(), "${FILES_TOKEN}".into())],
    };
    let search = McpTransport::Http {
        url: "https://mcp.example.org/mcp".into(),
        headers: vec![("Authorization".into(), "Bearer ${SEARCH_TOKEN}".into())],
    };
    let servers: Vec<_> = std::mem::take(&mut config.mcp).entries().collect();
    assert_eq!(servers, [entry("files", files, "FILES_TOKEN"), entry("search", search, "SEARCH_TOKEN")]);
    let queue = config.sources.remove("queue").expect("it is shown");
    let argv = |verb: &str| vec!["/usr/local/bin/queue".to_owned(), verb.to_owned()];
    let Source { timeout, max_size, .. } = Source::default();
    let shown = [&queue.freeze, &queue.capture, &queue.thaw, &queue.restore, &queue.revision].map(Clone::clone);
    assert_eq!(shown, ["pause", "dump", "resume", "load", "digest"].map(argv));
    assert_eq!((queue.timeout, queue.max_size), (timeout, max_size));
    let main = config.postgres.remove("main").expect("it is shown");
    assert_eq!(main.stop, ["/usr/bin/systemctl", "--user", "stop", "postgres-main"].map(str::to_owned));
    assert_eq!(main.timeout, PostgresServer::default().timeout);
    let shop = config.rebuild.remove("shop").expect("it is shown");
    let run = ["/usr/local/bin/shop", "rebuild"].map(str::to_owned);
    assert_eq!((shop.run, shop.timeout), (run.to_vec(), Rebuild::default().timeout));
    assert_eq!(config, Config::default());
}

#[test]
fn invalid_sources_are_refused() {
    let source = |body: &str| problems(&format!("[sources.x]\n{body}"));
    let both = "capture = [\"/c\"]\nrestore = [\"/r\"]\n";
    for (body, part) in [
        ("", "sources.x.capture: a program is required"),
        ("capture = [\"c\"]\nrestore = [\"/r\"]", "sources.x.capture: \"c\" is not an absolute path"),
        (&*format!("{both}freeze = [\"/f\"]"), "sources.x.thaw: a program is required"),
        (&format!("{both}thaw = [\"/t\"]"), "sources.x.freeze: a program is required"),
        (&format!("{both}timeout = \"0s\""), "sources.x.timeout: a program's time is above zero"),
        (&format!("{both}max_size = \"0\""), "sources.x.max_size: it is above zero"),
    ] {
        let found = source(body).join("\n");
        assert!(found.contains(part), "{body}: {found}");
    }
    assert!(parse(&format!("[sources.x]\n{both}")).is_ok());
}

#[test]
fn invalid_postgres_servers_are_refused() {
    let server = |body: &str| problems(&format!("[postgres.x]\n{body}"));
    let whole = "data = \"/d\"\nprograms = \"/p\"\nconnection = \"dbname=d\"\nstart = [\"/s\"]\n";
    for (body, part) in [
        ("", "postgres.x.data: an absolute path is required"),
        ("data = \"/a$b\"", "postgres.x.data: a path here has no quotes"),
        (whole, "postgres.x.stop: a program is required"),
        ("connection = \"dbname=d password=x\"", "postgres.x.connection: a password is not taken"),
        (&*format!("{whole}timeout = \"0s\""), "postgres.x.timeout: a program's time is above zero"),
    ] {
        let found = server(body).join("\n");
        assert!(found.contains(part), "{body}: {found}");
    }
    assert!(parse(&format!("[postgres.x]\n{whole}stop = [\"/s\"]")).is_ok());
    // A restore of one would exchange the data of the other.
    for (data, overlaps) in [("/d", true), ("/d/e", true), ("/", true), ("/de", false)] {
        let whole = format!("{whole}stop = [\"/s\"]\n");
        let text = format!("[postgres.x]\n{whole}[postgres.y]\n{}", whole.replace("\"/d\"", &format!("{data:?}")));
        assert_eq!(parse(&text).is_err(), overlaps, "{data}");
        assert!(!overlaps || problems(&text).join("\n").contains("postgres.y.data: it overlaps"), "{data}");
    }
}

#[test]
fn invalid_rebuilds_are_refused() {
    let rebuild = |body: &str| problems(&format!("[rebuild.x]\n{body}"));
    let whole = "repository = \"/r\"\nrun = [\"/p\"]\n";
    for (body, part) in [
        ("run = [\"/p\"]", "rebuild.x.repository: an absolute path is required"),
        ("repository = \"/r\"", "rebuild.x.run: a program is required"),
        ("repository = \"/r\"\nrun = [\"p\"]", "rebuild.x.run: \"p\" is not an absolute path"),
        (&*format!("{whole}timeout = \"0s\""), "rebuild.x.timeout: a program's time is above zero"),
    ] {
        let found = rebuild(body).join("\n");
        assert!(found.contains(part), "{body}: {found}");
    }
    assert!(parse(&format!("[rebuild.x]\n{whole}")).is_ok());
}

fn keys(prefix: &str, table: &toml::Table, out: &mut BTreeSet<String>) {
    for (name, value) in table {
        let key = format!("{prefix}{name}");
        match value {
            toml::Value::Table(inner) if !key.ends_with(".env") && !key.ends_with(".headers") => {
                keys(&format!("{key}."), inner, out);
            }
            _ => {
                out.insert(key);
            }
        }
    }
}

#[test]
fn example_lists_every_key() {
    let table = |text: &str| text.parse::<toml::Table>().expect("valid TOML");
    let mut every = Config::default();
    let full = Server {
        command: Some("c".into()),
        args: Some(Vec::new()),
        url: Some("u".into()),
        env: Some([("A".to_owned(), "1".to_owned())].into()),
        headers: Some([("A".to_owned(), "1".to_owned())].into()),
        ..Server::default()
    };
    every.mcp.servers.insert("x".into(), full);
    every.postgres.insert("main".into(), PostgresServer::default());
    every.sources.insert("queue".into(), Source::default());
    every.rebuild.insert("shop".into(), Rebuild::default());
    let (mut known, mut shown) = (BTreeSet::new(), BTreeSet::new());
    keys("", &table(&toml::to_string(&every).expect("serialisable")), &mut known);
    keys("", &table(&activated()), &mut shown);
    let shown: BTreeSet<String> = shown
        .iter()
        .map(|key| key.replace("servers.files.", "servers.x.").replace("servers.search.", "servers.x."))
        .collect();
    assert_eq!(shown, known);
    // Every key is preceded by a comment.
    let lines: Vec<&str> = EXAMPLE.lines().collect();
    for pair in lines.windows(2) {
        let is_key = |line: &str| line.starts_with('#') && !line.starts_with("# ") && line.contains(" = ");
        assert!(!is_key(pair[1]) || pair[0].starts_with("# ") || pair[1].contains("SEARCH_TOKEN"), "{:?}", pair[1]);
    }
}

#[test]
fn effective_config_round_trips() {
    for text in
        [EXAMPLE.to_owned(), activated(), "[defaults]\nmemory=33554433\ncpus=0.25\nidle_timeout=\"never\"".into()]
    {
        let config = parse(&text).expect("valid");
        assert_eq!(parse(&config.to_toml()), Ok(config));
    }
}

#[test]
fn pool_sizes_adjust_together() {
    use crate::core::engine::EngineName::{Kaish, Python};
    // pool_size, max_pool_size and min_idle of kaish and of Python.
    for (text, kaish, python) in [
        ("pool_size = 0", [0, 10, 0], [0, 10, 0]),
        ("pool_size = 1", [1, 10, 1], [1, 10, 1]),
        ("pool_size = 12", [12, 12, 2], [12, 12, 2]),
        ("max_pool_size = 1", [1, 1, 1], [1, 1, 1]),
        ("max_idle_time = \"1m\"", [3, 10, 2], [3, 10, 2]),
        ("[pool.engines.python]\npool_size = 1", [3, 10, 2], [1, 10, 1]),
        ("[pool.engines.python]\npool_size = 12", [3, 10, 2], [12, 12, 2]),
        ("[pool.engines.python]\nmax_pool_size = 2", [3, 10, 2], [2, 2, 2]),
        ("pool_size = 0\n[pool.engines.python]\npool_size = 2", [0, 10, 0], [2, 10, 0]),
    ] {
        let pools = parse(&format!("[pool]\n{text}")).expect(text).pool;
        let sizes = |engine| {
            let rules = pools.of(engine);
            [rules.pool_size, rules.max_pool_size, rules.min_idle]
        };
        assert_eq!((sizes(Kaish), sizes(Python)), (kaish, python), "{text}");
    }
}

#[test]
fn problems_name_line_and_key() {
    for (text, wanted) in [
        (
            "[defaults]\nmemroy = \"1G\"",
            &[":2: defaults.memroy: unknown key (did you mean memory? possible: engine, memory"][..],
        ),
        ("[default]\n", &[":1: default: unknown key (did you mean defaults? possible: defaults, limits"]),
        (
            "\n[defaults]\nengine = \"pyhton\"",
            &[
                ":3: defaults.engine: \"pyhton\" is not possible (did you mean python? possible: kaish, python, bash, node)",
            ],
        ),
        ("[defaults]\nmemory = \"lots\"", &[":2: defaults.memory: \"lots\" is not a size"]),
        ("[upkeep]\nprepared_copies = 257", &[":2: upkeep.prepared_copies: more than 256"]),
        ("[defaults]\nmemory = \"1M\"", &[":2: defaults.memory: memory of 1 MiB is outside"]),
        (
            "[defaults]\nidle_timeout = 5",
            &[":2: defaults.idle_timeout: invalid type: integer `5`, expected a duration, for example \"5m\""],
        ),
        ("[defaults]\nidle_timeout = \"0s\"", &[":2: defaults.idle_timeout: a duration above zero"]),
        ("[limits]\nclients = 0", &[":2: limits.clients: 0 is out of range (possible: 1 to 2000)"]),
        ("[pool]\npool_size = 1\nmin_idle = 2", &[":3: pool.min_idle: min_idle 2 is more than pool_size 1"]),
        ("[pool]\npool_size = 3\nmax_pool_size = 2", &[":2: pool.pool_size: pool_size 3 is more than max_pool_size 2"]),
        ("[pool]\npool_size = 1000", &[":2: pool.pool_size: pool_size 1000 is more than 256"]),
        (
            "[pool]\nmin_idle = 5\nmax_exec_count = 0\nmax_uptime = \"0s\"",
            &[
                ":2: pool.min_idle: min_idle 5",
                ":3: pool.max_exec_count: max_exec_count",
                ":4: pool.max_uptime: max_uptime",
            ],
        ),
        (
            "[pool]\npool_size = 300\n[pool.engines.bash]\npool_size = 300\n[pool.engines.node]\nmin_idle = 1",
            &[":2: pool.pool_size: pool_size 300", ":4: pool.engines.bash.pool_size: pool_size 300"],
        ),
        ("[limits]\nclients = -1", &[":2: limits.clients: invalid value"]),
        ("defaults = 5", &[":1: defaults: invalid type"]),
        (
            "[defaults]\nnet = \"host\"\n[sandbox]\nnet_host_allowed = false",
            &[":2: defaults.net: \"host\" is forbidden"],
        ),
        ("[sandbox]\nworker_user = \"root\"", &[":2: sandbox.worker_user: root cannot run workers"]),
        ("[sandbox]\nsystem_paths = [\"/nix\", \"opt\"]", &[":2: sandbox.system_paths: path \"opt\" must be absolute"]),
        ("[sandbox]\nmap_owner = [\"/\"]", &[":2: sandbox.map_owner: path \"/\" must be absolute"]),
        ("[sandbox]\ndeny_paths = [\".ssh\"]", &[":2: sandbox.deny_paths: \".ssh\" must start with"]),
        ("[sandbox]\nallow_degraded = [\"Land Lock\"]", &[":2: sandbox.allow_degraded: no layer \"Land Lock\" can be"]),
        ("[sandbox]\nallow_degraded = [\"memory\", \"foo\"]", &[":2: sandbox.allow_degraded: no layer \"foo\" can be"]),
        ("[daemon]\nlog_level = \"ryokan=loud\"", &[":2: daemon.log_level: "]),
        ("[daemon]\nlog_level = \"loud\"", &[":2: daemon.log_level: \"loud\" is no level (error, warn"]),
        ("[daemon]\nlog_level = \"ryokan=debug, loud\"", &[":2: daemon.log_level: \"loud\" is no level"]),
        (
            "[daemon]\ndurability = \"disk\"",
            &[":2: daemon.durability: \"disk\" is not possible (possible: process, power)"],
        ),
        ("[microvm]\nvmm = \"xen\"", &[":2: microvm.vmm: \"xen\" is not possible (possible: auto, qemu, firecracker)"]),
        ("[microvm]\ntemplate_max_age = \"5ms\"", &[":2: microvm.template_max_age: at least a second is required"]),
        (
            "[microvm]\ntemplate_refresh_interval = \"10ms\"",
            &[":2: microvm.template_refresh_interval: at least a second is required"],
        ),
        ("[microvm]\nfirecracker = \"bin/fc\"", &[":2: microvm.firecracker: \"bin/fc\" is no absolute path"]),
        ("[engines.pyhton]\n", &[":1: engines.pyhton: unknown key (did you mean python?"]),
        ("[engines.python]\ncommand = \"bin/python\"", &[":2: engines.python.command: \"bin/python\" depends on"]),
        ("a = 1\na = 2", &[":2: duplicate key"]),
        ("[defaults\n", &[":1: "]),
        // All problems at once, in the file's order.
        (
            "[limits]\nkernels = 0\n[defaults]\nmemroy = 1\npids = \"many\"\ncpus = 0\nopen_files = 1",
            &[
                ":2: limits.kernels",
                ":4: defaults.memroy",
                ":5: defaults.pids",
                ":6: defaults.cpus",
                ":7: defaults.open_files",
            ],
        ),
    ] {
        let got = problems(text);
        assert_eq!(got.len(), wanted.len(), "{text}\n{got:#?}");
        for (got, want) in got.iter().zip(wanted) {
            assert!(got.starts_with(want), "{text}\n got {got}\nwant {want}");
        }
    }
}

#[test]
fn rmcp_log_defaults_to_error() {
    for (level, filter) in [("info", "rmcp=error,info"), ("debug,rmcp=info", "debug,rmcp=info")] {
        let daemon = parse(&format!("[daemon]\nlog_level = \"{level}\"")).expect("valid").daemon;
        assert_eq!(daemon.log_filter(), filter);
        assert!(tracing_subscriber::EnvFilter::try_new(daemon.log_filter()).is_ok());
    }
}

#[test]
fn invalid_mcp_servers_are_refused() {
    let server = |body: &str| problems(&format!("[mcp.servers.x]\n{body}"));
    for (body, want) in [
        ("", ":1: mcp.servers.x: a server needs either `command` or `url`"),
        ("command = \"c\"\nurl = \"http://h\"", ":3: mcp.servers.x.url: a server has either"),
        ("command = \"c\"\nheaders = { A = \"1\" }", ":3: mcp.servers.x.headers: headers belong to"),
        ("url = \"http://h\"\nargs = []", ":3: mcp.servers.x.args: args belongs to"),
        ("url = \"http://h\"\nenv = {}", ":3: mcp.servers.x.env: env belongs to"),
        ("url = \"ftp://h\"", ":2: mcp.servers.x.url: a URL starts with"),
        ("url = \"http://u:p@h/\"", ":2: mcp.servers.x.url: a URL has no user"),
        ("url = \"http:///mcp\"", ":2: mcp.servers.x.url: a URL names a host"),
        ("url = \"http://h/a b\"", ":2: mcp.servers.x.url: a URL is printable"),
        (
            "url = \"http://h\"\nheaders = { Mcp-Session-Id = \"1\" }",
            ":3: mcp.servers.x.headers: \"Mcp-Session-Id\" is set by",
        ),
        ("url = \"http://h\"\nheaders = { A = \"1\\r\\nB: 2\" }", ":3: mcp.servers.x.headers: \"A\" cannot be"),
        ("command = \"./c\"", ":2: mcp.servers.x.command: \"./c\" depends on"),
        ("command = \"c\"\nenv = { A = \"${T}\" }", ":3: mcp.servers.x.env: ${T} must be listed in pass_env"),
        ("command = \"c\"\nenv = { \"A=B\" = \"1\" }", ":3: mcp.servers.x.env: \"A=B\" cannot be"),
        ("command = \"c\"\npass_env = [\"1\"]", ":3: mcp.servers.x.pass_env: \"1\" cannot be"),
        ("command = \"c\"\nkernels = []", ":3: mcp.servers.x.kernels: no kernel may use it"),
        ("command = \"c\"\ntimeout = \"0\"", ":3: mcp.servers.x.timeout: a call's time"),
        ("command = \"c\"\nmax_instances = 0", ":3: mcp.servers.x.max_instances: 0 is out of range"),
        ("comand = \"c\"", ":2: mcp.servers.x.comand: unknown key (did you mean command?"),
    ] {
        let got = server(body);
        assert!(got.iter().any(|got| got.starts_with(want)), "{body}\n got {got:#?}\nwant {want}");
    }
    let got = problems("[mcp.servers.a__b]\ncommand = \"c\"");
    assert!(got[0].starts_with(":1: mcp.servers.a__b: a server's name has no"), "{got:?}");
}

#[test]
fn writable_config_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("config.toml");
    let write = |text: &str, mode: u32| {
        std::fs::write(&file, text).expect("written");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("mode set");
    };
    assert!(matches!(Config::read(&file), Err(ConfigError::Read { .. })));
    assert_eq!(check(&file).len(), 1);
    write("[defaults]\npids = 100\n", 0o644);
    assert_eq!(Config::read(&file).map(|config| config.defaults.pids).ok(), Some(100));
    assert_eq!(check(&file), []);
    write("[defaults]\npids = 1\n", 0o600);
    assert_eq!((check(&file)[0].line, check(&file)[0].key.as_str()), (2, "defaults.pids"));
    write("", 0o664);
    assert!(check(&file)[0].to_string().contains("can be written to by others (mode 0664) (chmod go-w)"));
    write(&"#".repeat(FILE_BYTES as usize + 1), 0o600);
    assert!(check(&file)[0].what.contains("larger than"));
    assert!(check(dir.path())[0].what.contains("not a file"));
}

#[test]
fn missing_targets_are_reported() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("config.toml");
    for (text, wanted) in [
        ("[engines.python]\npreload = []\n", None),
        ("[engines.bash]\ncommand = \"sh\"\n", None),
        ("[engines.python]\ncommand = \"python9\"\n", Some("engines.python.command")),
        ("[engines.node]\ncommand = \"/nowhere/node\"\n", Some("engines.node.command")),
        ("[sandbox]\nworker_user = \"nobody-of-that-name\"\n", Some("sandbox.worker_user")),
    ] {
        std::fs::write(&file, text).expect("written");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("mode set");
        let got: Vec<_> = check(&file).into_iter().map(|problem| (problem.line, problem.key)).collect();
        let wanted: Vec<_> = wanted.map(|key| (2, key.to_owned())).into_iter().collect();
        assert_eq!(got, wanted, "{text}");
        // The daemon starts with it, or reports the problem itself.
        assert!(Config::read(&file).is_ok(), "{text}");
    }
}

#[test]
fn log_level_directives_parse() {
    for level in ["off", "INFO", "info,ryokan::rpc=debug", "ryokan=trace", "warn,[span]=debug", "info,"] {
        assert!(parse(&format!("[daemon]\nlog_level = \"{level}\"")).is_ok(), "{level}");
    }
}

#[test]
fn config_parser_never_panics() {
    use proptest::prelude::*;
    let words = "(\\[|\\]|defaults|mcp\\.servers\\.|x|=| |\n|\"|5m|\\{|\\}|memory|command|,|-1|true|#|é){0,30}";
    proptest!(|(text in words)| {
        let _ = parse(&text);
    });
}

//! The configuration file, and the rules for paths in it.

use std::path::Path;

use ryokan::config::{Config, PathRules};

pub fn run(text: &str) {
    let file = Path::new("/etc/ryokan/config.toml");
    match Config::parse(text, file) {
        Ok(config) => {
            let again = Config::parse(&config.to_toml(), file).expect("written effective values can be read");
            assert_eq!(config, again);
            let _ = config.sandbox.deny_paths.refusal("deny_paths", Path::new("/home/a/.ssh/id"), Some(Path::new("/home/a")));
        }
        Err(problems) => {
            assert!(!problems.is_empty(), "a refusal has a reason");
            let lines = text.lines().count().max(1);
            for problem in problems {
                assert!(problem.line <= lines + 1, "line {} of {lines}", problem.line);
                let _ = problem.to_string();
            }
        }
    }
    let rules: Vec<String> = text.lines().take(16).map(str::to_owned).collect();
    if let Ok(rules) = PathRules::parse(&rules) {
        for path in ["/", "/home/a", "/home/a/.ssh", "/srv/x/y"] {
            let _ = rules.refusal("deny_paths", Path::new(path), Some(Path::new("/home/a")));
            let _ = rules.refusal("deny_paths", Path::new(path), None);
        }
    }
}

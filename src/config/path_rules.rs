//! Host paths that are never available to a kernel, for any user.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::core::pattern::Pattern;

/// A checked list of paths. Each rule refuses the path itself, everything below it and its parents.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct PathRules(Vec<Rule>);

impl TryFrom<Vec<String>> for PathRules {
    type Error = String;

    fn try_from(texts: Vec<String>) -> Result<PathRules, String> {
        PathRules::parse(&texts).map_err(|(_, why)| why)
    }
}

impl From<PathRules> for Vec<String> {
    fn from(rules: PathRules) -> Vec<String> {
        rules.0.into_iter().map(|rule| rule.text).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    text: String,
    from_home: bool,
    parts: Vec<Pattern>,
}

impl PathRules {
    /// Parses rules such as `~/.ssh` or `/srv/*/secrets`: absolute or under `~`; `*` and `?` match
    /// within one component.
    ///
    /// # Errors
    /// The index of the first invalid rule, and the reason.
    pub fn parse(rules: &[String]) -> Result<PathRules, (usize, String)> {
        let parsed = rules.iter().enumerate().map(|(i, text)| parse_rule(text).map_err(|why| (i, why)));
        parsed.collect::<Result<_, _>>().map(PathRules)
    }

    /// The rules as written.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|rule| rule.text.as_str())
    }

    /// The reason why `path` is refused to a kernel whose owner's home is `home`, with the rule;
    /// `None` if it is allowed.
    ///
    /// `key` names the list in the configuration. A path that *contains* a forbidden one is refused too: otherwise `~` would expose `~/.ssh`.
    /// `path` must be resolved, without links.
    pub fn refusal(&self, key: &str, path: &Path, home: Option<&Path>) -> Option<String> {
        let rule = self.forbids(path, home)?;
        let named = format!("the rule {:?} of sandbox.{key} in the configuration", rule.text);
        let place = rule.place(home);
        Some(match names(&place).count() > names(path).count() {
            true => format!("{} lies in it, which {named} forbids", place.display()),
            false => format!("{named} forbids it"),
        })
    }

    fn forbids(&self, path: &Path, home: Option<&Path>) -> Option<&Rule> {
        self.0.iter().find(|rule| rule.overlaps(path, home))
    }
}

impl Rule {
    /// The path of the rule, with `~` replaced by the home.
    fn place(&self, home: Option<&Path>) -> PathBuf {
        match (self.text.strip_prefix("~/"), home) {
            (Some(below), Some(home)) => home.join(below.trim_start_matches('/')),
            (Some(_) | None, _) => PathBuf::from(&self.text),
        }
    }

    fn overlaps(&self, path: &Path, home: Option<&Path>) -> bool {
        let mut parts = names(path);
        if self.from_home {
            let Some(home) = home else { return false };
            for part in names(home) {
                match parts.next() {
                    Some(name) if name == part => {}
                    Some(_) => return false,
                    None => return true,
                }
            }
        }
        self.parts.iter().zip(parts).all(|(pattern, name)| pattern.matches(&name))
    }
}

fn names(path: &Path) -> impl Iterator<Item = String> + '_ {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        Component::RootDir | Component::CurDir | Component::ParentDir | Component::Prefix(_) => None,
    })
}

fn parse_rule(text: &str) -> Result<Rule, String> {
    let wrong = |why: &str| Err(format!("{text:?} {why}"));
    let (from_home, rest) = match text.strip_prefix('~') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if !rest.starts_with('/') {
        return wrong("must start with \"/\" or \"~/\"");
    }
    let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return wrong("would forbid every path");
    }
    if parts.iter().any(|part| matches!(*part, "." | "..")) || rest.contains('\0') {
        return wrong("must not have '.' or '..' parts");
    }
    if parts.contains(&"**") {
        return wrong("must not have \"**\": a rule covers everything below its path anyway");
    }
    Ok(Rule { text: text.to_owned(), from_home, parts: parts.into_iter().map(Pattern::new).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str]) -> Result<PathRules, (usize, String)> {
        PathRules::parse(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn deny_rule_covers_whole_path() {
        let rules = rules(&["~/.ssh", "/srv/*/secret?"]).expect("valid rules");
        let home = Some(Path::new("/home/amy"));
        for (path, rule) in [
            ("/home/amy/.ssh", Some("~/.ssh")),
            ("/home/amy/.ssh/id_ed25519", Some("~/.ssh")),
            ("/home/amy", Some("~/.ssh")),
            ("/home", Some("~/.ssh")),
            ("/", Some("~/.ssh")),
            ("/srv", Some("/srv/*/secret?")),
            ("/srv/a", Some("/srv/*/secret?")),
            ("/srv/a/secret1/x", Some("/srv/*/secret?")),
            ("/srv/a/secret", None),
            ("/home/amy/.sshd", None),
            ("/home/amy/src", None),
            ("/home/bob/.ssh", None),
            ("/data", None),
        ] {
            assert_eq!(rules.forbids(Path::new(path), home).map(|rule| rule.text.as_str()), rule, "{path}");
        }
        assert_eq!(rules.forbids(Path::new("/home/amy/.ssh"), None), None);
    }

    #[test]
    fn deny_refusal_names_rule() {
        let rules = rules(&["~/.ssh", "/srv/*/secret?"]).expect("valid rules");
        let refusal = |path: &str| rules.refusal("deny_paths", Path::new(path), Some(Path::new("/home/amy")));
        let (ssh, secret) = ("the rule \"~/.ssh\" of sandbox", "the rule \"/srv/*/secret?\" of sandbox");
        for (path, start) in [
            ("/home/amy/.ssh/id", format!("{ssh}.deny_paths in the configuration forbids it")),
            ("/home/amy/.ssh", format!("{ssh}.deny_paths")),
            ("/home", format!("/home/amy/.ssh lies in it, which {ssh}.deny_paths")),
            ("/srv/a", format!("/srv/*/secret? lies in it, which {secret}.deny_paths")),
        ] {
            assert!(refusal(path).is_some_and(|why| why.starts_with(&start)), "{path}: {:?}", refusal(path));
        }
        assert_eq!(refusal("/data"), None);
    }

    #[test]
    fn invalid_deny_rules_are_refused() {
        for bad in ["", "~", "/", "~/", "ssh", "~amy/.ssh", "/a/../b", "/a/**/b"] {
            assert!(matches!(rules(&["/ok", bad]), Err((1, _))), "{bad:?}");
        }
    }
}

//! Settings of a repository's own configuration through which git would run programs.
//!
//! Code in a kernel may have written them before its mount was removed. The user's own configuration is out of its reach
//! and stays in force.

/// The filters that `git lfs install --local` configures.
const LARGE_FILES: [&str; 4] =
    ["git-lfs clean -- %f", "git-lfs smudge -- %f", "git-lfs smudge --skip -- %f", "git-lfs filter-process"];
/// The settings of git-lfs that are only values.
const LARGE_FILE_VALUES: [&str; 5] =
    ["access", "fetchexclude", "fetchinclude", "locksverify", "repositoryformatversion"];

/// The name of the first setting that may run a program, or read settings from elsewhere. `listed` is the output of
/// `git config --list -z`.
pub(super) fn unsafe_setting(listed: &[u8]) -> Option<String> {
    let entries = listed.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let mut names = entries.filter_map(|entry| {
        let (key, value) = entry.split_once('\n').unwrap_or((&entry, ""));
        is_unsafe(key, value).then(|| key.to_owned())
    });
    names.next()
}

fn is_unsafe(key: &str, value: &str) -> bool {
    let section = key.split('.').next().unwrap_or_default();
    let name = key.rsplit('.').next().unwrap_or_default();
    match section {
        "include" | "includeif" | "hook" | "credential" | "trace2" => true,
        "filter" => {
            let is_lfs = key.starts_with("filter.lfs.") && LARGE_FILES.contains(&value);
            !(name == "required" || value.is_empty() || is_lfs)
        }
        "lfs" => !LARGE_FILE_VALUES.contains(&name),
        "core" => ["alternaterefscommand", "askpass", "gitproxy", "sshcommand"].contains(&name),
        // Objects that are missing would be fetched, through programs of the configuration.
        "extensions" => name == "partialclone",
        "remote" => ["promisor", "receivepack", "uploadpack", "vcs"].contains(&name),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_recognised() {
        let listed = |text: &str| text.replace('|', "\0").into_bytes();
        for key in [
            "filter.x.clean",
            "filter.lfs.process",
            "include.path",
            "includeif.gitdir:/x.path",
            "hook.x.command",
            "core.sshcommand",
            "lfs.customtransfer.x.path",
            "lfs.extension.x.clean",
            "remote.origin.uploadpack",
        ] {
            assert_eq!(unsafe_setting(&listed(&format!("core.bare\nfalse|{key}\ntouch x|"))).as_deref(), Some(key));
        }
        let plain = "core.hookspath\n.husky|core.fsmonitor\ntouch x|remote.origin.url\nx|alias.st\n!status|core.bare|\
                     filter.lfs.clean\ngit-lfs clean -- %f|filter.lfs.required\ntrue|lfs.repositoryformatversion\n0|";
        assert_eq!(unsafe_setting(&listed(plain)), None);
    }
}

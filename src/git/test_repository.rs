//! A repository for tests of this module.

use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use super::{Git, Repository, State};

pub(super) struct TestRepository {
    dir: tempfile::TempDir,
    pub repository: Repository,
}

impl TestRepository {
    /// With a commit of these files.
    pub fn with(files: &[(&str, &str)]) -> TestRepository {
        let dir = tempfile::tempdir().expect("a folder");
        let place = dir.path().join("code");
        std::fs::create_dir_all(place.join(".git")).expect("made");
        std::fs::create_dir(dir.path().join("scratch")).expect("made");
        let git = Rc::new(Git::open(dir.path().join("log")).expect("opened"));
        let made = TestRepository { repository: Repository::open(&git, &place).expect("opened"), dir };
        made.git(&["init", "-q", "-b", "main"]);
        files.iter().for_each(|(name, text)| made.write(name, text));
        made.git(&["add", "-A"]);
        made.git(&["commit", "-q", "-m", "first"]);
        made
    }

    pub fn place(&self, name: &str) -> PathBuf {
        self.repository.path().join(name)
    }

    pub fn scratch(&self) -> PathBuf {
        self.dir.path().join("scratch")
    }

    pub fn git(&self, args: &[&str]) -> String {
        let names = ["-c", "user.name=t", "-c", "user.email=t@t"];
        let mut command = Command::new("git");
        let output = command.arg("-C").arg(self.repository.path()).args(names).args(args).output().expect("git runs");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    pub fn write(&self, name: &str, text: &str) {
        let path = self.place(name);
        std::fs::create_dir_all(path.parent().expect("below the repository")).expect("made");
        std::fs::write(path, text).expect("written");
    }

    pub fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.place(name)).ok()
    }

    /// The present state, whose objects are in the repository.
    pub async fn state(&self) -> State {
        self.repository.state(&self.scratch(), true).await.expect("read")
    }

    /// Brings the repository to a state.
    pub async fn switch(&self, to: &State) {
        self.state().await;
        self.repository.switch(&self.scratch(), to, true).await.expect("switched");
    }
}

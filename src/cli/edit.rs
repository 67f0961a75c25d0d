//! `ryokan edit`: a file of a kernel in the user's editor.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use clap::Args;

use super::context::Context;
use super::copy::{Place, WaitArgs};
use super::drive::Signals;
use super::failure::Failure;
use super::render;
use crate::core::error::{Error, ErrorCode};
use crate::core::files::{FileAttributes, FileError, FileInfo, FileKind};
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::rpc::client::FilesClient;

/// Tried in order without `$VISUAL` and `$EDITOR`; the first is Debian's choice of the host.
const EDITORS: [&str; 2] = ["editor", "vi"];

/// `ryokan edit`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan edit demo:app.py
  EDITOR=nano ryokan edit demo:config/settings.toml

Uses $VISUAL, else $EDITOR, else `editor` or `vi`. The file is written back when the editor ends and it has changed, whole or not at all, with its permissions. If code changed the file while the editor was open, it is not overwritten: your text is kept on this host, and its path is printed. Only a change in the moment between this check and the write is lost. A file that does not exist is created.")]
pub struct EditArgs {
    /// NAME:PATH
    #[arg(value_name = "NAME:PATH")]
    pub file: std::ffi::OsString,
    /// Waiting for transitions.
    #[command(flatten)]
    pub wait: WaitArgs,
}

/// Edits a file of a kernel.
pub async fn edit(context: &Context, args: EditArgs) -> Result<(), Failure> {
    let Place::Kernel { name, path } = Place::parse(&args.file) else {
        return Err(Failure::usage("no kernel is named", "write it as NAME:PATH, such as demo:app.py"));
    };
    if !context.terminal.stdin || !context.terminal.stdout {
        return Err(Failure::usage("an editor needs a terminal", "copy the file with cp instead"));
    }
    let (kernel, _) = context.kernel(&name).await?;
    let files = kernel.files_with(args.wait.held()).await?;
    let (before, text) = read(&files, &path).await?;
    let draft = Draft::new(&path, &text)?;
    // The terminal's signals are the editor's while it runs.
    let _editors = Signals::catch()?;
    if let Err(failure) = run_editor(&draft.file).await {
        if draft.read().is_ok_and(|edited| edited == text) {
            draft.remove();
        } else {
            context.say(&format!("nothing was written; your text is in {}", draft.file.display()));
        }
        return Err(failure);
    }
    let edited = draft.read()?;
    let shown = render::plain(&String::from_utf8_lossy(&path));
    if edited == text && before.is_some() {
        draft.remove();
        return context.show(
            || serde_json::json!({ "changed": false, "bytes": text.len() }),
            || format!("{shown} is unchanged\n"),
        );
    }
    let mut signals = Signals::catch()?;
    let written = tokio::select! {
        written = write_back(&files, &path, before.as_ref(), &edited) => written,
        code = signals.any() => Err(Failure::Quiet(code)),
    };
    if let Err(failure) = written {
        context.say(&format!("your text is in {}", draft.file.display()));
        return Err(failure);
    }
    draft.remove();
    context.show(
        || serde_json::json!({ "changed": true, "bytes": edited.len() }),
        || format!("wrote {shown} ({})\n", format_size(edited.len() as u64)),
    )
}

/// A file of the kernel with its attributes, if it exists.
async fn read(files: &FilesClient, path: &[u8]) -> Result<(Option<FileInfo>, Vec<u8>), Failure> {
    let shown = String::from_utf8_lossy(path).into_owned();
    let Some(info) = present(files, path).await? else { return Ok((None, Vec::new())) };
    match info.kind {
        FileKind::File if info.bytes <= limits::EDITED_BYTES => {}
        FileKind::File => {
            let most = format_size(limits::EDITED_BYTES);
            let error = Error::invalid(format!("{shown} is larger than {most}"));
            return Err(error.hint("copy it to this host and back with cp").into());
        }
        FileKind::Directory => return Err(FileError::IsDirectory.on(&shown).hint("name a file in it").into()),
        FileKind::Symlink => {
            // Written back, it would become a file.
            let target = render::plain(&String::from_utf8_lossy(&info.target));
            let error = Error::invalid(format!("{shown} is a symbolic link to {target}"));
            return Err(error.hint("edit the file to which it leads").into());
        }
        FileKind::Other => {
            let error = Error::invalid(format!("{shown} is a pipe, a socket or a device"));
            return Err(error.hint("name a regular file").into());
        }
    }
    let text = files.read(path).await?;
    Ok((Some(info), text))
}

/// Writes the edited text, unless the file is no longer the one that the editor began with. The daemon has no write on a
/// condition: the check comes when only the last call is left.
async fn write_back(files: &FilesClient, path: &[u8], before: Option<&FileInfo>, edited: &[u8]) -> Result<(), Failure> {
    let mut upload = files.create(path, FileAttributes::default()).await?;
    upload.write(edited).await?;
    if present(files, path).await?.as_ref() != before {
        let error = Error::conflict(format!("{} changed while it was edited", String::from_utf8_lossy(path)));
        return Err(error.reason("file_changed").hint("compare the two, then copy yours with cp").into());
    }
    upload.finish().await?;
    Ok(())
}

/// The attributes of a file of the kernel, if it exists; of a link, its own.
async fn present(files: &FilesClient, path: &[u8]) -> Result<Option<FileInfo>, Failure> {
    match files.stat(path, false).await {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.code == ErrorCode::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The text on this host, while it is edited: private, and under the file's own name, by which editors choose a mode.
struct Draft {
    folder: PathBuf,
    file: PathBuf,
}

impl Draft {
    fn new(path: &[u8], text: &[u8]) -> Result<Draft, Failure> {
        let name = Path::new(std::ffi::OsStr::from_bytes(path)).file_name().unwrap_or("file".as_ref());
        let template = std::env::temp_dir().join("ryokan-edit-XXXXXX");
        let folder = nix::unistd::mkdtemp(&template)
            .map_err(|error| Failure::of_file("make a folder for", &template, &error.into()))?;
        let file = folder.join(name);
        let written = File::options().write(true).create_new(true).mode(0o600).open(&file);
        let draft = Draft { folder, file };
        written.and_then(|mut file| file.write_all(text)).map_err(|error| {
            draft.remove();
            Failure::of_file("write", &draft.file, &error)
        })?;
        Ok(draft)
    }

    fn read(&self) -> Result<Vec<u8>, Failure> {
        let mut text = Vec::new();
        // One byte more shows that it is too large.
        let read = File::open(&self.file).and_then(|file| file.take(limits::EDITED_BYTES + 1).read_to_end(&mut text));
        read.map_err(|error| Failure::of_file("read", &self.file, &error))?;
        if text.len() as u64 > limits::EDITED_BYTES {
            let most = format_size(limits::EDITED_BYTES);
            let hint = format!("it is in {}; copy it with cp", self.file.display());
            return Err(Error::invalid(format!("the text is larger than {most}")).hint(hint).into());
        }
        Ok(text)
    }

    /// Also what an editor left beside it.
    fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Runs the editor to its end.
async fn run_editor(file: &Path) -> Result<(), Failure> {
    let chosen = ["VISUAL", "EDITOR"].iter().filter_map(std::env::var_os).find(|value| !value.is_empty());
    let editor =
        chosen.or_else(|| EDITORS.iter().find(|name| is_installed(name)).map(Into::into)).ok_or_else(|| {
            Error::unsupported("no editor is installed").hint("set EDITOR to the command of one, such as EDITOR=nano")
        })?;
    // A command of the shell, as git takes it.
    let mut command = tokio::process::Command::new("/bin/sh");
    let mut line = editor.clone();
    line.push(" \"$@\"");
    command.arg("-c").arg(line).arg("sh").arg(file);
    let ended = command.status().await.map_err(|error| Failure::of_file("run", Path::new(&editor), &error))?;
    if !ended.success() {
        let text = format!("the editor {} failed: {ended}", editor.display());
        return Err(Error::conflict(text)
            .reason("editor_failed")
            .hint("set EDITOR to the command of an editor")
            .into());
    }
    Ok(())
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| {
        std::fs::metadata(folder.join(program))
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    })
}

//! The repositories of an imported group, with their submodules: made beside their places, or completed where they are.

use std::path::{Path, PathBuf};

use super::import::Arriving;
use super::import_end::{reference, repository_of};
use super::member_places::Placed;
use super::{access, objects, submodules};
use crate::core::error::{Error, Result};
use crate::core::freeze::RepositoryPart;
use crate::core::freeze::submodule::join;
use crate::git::{Repository, Room, State, scratch_of};

/// Where a repository of a file comes to be.
enum Place<'a> {
    /// A new directory.
    New(&'a Path),
    /// A new submodule of this new repository.
    Inside(&'a Repository, &'a str),
    /// It is there.
    There(Repository),
}

impl Arriving<'_> {
    /// Makes a new repository beside its place, or reads what an existing one lacks, and checks that the captured work
    /// fits.
    pub(super) async fn repository(&self, one: &Placed, part: &RepositoryPart) -> Result<()> {
        let (host, folder) = (self.supervisor.host(), self.folder(one)?);
        let path = PathBuf::from(repository_of(&one.member).unwrap_or_default());
        // Again: a mount may have been granted since.
        access::unwritten(self.supervisor, &path).await?;
        let new = self.repositories.iter().find(|new| Path::new(&new.place) == path);
        let step = async {
            let place = match new {
                Some(new) => {
                    access::private_ancestors(&path)?;
                    Place::New(Path::new(&new.beside))
                }
                None => {
                    let there = Repository::open(&access::git(host).await?, &path)?;
                    access::trusted_repository(self.supervisor, self.group.uid, &there).await?;
                    Place::There(there)
                }
            };
            let device: &Path = if path.exists() { &path } else { path.parent().unwrap_or(&path) };
            self.bring((&one.member.name, ""), part, place, &folder, device).await
        };
        self.in_time(step).await
    }

    /// Brings the history of one repository, and of the submodules in it.
    async fn bring(
        &self,
        (member, submodule): (&str, &str),
        part: &RepositoryPart,
        place: Place<'_>,
        folder: &Path,
        device: &Path,
    ) -> Result<()> {
        let host = self.supervisor.host();
        std::fs::create_dir_all(folder).map_err(|error| Error::unavailable(error.to_string()))?;
        let (history, pack, apart) = (folder.join("history"), folder.join("pack"), folder.join("verify"));
        let is_its = |one: &&crate::bundle::History| (&*one.member, &*one.submodule) == (member, submodule);
        let packed = self.contents.head.histories.iter().find(is_its);
        let packed = packed.ok_or_else(|| Error::corrupt("the file lacks its history"))?;
        objects::get(host, packed.pack, &history).await?;
        let room = Room::at(device);
        // Until it is whole, it is apart: there on the device of the store.
        let most = room.bytes.min(Room::at(folder).bytes);
        let (repository, is_new) = match place {
            Place::New(beside) => {
                let git = access::git(host).await?;
                let made = Repository::create(&git, beside, &history, &part.head, room).await?;
                access::trusted_repository(self.supervisor, self.group.uid, &made).await?;
                (made, true)
            }
            Place::Inside(outer, path) => (outer.create_submodule(path, &history, &part.head, room).await?, true),
            Place::There(there) => {
                there.check_settings().await?;
                there.read_history(&history, &part.head.commit, &apart, most).await?;
                (there, false)
            }
        };
        if is_new {
            // Its branch may move on.
            repository.keep(&reference(self.group.id), &part.head.commit).await?;
        }
        if let Some(digest) = part.pack {
            objects::get(host, digest, &pack).await?;
            repository.read_foreign(&pack, &apart, most).await?;
        }
        repository.verify(&apart, &State::from(part), None).await?;
        repository.check_size(&part.work_tree, Some(&apart), room).await?;
        for one in &part.submodules {
            let Some(inner) = &one.part else { continue };
            let place = match is_new {
                true => Place::Inside(&repository, &one.path),
                false => Place::There(submodules::initialised(&repository, one)?),
            };
            let (name, folder) = (join(submodule, &one.path), scratch_of(folder, &one.path));
            Box::pin(self.bring((member, &name), inner, place, &folder, device)).await?;
        }
        Ok(())
    }

    /// Adds the history to a repository that was there. Objects that nothing refers to stay if the import fails after it.
    pub(super) async fn complete(&self, one: &Placed, part: &RepositoryPart) -> Result<()> {
        let host = self.supervisor.host();
        let path = PathBuf::from(repository_of(&one.member).unwrap_or_default());
        let repository = Repository::open(&access::git(host).await?, &path)?;
        access::trusted_repository(self.supervisor, self.group.uid, &repository).await?;
        let (folder, kept) = (self.folder(one)?, reference(self.group.id));
        let step = async {
            for (repository, folder, part) in submodules::steps(&repository, &folder, part)? {
                repository.check_settings().await?;
                repository.keep_history(&folder.join("history"), &part.head.commit, &kept).await?;
            }
            Ok(())
        };
        self.in_time(step).await
    }
}
